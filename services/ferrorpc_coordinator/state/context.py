"""What the parts of one job share: the time, deadlines, journal rows, and ways to answer requests and push events."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

from google.protobuf.message import Message

from ferrorpc.errors import LimitExceededError
from ferrorpc.v1 import (
    barrier_pb2,
    error_pb2,
    nccl_pb2,
    rendezvous_pb2,
    session_pb2,
    store_pb2,
)
from ferrorpc_coordinator.state.deadlines import Deadlines
from ferrorpc_coordinator.state.durable_state import DurableState
from ferrorpc_coordinator.state.effect_buffer import EffectBuffer
from ferrorpc_coordinator.state.effects import Answer, UnaryResponse
from ferrorpc_coordinator.state.member import Member
from ferrorpc_coordinator.state.occurrences import OccurrenceLog
from ferrorpc_coordinator.state.settings import Limits, Settings

_OUTCOME: Final[dict[type[Message], str]] = {
    error_pb2.ErrorDetail: "error",
    rendezvous_pb2.JoinResponse: "join",
    rendezvous_pb2.LeaveResponse: "leave",
    barrier_pb2.BarrierResponse: "barrier",
    store_pb2.StoreResponse: "store",
    nccl_pb2.CommBootstrapResponse: "comm_bootstrap",
    session_pb2.ReportResponse: "report",
    session_pb2.DescribeResponse: "describe",
}


class SharedState:
    """State shared by all jobs of a coordinator.

    `now` is set at the start of each step, in nanoseconds of running time. `full` is set with each request: whether the
    journal's disk is full. `durable` is whether there is a journal still.
    """

    def __init__(self, settings: Settings, durable_state: DurableState, mint: Callable[[], str]) -> None:
        self.settings = settings
        self.durable_state = durable_state
        self.effects = EffectBuffer(durable_state)
        self.deadlines = Deadlines()
        self.mint = mint
        self.now = 0
        self.full = False
        self.durable = settings.durable
        self.last_heard = 0
        """When the last frame or Hello came, of any member. Strangers and unary calls, such as probes, may be on this host."""
        self.silence_ended = -1
        """When somebody was last heard of again, after nobody had been for several beats or all streams had ended."""

    @property
    def hears_nobody(self) -> bool:
        """Whether nobody has been heard of for several beats."""
        return self.now - self.last_heard >= self.settings.silence_ns

    def heard(self, *, first: bool = False) -> None:
        """Somebody is heard of; `first` with the only stream that is open. Who is refused gets none, however often he asks."""
        if first or self.hears_nobody:
            self.silence_ended = self.now
        self.last_heard = self.now


@dataclass(frozen=True, slots=True)
class Requester:
    """The sender of a request: a member's session, or a unary call (then `member` is None)."""

    number: int
    """The request's sequence number in its session, or the number of the unary call."""
    member: Member | None
    client: str
    """The client whose request ids it uses."""

    def __str__(self) -> str:
        return str(self.member) if self.member is not None else f"client {self.client}"


