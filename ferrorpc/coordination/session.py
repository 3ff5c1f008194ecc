"""A member's session with a coordinator service."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Self

from ferrorpc.config import Config, host_name
from ferrorpc.coordination import limits, process_exit
from ferrorpc.coordination.base import MemberReport, Membership, Session, before_joining
from ferrorpc.coordination.channel import ChannelFactory, token_for
from ferrorpc.coordination.connection import Connection
from ferrorpc.coordination.explain import explain_wait, member_report
from ferrorpc.coordination.ordinals import told_to
from ferrorpc.coordination.pending_requests import Request
from ferrorpc.coordination.remote_store import RemoteStore, milliseconds
from ferrorpc.coordination.session_stream import SessionStream
from ferrorpc.errors import (
    BarrierTimeoutError,
    CollectiveTimeoutError,
    ConfigError,
    FerroError,
    GroupClosedError,
    PeerLostError,
    RendezvousTimeoutError,
)
from ferrorpc.generation_errors import error_on_rank, member_left, reason_of
from ferrorpc.guard import SYSTEM_CLOCK, Latch, seconds_of
from ferrorpc.logs import clear_log_origin, set_log_origin, tell
from ferrorpc.types import Assignment, Peer
from ferrorpc.v1 import barrier_pb2, identity_pb2, nccl_pb2, rendezvous_pb2, session_pb2 as wire
from ferrorpc.versions import own_version
from ferrorpc.wire.error_detail import detail_of, encodable, restore
from ferrorpc.wire.limits import DATA_PROTOCOL_VERSION, SESSION_PROTOCOL_VERSION

LAST_CALL_SECONDS: Final = 1.0
"""How long an elastic rendezvous stays open for more members once it has enough."""
ROUND_SECONDS: Final = 1.0
"""How long a member waits for the others at least, even if the wait for the coordinator took nearly all its time."""
ASK_AGAIN_SECONDS: Final = 1.0
"""How long a member that was refused for one that may be dead, or about to leave, waits before it asks again."""
REPORT_SECONDS: Final = 1.0
LEAVE_SECONDS: Final = 0.7
LEAVE_WHILE_UP_SECONDS: Final = 10.0
"""How long a Leave is waited for while the coordinator can be reached. It, or a thread of this process, may stand still for
seconds; and until it knows, this rank's end would be a death that ends the others' generation."""
DETAIL_BYTES_MAX: Final = 64 << 10
UNHEALTHY: Final = ("stalled", "suspect")
"""States of living members that explanations of waits mention."""
_log = logging.getLogger("ferrorpc.coordination")


class RemoteSession(Session):
    """A membership in a job, from `join` to `leave`. It sends heartbeats while the training code computes.

    Args:
        address: host:port of the coordinator.
        name: unique among the living members of the job.
        policy: fewest and most members of a generation.
        pinned_rank: the rank that a launcher gave; joining fails if it cannot be had.
        hinted_rank: the rank to get if it is free.
        worker_address: returns host:port where the other ranks reach this one's worker server. Called for each Hello, because
            it may have changed: the next generation gets the new one.
        launch: the id that a launcher which reports exits gave this start of the process; without dots.
        labels: other facts to publish about this member.
        config: the settings timeout, heartbeat_interval, lease, max_outage, token_file and tls_*.
    """

    def __init__(
        self,
        address: str,
        *,
        job: str,
        name: str,
        policy: tuple[int, int],
        pinned_rank: int | None = None,
        hinted_rank: int | None = None,
        worker_address: Callable[[], str] = lambda: "",
        host: str = "",
        launch: str = "",
        labels: Mapping[str, str] | None = None,
        config: Config,
    ) -> None:
        self.job = job
        self.name = name
        self.clock = SYSTEM_CLOCK
        self._timeout = float(config["timeout"])
        self._rendezvous = f"the rendezvous of job {job!r}"
        self._policy = policy
        self._pinned_rank = -1 if pinned_rank is None else pinned_rank
        self._hinted_rank = -1 if hinted_rank is None else hinted_rank
        all_labels = dict(labels or {}) | {"pid": str(os.getpid()), "data_protocol": str(DATA_PROTOCOL_VERSION)}
        self._hello = wire.Hello(
            protocol_version=SESSION_PROTOCOL_VERSION,
            version=own_version(),
            job=job,
            name=name,
            instance_id=f"{launch}.{secrets.token_hex(8)}",
            lease_ms=0 if config.source("lease") == "default" else milliseconds(config["lease"]),
            host=host or host_name(),
            labels=[identity_pb2.Label(name=label, value=value) for label, value in all_labels.items()],
        )
        self._token = token_for(address, config)
        self._worker_address = worker_address
        self.membership = before_joining(job)
        self._returned = self.membership
        """The last one that `rejoin` returned. A later one, which came after `rejoin` had given up, is for its next caller."""
        self._pending: tuple[str, ...] = ()
        self._links_lost: dict[tuple[Latch, int], str] = {}
        """By generation and peer, the reason."""
        self._reported: Latch | None = None
        self._leave_callbacks: list[Callable[[], None]] = []
        self.left = False
        """It leaves, or has left."""
        self._is_leaving = self._is_over = False
        self._connection = Connection(
            ChannelFactory(address, job, config),
            self,
            self.clock,
            join_timeout=self._timeout,
            max_outage=config["max_outage"],
            heartbeat_interval=config["heartbeat_interval"],
        )
        self.store = RemoteStore(self._connection, self._timeout, lambda: self.activity.waiting(self.clock))

    def join(self) -> Self:
        """Joins the job. Returns when the rendezvous is complete and `membership` is set. The timeout bounds all of it:
        connecting to the coordinator, and waiting for the other members.

        Raises:
            CoordinatorUnavailableError: the coordinator did not answer within the timeout.
            RendezvousTimeoutError: naming the missing members.
            ConfigError: the rank, the name or the policy contradicts that of another member.
        """
        process_exit.register(self)
        until = self.clock.now() + self._timeout
        try:
            self._connection.start()
            self._connection.wait_until_up(self._rendezvous, until)
            self.rejoin(max(until - self.clock.now(), min(self._timeout, ROUND_SECONDS)))
        except BaseException as error:  # an interrupt may come when the others have their ranks, and wait for this one
            self.leave("" if isinstance(error, FerroError) else reason_of(error))
            raise
        return self

    # -- the generation ------------------------------------------------------------------------------------------------

    def rejoin(self, timeout: float) -> Membership:
        until, refused = self.clock.now() + timeout, ""
        while True:
            try:
                self._ask_for_a_place(until - self.clock.now())
                return self.membership
            except ConfigError as error:
                again = self.clock.now() + ASK_AGAIN_SECONDS
                if self._connection.ended_by is not None:  # it sends no other request
                    raise self._connection.ended_by.again() from None
                if not error.retryable or again >= until:
                    raise
                if error.message != refused:
                    refused = error.message
                    _log.warning("%s asks again for up to %.0f s: %s", self.name, until - self.clock.now(), refused)
            self._connection.wait_for_end(again)

    def _ask_for_a_place(self, timeout: float) -> None:
        """Asks once for a place in the next generation, and waits for it."""
        low, high = self._policy
        rank = self.membership.assignment.rank
        request = rendezvous_pb2.JoinRequest(
            policy=rendezvous_pb2.WorldPolicy(
                min_size=low, max_size=high, last_call_ms=0 if low == high else milliseconds(LAST_CALL_SECONDS)
            ),
            after_generation=self._number_of(self._returned),
            pinned_rank=self._pinned_rank,
            hinted_rank=self._hinted_rank if rank < 0 else rank,
            timeout_ms=milliseconds(timeout),
        )
        self._connection.ask(self._rendezvous, timeout, partial(RendezvousTimeoutError, []), join=request)
        self._returned = self.membership

    def _report(self, failure: FerroError, latch: Latch) -> None:
        """As `Latch.end`, of a generation of this session."""
        membership = self.membership
        failure = failure.again()  # without its traceback, which would keep the arrays of the step alive
        if latch is not membership.latch:
            self._trip(latch, failure)
            return
        if latch.cause is not None or self._reported is latch:
            return
        request = wire.ReportRequest(generation=membership.assignment.generation, failure=_bounded(failure))
        try:
            self._connection.post("the report of a failure", latch, report=request)
            self.clock.call_at(self.clock.now() + REPORT_SECONDS, lambda: self._trip(latch, failure))
            self._reported = latch  # last: one that was interrupted is made again, and the first report counts
        except FerroError:
            self._trip(latch, failure)

    def report_link_lost(self, peer: int, reason: str, latch: Latch | None = None) -> None:
        membership = self.membership
        is_over = latch is not None and latch is not membership.latch
        if is_over or membership.latch.cause is not None or (membership.latch, peer) in self._links_lost:
            return
        self._links_lost[membership.latch, peer] = reason
        lost = wire.LinkLost(peer_rank=peer, reason=encodable(reason[:1024]))
        request = wire.ReportRequest(generation=membership.assignment.generation, link_lost=lost)
        label = f"the report of the lost link to rank {peer}"
        try:
            self._connection.post(label, membership.latch, report=request)
        except FerroError as error:
            self._trip(membership.latch, error)

    @property
    def pending_members(self) -> list[str]:
        return list(self._pending)

    def leave(self, reason: str = "") -> None:
        if self._is_over or self._is_leaving:
            return
        self.left = self._is_leaving = True
        try:
            try:
                if not reason:
                    self._run_leave_callbacks()
            finally:  # also when it is interrupted: the others must hear of it soon
                self._end(reason)
        finally:
            self._is_leaving = False

    def _end(self, reason: str) -> None:
        generation = self._generation
        request = rendezvous_pb2.LeaveRequest(generation=generation, reason=encodable(reason[:1024]))
        closed = GroupClosedError(f"{self.name} has left job {self.job!r}")
        self._connection.leave_error = closed
        had_ended = self._connection.ended_by is not None
        began = self.clock.now()
        try:
            is_needed = generation and self.membership.latch.cause is None
            while_up = LEAVE_WHILE_UP_SECONDS if is_needed else 0.0
            answer = self._connection.try_ask("leave", LEAVE_SECONDS, while_up=while_up, leave=request)
            if answer is None and generation and not had_ended:
                _log.warning(
                    "%s leaves, but the coordinator at %s has not answered for %.1f s: if it was not told, it takes this rank "
                    "for dead some seconds after it is back, and the others' generation ends",
                    self.name,
                    self._connection.address,
                    self.clock.now() - began,
                )
        finally:
            self._connection.close(closed)
            own = PeerLostError(self.membership.assignment.rank, reason) if reason and generation else closed
            self._trip(self.membership.latch, own)
            self._run_leave_callbacks()
            clear_log_origin(self.job)
            process_exit.unregister(self)
            self._is_over = True  # only here: who was interrupted leaves again, to the end

    def on_leave(self, close: Callable[[], None]) -> None:
        """Calls `close` when this session leaves, and again where that was interrupted: for what lives as long as the session.

        It is called before a clean Leave, so that data in flight still arrives, but after a Leave with a reason, so that the
        others hear of the failure first.
        """
        self._leave_callbacks.append(close)

    # -- operations of several members ----------------------------------------------------------------------------------

    def barrier(
        self, name: str, payload: bytes = b"", *, ranks: Iterable[int] | None = None, timeout: float | None = None
    ) -> list[bytes]:
        limits.check_key(name)
        payload = limits.check_payload(payload)
        seconds = seconds_of(timeout, self._timeout)
        membership = self.membership
        generation = membership.assignment.generation
        participants = self._participants(ranks)
        request = barrier_pb2.BarrierRequest(
            generation=generation,
            name=name,
            ranks=() if ranks is None else participants,
            timeout_ms=milliseconds(seconds),
            payload=payload,
        )

        def meet(ordinal: int) -> list[bytes]:
            request.ordinal = ordinal
            timed_out = partial(BarrierTimeoutError, [])
            try:
                with membership.activity.waiting(self.clock):
                    response = self._ask_generation(f"barrier {name!r}", seconds, timed_out, barrier=request)
            except BarrierTimeoutError as error:
                raise told_to(membership.assignment.rank, error) from None
            return list(response.payloads)

        return membership.ordinals.use(name, participants, meet)

    def exchange_nccl_id(
        self,
        communicator: str,
        attempt: int,
        ranks: Sequence[int],
        unique_ids: Sequence[bytes] | FerroError | None,
        timeout: float,
    ) -> list[bytes]:
        participants = self._participants(ranks)
        failure = unique_ids.message if isinstance(unique_ids, FerroError) else ""
        request = nccl_pb2.CommBootstrapRequest(
            generation=self._generation,
            communicator=communicator,
            attempt=attempt,
            ranks=participants,
            unique_ids=() if isinstance(unique_ids, FerroError) else unique_ids or (),
            failure=encodable(failure[:1024]),
            timeout_ms=milliseconds(timeout),
        )
        label = f"the id of communicator {communicator!r} (attempt {attempt})"
        response = self._ask_generation(label, timeout, partial(CollectiveTimeoutError, []), comm_bootstrap=request)
        return list(response.unique_ids)

    def describe(self, ranks: Iterable[int], timeout: float) -> list[MemberReport]:
        wanted = sorted({rank for rank in ranks if 0 <= rank < self.membership.assignment.size})
        if not wanted:
            return []
        response = self._connection.try_ask("describe", timeout, describe=wire.DescribeRequest(ranks=wanted))
        return [] if response is None else [member_report(member) for member in response.members]

    def described(self, ranks: Iterable[int]) -> str:
        known, outage = super().described(ranks), self._connection.outage()
        return "; ".join(filter(None, (known, f"this rank itself: {outage}" if outage else "")))

    # -- the connection's Listener -------------------------------------------------------------------------------------

    def hello(self, resume_token: str) -> wire.Hello:
        """The first frame of a stream."""
        self._hello.resume_token = resume_token
        self._hello.token = self._token.current()
        self._hello.address = self._worker_address()
        return self._hello

    def beat(self) -> wire.Beat:
        """The next heartbeat."""
        membership = self.membership
        return membership.activity.beat(self._number_of(membership), self.clock.now(), is_last=self.left)

    def welcomed(self) -> None:
        """Drops what the previous stream reported, which the coordinator repeats."""
        self._pending = ()
        self.membership.latch.unhealthy.clear()

    def result(self, position: identity_pb2.Position, result: wire.Result) -> None:
        """Enters the next generation, before events of that generation come."""
        if result.WhichOneof("outcome") != "join":
            return
        response = result.join
        if response.generation == self._generation:
            return
        peers = tuple(
            Peer(rank, peer.name, peer.host, peer.address, tuple((label.name, label.value) for label in peer.labels))
            for rank, peer in enumerate(response.peers)
        )
        set_log_origin(self.job, response.rank, response.generation)
        self._connection.joined()
        self._pending = ()
        self._links_lost.clear()
        self.membership = Membership(
            Assignment(
                self.job,
                position.cluster_id,
                response.generation,
                response.rank,
                peers,
                response.reason,
                response.cost_table,
            ),
            Latch(self._report),
        )
        place = f"rank {response.rank} of {len(peers)} in generation {response.generation}"
        tell(_log, logging.INFO, "%s has %s: %s", self.name, place, response.reason)

    def event(self, event: wire.Event) -> None:
        """Handles an event that the coordinator pushed."""
        kind = event.WhichOneof("kind")
        if kind == "broken" and event.broken.generation == self._generation:
            rank = self.membership.assignment.rank
            self._trip(self.membership.latch, error_on_rank(rank, event.broken.origin_rank, restore(event.broken.cause)))
        elif kind == "standings":
            for member in event.standings.members:
                self._member_changed(member)
        elif kind == "pending":
            self._pending = tuple(event.pending.names)
        elif kind == "draining":
            tell(_log, logging.INFO, "the coordinator stops within %d ms", event.draining.within_ms)

    def session_ended(self, cause: FerroError) -> None:
        """Ends the generation: the coordinator does not know this session any more."""
        self._trip(self.membership.latch, cause)

    def explain(self, request: Request, stream: SessionStream | None) -> str:
        """What a request waits for, and for whom."""
        return explain_wait(request, stream, wire.StatusRequest(job=self.job, token=self._token.current()))

    def abandon_in_child(self) -> None:
        """In a forked child: makes every use an error, and leaves the parent's connection alone."""
        self.left = self._is_over = True
        self._connection.abandon_in_child()
        self.membership.latch.cause = self._connection.ended_by

    # -- internals -----------------------------------------------------------------------------------------------------

    @property
    def _generation(self) -> int:
        """Number of the last generation in which it had a rank, in the coordinator's current cluster; 0 for none."""
        return self._number_of(self.membership)

    def _number_of(self, membership: Membership) -> int:
        """As `_generation`, for a given membership."""
        assignment = membership.assignment
        return assignment.generation if assignment.cluster_id == self._connection.cluster_id else 0

    def _ask_generation(self, label: str, seconds: float, timeout_error: Callable[..., FerroError], **body: Any) -> Any:
        """Sends a request of the current generation. If the generation ends, the request fails with its cause."""
        latch = self.membership.latch
        latch.check()
        try:
            return self._connection.ask(label, seconds, timeout_error, latch, **body)
        except FerroError:
            latch.check()
            raise

    def _member_changed(self, member: identity_pb2.Member) -> None:
        report, unhealthy = member_report(member), self.membership.latch.unhealthy
        tell(_log, logging.INFO, "%s", report)
        if report.state in UNHEALTHY:
            unhealthy[report.rank] = report.standing
        else:
            unhealthy.pop(report.rank, None)
        reason = self._links_lost.get((self.membership.latch, report.rank))
        if report.state == "left" and reason is not None:
            self.membership.latch.end(member_left(report.rank, reason))

    def _run_leave_callbacks(self) -> None:
        while self._leave_callbacks:
            try:
                self._leave_callbacks[-1]()
            except Exception:
                self._leave_callbacks.pop()
                raise
            self._leave_callbacks.pop()  # only now: one that was interrupted is called again

    def _trip(self, latch: Latch, cause: FerroError) -> None:
        try:
            latch.trip(cause)
        finally:  # also where a watcher has raised
            self._connection.wake()


def _bounded(failure: FerroError) -> Any:
    """The failure as it is sent. If it is too large for a frame, its fields are left out: its message has the same facts."""
    detail = detail_of(failure)
    if detail.ByteSize() > DETAIL_BYTES_MAX:
        del detail.fields[:]
        detail.message = detail.message[: DETAIL_BYTES_MAX // 8]
    return detail
