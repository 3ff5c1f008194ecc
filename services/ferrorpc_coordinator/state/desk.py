"""The desk of one job: where its parts read the time, keep their deadlines, write rows and hand out answers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import Message

from ferrorpc.v1 import (
    barrier_pb2,
    error_pb2,
    nccl_pb2,
    rendezvous_pb2,
    session_pb2,
    store_pb2,
)
from ferrorpc_coordinator.state.answers import Answers
from ferrorpc_coordinator.state.chronicle import Chronicle
from ferrorpc_coordinator.state.deadlines import Deadlines
from ferrorpc_coordinator.state.effects import UnaryResponse
from ferrorpc_coordinator.state.ledger import Ledger
from ferrorpc_coordinator.state.member import Member
from ferrorpc_coordinator.state.settings import Limits, Settings

Answer = (
    error_pb2.ErrorDetail
    | rendezvous_pb2.JoinResponse
    | rendezvous_pb2.LeaveResponse
    | barrier_pb2.BarrierResponse
    | store_pb2.StoreResponse
    | nccl_pb2.CommBootstrapResponse
    | session_pb2.ReportResponse
    | session_pb2.DescribeResponse
)
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


class World:
    """What all jobs share. `now` is set at the start of each step, in lived nanoseconds; `full` with each request."""

    def __init__(self, settings: Settings, ledger: Ledger, mint: Callable[[], str]) -> None:
        self.settings = settings
        self.ledger = ledger
        self.answers = Answers(ledger)
        self.deadlines = Deadlines()
        self.mint = mint
        self.now = 0
        self.full = False


@dataclass(frozen=True, slots=True)
class Asker:
    """Who is to be answered: a request of a member's session, or a unary call (no member)."""

    number: int
    """The request's sequence number, or the call."""
    member: Member | None
    client: str
    """Whose request ids it uses."""

    def __str__(self) -> str:
        return str(self.member) if self.member is not None else f"client {self.client}"


class Desk:
    """One job's share of the world."""

    def __init__(self, world: World, job: str) -> None:
        self.world = world
        self.job = job
        self.newest_generation = 0
        self.ledger = world.ledger
        self.chronicle = Chronicle(job, lambda: world.now, world.answers.note)

    @property
    def now(self) -> int:
        """The present, in lived nanoseconds."""
        return self.world.now

    @property
    def settings(self) -> Settings:
        """Durations."""
        return self.world.settings

    @property
    def limits(self) -> Limits:
        """Bounds."""
        return self.world.settings.limits

    def arm(self, key: tuple[Hashable, ...], when: int, action: Callable[[], None]) -> None:
        """Sets a deadline of this job."""
        self.world.deadlines.set((self.job, *key), when, action)

    def disarm(self, key: tuple[Hashable, ...]) -> None:
        """Drops a deadline of this job."""
        self.world.deadlines.drop((self.job, *key))

    def put(self, table: str, key: str, row: Message | bytes) -> None:
        """Writes a row of this job."""
        self.ledger.put(table, f"{self.job}/{key}", row if isinstance(row, bytes) else row.SerializeToString())

    def remove(self, table: str, key: str) -> None:
        """Removes a row of this job."""
        self.ledger.remove(table, f"{self.job}/{key}")

    # -- answers -------------------------------------------------------------------------------------------------------

    def answer(self, asker: Asker, message: Answer) -> None:
        """Answers one request. A session's answer is kept for a while, in case the request is repeated."""
        member = asker.member
        if member is None:
            self.world.answers.reply(self, asker.number, _unary(message))
            return
        result = _result(message)
        result.sequence = asker.number
        member.open_requests.discard(asker.number)
        self._keep(member, result)
        if member.stream is not None:
            self.world.answers.send(self, member.stream, session_pb2.ServerFrame(result=result))

    def answer_many(self, askers: Iterable[tuple[Asker, Message | None]], message: Answer) -> None:
        """Answers many requests alike; what differs, besides the number, is merged in.

        These answers are not kept with the sessions: whoever calls this keeps the outcome and can answer again.
        """
        recipients: list[tuple[int, bytes]] = []
        field = _OUTCOME[type(message)]
        for asker, own in askers:
            member = asker.member
            if member is None:
                self.world.answers.reply(self, asker.number, _unary(message))
                continue
            member.open_requests.discard(asker.number)
            if member.stream is not None:
                overlay = session_pb2.ServerFrame()
                overlay.result.sequence = asker.number
                if own is not None:
                    getattr(overlay.result, field).CopyFrom(own)
                recipients.append((member.stream, overlay.SerializeToString()))
        if recipients:
            frame = session_pb2.ServerFrame()
            frame.result.CopyFrom(_result(message))
            self.world.answers.send_many(self, frame, recipients)

    def repeat(self, member: Member, number: int) -> bool:
        """Sends a kept answer again; False when there is none."""
        result = member.results.get(number)
        if result is None:
            return False
        if member.stream is not None:
            self.world.answers.send(self, member.stream, session_pb2.ServerFrame(result=result))
        return True

    def push(self, members: Iterable[Member], event: session_pb2.Event) -> int:
        """Tells every connected one of these members; returns how many they are."""
        recipients = [(member.stream, b"") for member in members if member.stream is not None]
        if recipients:
            self.world.answers.send_many(self, session_pb2.ServerFrame(event=event), recipients)
        return len(recipients)

    def _keep(self, member: Member, result: session_pb2.Result) -> None:
        size = result.ByteSize()
        if size > self.limits.remembered_result_bytes:
            return
        member.results[result.sequence] = result
        member.result_bytes += size
        while len(member.results) > self.limits.remembered_results or member.result_bytes > self.limits.remembered_result_bytes:
            _, oldest = member.results.popitem(last=False)
            member.result_bytes -= oldest.ByteSize()


def _result(message: Answer) -> session_pb2.Result:
    fields: dict[str, Any] = {_OUTCOME[type(message)]: message}
    return session_pb2.Result(**fields)


def _unary(message: Answer) -> UnaryResponse | error_pb2.ErrorDetail:
    if isinstance(message, error_pb2.ErrorDetail):
        return message
    if isinstance(message, store_pb2.StoreResponse):
        return session_pb2.UnaryStoreResponse(response=message)
    if isinstance(message, barrier_pb2.BarrierResponse):
        return session_pb2.UnaryBarrierResponse(response=message)
    return session_pb2.UnaryReportResponse()