class JobContext:
    """The shared state as one job sees it: its keys, rows and deadlines are prefixed with the job's name."""

    def __init__(self, shared: SharedState, job: str) -> None:
        self.shared = shared
        self.job = job
        self.newest_generation = 0
        self.durable_state = shared.durable_state
        self.occurrences = OccurrenceLog(job, lambda: shared.now, shared.effects.note)

    @property
    def now(self) -> int:
        """The current time, in nanoseconds of running time."""
        return self.shared.now

    @property
    def last_generation(self) -> int:
        """The number after which those of this job go on: of its newest generation, or else the highest of removed jobs."""
        return self.newest_generation or self.durable_state.removed_generation

    @property
    def settings(self) -> Settings:
        """The coordinator's settings."""
        return self.shared.settings

    @property
    def limits(self) -> Limits:
        """The coordinator's limits."""
        return self.shared.settings.limits

    def arm(self, key: tuple[Hashable, ...], when: int, action: Callable[[], None]) -> None:
        """Sets or moves a deadline of this job."""
        self.shared.deadlines.set((self.job, *key), when, action)

    def disarm(self, key: tuple[Hashable, ...]) -> None:
        """Removes a deadline of this job, if it is set."""
        self.shared.deadlines.drop((self.job, *key))

    def put(self, table: str, key: str, row: Message) -> None:
        """Writes a row of this job."""
        self.durable_state.put(table, f"{self.job}/{key}", row.SerializeToString())

    def remove(self, table: str, key: str) -> None:
        """Removes a row of this job."""
        self.durable_state.remove(table, f"{self.job}/{key}")

    def require_disk(self, refusal: str) -> None:
        """Raises LimitExceededError, which begins with `refusal`, if the journal's disk is full."""
        if self.shared.full:
            raise LimitExceededError(
                f"{refusal} for now: the disk of the coordinator's journal is full",
                hint="make room on that disk, raise the coordinator's `ulimit -f`, or delete keys; it is then accepted again",
                retryable=True,
            )

    # -- answers -------------------------------------------------------------------------------------------------------

    def answer(self, requester: Requester, message: Answer) -> None:
        """Answers one request, and keeps the answer."""
        self.answer_many([requester], message, keep=True)

    def answer_many(
        self, requesters: Iterable[Requester], message: Answer, own: Iterable[Message] = (), *, keep: bool = False
    ) -> None:
        """Answers many requests with the same message, encoded once.

        Args:
            own: for each requester, the fields in which its answer differs; none if all answers are the same.
            keep: whether sessions keep the answer for a while, in case the client repeats the request. Else the caller must
                keep the outcome for that.
        """
        recipients: list[tuple[int, bytes]] = []
        field = _OUTCOME[type(message)]
        for requester, differing in zip_longest(requesters, own):
            member = requester.member
            if member is None:
                self.shared.effects.reply(self, requester.number, _unary_response(message))
                continue
            member.open_requests.discard(requester.number)
            if keep:
                self._remember(member, requester.number, message)
            if member.stream is not None:
                overlay = session_pb2.ServerFrame()
                overlay.result.sequence = requester.number
                if differing is not None:
                    getattr(overlay.result, field).CopyFrom(differing)
                recipients.append((member.stream, overlay.SerializeToString()))
        if recipients:
            frame = session_pb2.ServerFrame()
            getattr(frame.result, field).CopyFrom(message)
            self.shared.effects.send(self, frame, recipients)

    def resend(self, member: Member, number: int) -> bool:
        """Sends the kept answer of this request again; False if there is none."""
        kept = member.answers.get(number)
        if kept is not None:
            self.answer_many([Requester(number, member, member.client)], kept)
        return kept is not None

    def push(self, members: Iterable[Member], event: session_pb2.Event) -> int:
        """Sends an event to those of these members that are connected; returns how many."""
        recipients = [(member.stream, b"") for member in members if member.stream is not None]
        if recipients:
            self.shared.effects.send(self, session_pb2.ServerFrame(event=event), recipients)
        return len(recipients)

    def _remember(self, member: Member, number: int, answer: Answer) -> None:
        size = answer.ByteSize()
        if size > self.limits.remembered_result_bytes:
            return
        member.answers[number] = answer
        member.answer_bytes += size
        while len(member.answers) > self.limits.remembered_results or member.answer_bytes > self.limits.remembered_result_bytes:
            _, oldest = member.answers.popitem(last=False)
            member.answer_bytes -= oldest.ByteSize()


def _unary_response(message: Answer) -> UnaryResponse | error_pb2.ErrorDetail:
    if isinstance(message, error_pb2.ErrorDetail):
        return message
    if isinstance(message, store_pb2.StoreResponse):
        return session_pb2.UnaryStoreResponse(response=message)
    if isinstance(message, barrier_pb2.BarrierResponse):
        return session_pb2.UnaryBarrierResponse(response=message)
    return session_pb2.UnaryReportResponse()
