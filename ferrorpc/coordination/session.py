"""A member's seat in a job whose coordinator is a service somewhere else."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Self

from ferrorpc.config import Config
from ferrorpc.coordination import farewell, limits
from ferrorpc.coordination.activity import Activity
from ferrorpc.coordination.base import MemberReport, Membership, Session
from ferrorpc.coordination.causes import cause_on, needed_one_who_left
from ferrorpc.coordination.channel import Connector
from ferrorpc.coordination.explain import explanation, report_of
from ferrorpc.coordination.link import Link
from ferrorpc.coordination.remote_store import RemoteStore, milliseconds
from ferrorpc.coordination.requests import Request
from ferrorpc.coordination.stream import Stream
from ferrorpc.errors import (
    BarrierTimeoutError,
    CollectiveTimeoutError,
    FerroError,
    GroupClosedError,
    PeerLostError,
    RendezvousTimeoutError,
)
from ferrorpc.guard import SYSTEM_CLOCK, Latch, seconds_of
from ferrorpc.logs import say_where
from ferrorpc.types import Assignment, Peer
from ferrorpc.v1 import barrier_pb2, identity_pb2, nccl_pb2, rendezvous_pb2, session_pb2 as wire
from ferrorpc.versions import own_version
from ferrorpc.wire.error_detail import detail_of
from ferrorpc.wire.status import error_of
from ferrorpc.wire.token import Token

PROTOCOL_VERSION: Final = 1
LAST_CALL_SECONDS: Final = 1.0
"""How long an elastic round stays open for more members once it has enough."""
ROUND_SECONDS: Final = 1.0
"""How long a member waits for the others at least, where nearly all its time went by before the coordinator was there."""
REPORT_SECONDS: Final = 1.0
LEAVE_SECONDS: Final = 0.7
DETAIL_BYTES_MAX: Final = 64 << 10
UNWELL: Final = ("stalled", "suspect")
"""States of members that may still take part, of which waits for them tell."""
_log = logging.getLogger("ferrorpc.coordination")


class RemoteSession(Session):
    """A seat, from `join` to `leave`. It keeps beating while the training code computes.

    Args:
        address: host:port of the coordinator.
        name: unique in the job among the living.
        policy: fewest and most members of a generation.
        pinned_rank: the rank a launcher gave; it is given, or joining fails.
        hinted_rank: the rank to give where it is free.
        worker_address: host:port that the other ranks reach this one's worker server by.
        launch: what a launcher that reports exits calls this start of the process; without dots.
        labels: what else this member says of itself.
        config: the settings timeout, heartbeat_interval, lease, max_outage, token_file and tls_*.
    """

    membership: Membership

    def __init__(
        self,
        address: str,
        *,
        job: str,
        name: str,
        policy: tuple[int, int],
        pinned_rank: int | None = None,
        hinted_rank: int | None = None,
        worker_address: str = "",
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
        said = dict(labels or {}) | {"pid": str(os.getpid())}
        self._hello = wire.Hello(
            protocol_version=PROTOCOL_VERSION,
            version=own_version(),
            job=job,
            name=name,
            instance_id=f"{launch}.{secrets.token_hex(8)}",
            lease_ms=0 if config.source("lease") == "default" else milliseconds(config["lease"]),
            host=host or socket.gethostname(),
            address=worker_address,
            labels=[identity_pb2.Label(name=label, value=value) for label, value in said.items()],
        )
        self._token = Token(config["token_file"])
        self._latch_before = Latch()
        self.activity = Activity()
        self._returned: Membership | None = None
        """The last that `rejoin` has returned. A later one, whose answer nobody waited for any more, is for its next caller."""
        self._ordinals: dict[tuple[int, str], int] = {}
        self._pending: tuple[str, ...] = ()
        self._links_lost: set[tuple[Latch, int]] = set()
        self._told: dict[str, dict[str, Any]] = {}
        """What the coordinator keeps of this member in memory alone, so that it is told again after a restart."""
        self._reported: Latch | None = None
        self._at_leave: list[Callable[[], None]] = []
        self.left = False
        self._link = Link(
            address,
            Connector(address, job, config),
            self,
            self.clock,
            patience=min(self._timeout, config["max_outage"]),
            max_outage=config["max_outage"],
            heartbeat_interval=config["heartbeat_interval"],
        )
        self.store = RemoteStore(self._link, self._timeout, self.clock)

    def join(self) -> Self:
        """Takes the seat, and returns when the round it came to has closed: `membership` is set. The timeout bounds both: until
        the coordinator has let it in, and until the others have come.

        Raises:
            CoordinatorUnavailableError: nobody answered there within the timeout.
            RendezvousTimeoutError: naming who did not come.
            ConfigError: the rank, the name or the policy contradicts what the others said.
        """
        farewell.watch_over(self)
        until = self.clock.now() + self._timeout
        self._link.start()
        try:
            self._link.come_up(self._rendezvous, until)
            self.rejoin(max(until - self.clock.now(), min(self._timeout, ROUND_SECONDS)))
        except BaseException:
            self.leave()
            raise
        return self

    # -- the generation ------------------------------------------------------------------------------------------------

    def rejoin(self, timeout: float) -> Membership:
        low, high = self._policy
        rank = self.membership.assignment.rank if hasattr(self, "membership") else self._hinted_rank
        request = rendezvous_pb2.JoinRequest(
            policy=rendezvous_pb2.WorldPolicy(
                min_size=low, max_size=high, last_call_ms=0 if low == high else milliseconds(LAST_CALL_SECONDS)
            ),
            after_generation=self._number_of(self._returned),
            pinned_rank=self._pinned_rank,
            hinted_rank=rank,
            timeout_ms=milliseconds(timeout),
        )
        self._link.ask(self._rendezvous, timeout, lambda message: RendezvousTimeoutError([], message), join=request)
        self._returned = self.membership
        return self._returned

    def report(self, failure: FerroError, latch: Latch | None = None) -> None:
        membership = self.membership
        failure = failure.again()  # without its traceback, which holds whatever the step has in memory
        if latch is not None and latch is not membership.latch:
            self._trip(latch, failure)
            return
        if membership.latch.cause is not None or self._reported is membership.latch:
            return
        self._reported = membership.latch
        request = wire.ReportRequest(generation=membership.assignment.generation, failure=_bounded(failure))
        try:
            self._link.post("the report of a failure", membership.latch, report=request)
        except FerroError:
            self._trip(membership.latch, failure)
            return
        self.clock.call_at(self.clock.now() + REPORT_SECONDS, lambda: self._trip(membership.latch, failure))

    def report_link_lost(self, peer: int, reason: str, latch: Latch | None = None) -> None:
        membership = self.membership
        is_over = latch is not None and latch is not membership.latch
        if is_over or membership.latch.cause is not None or (membership.latch, peer) in self._links_lost:
            return
        self._links_lost.add((membership.latch, peer))
        lost = wire.LinkLost(peer_rank=peer, reason=reason[:1024])
        request = wire.ReportRequest(generation=membership.assignment.generation, link_lost=lost)
        label = f"the report of the lost link to rank {peer}"
        self._told[label] = {"report": request}
        try:
            self._link.post(label, membership.latch, report=request)
        except FerroError as error:
            self._trip(membership.latch, error)

    @property
    def pending_members(self) -> list[str]:
        return list(self._pending)

    def leave(self, reason: str = "") -> None:
        if self.left:
            return
        self.left = True
        farewell.forget(self)
        if not reason:
            self._close_what_it_carries()
        generation = self._generation
        request = rendezvous_pb2.LeaveRequest(generation=generation, reason=reason[:1024])
        closed = GroupClosedError(f"{self.name} has left job {self.job!r}")
        self._link.leaving = closed
        self._link.try_ask("leave", LEAVE_SECONDS, leave=request)
        self._link.close(closed)
        own = PeerLostError(self.membership.assignment.rank, reason) if reason and generation else closed
        self._trip(self._latch, own)
        self._close_what_it_carries()

    def at_leave(self, close: Callable[[], None]) -> None:
        """Calls `close` as part of leaving, for what lives as long as this seat.

        In good order that comes first, so that what was sent still arrives; with a reason the others are told of it first.
        """
        self._at_leave.append(close)

    # -- what members do together --------------------------------------------------------------------------------------

    def barrier(
        self, name: str, payload: bytes = b"", *, ranks: Iterable[int] | None = None, timeout: float | None = None
    ) -> list[bytes]:
        limits.check_key(name)
        payload = limits.check_payload(payload)
        seconds = seconds_of(timeout, self._timeout)
        membership = self.membership
        generation = membership.assignment.generation
        participants = self._participants(ranks)
        ordinal = self._ordinals.get((generation, name), 0) + 1
        self._ordinals[generation, name] = ordinal
        request = barrier_pb2.BarrierRequest(
            generation=generation,
            name=name,
            ordinal=ordinal,
            ranks=() if ranks is None else participants,
            timeout_ms=milliseconds(seconds),
            payload=payload,
        )
        others = [rank for rank in participants if rank != membership.assignment.rank]
        began = self.clock.now()
        self.activity.operating(began)
        try:
            response = self._ask_generation(
                f"barrier {name!r}", seconds, lambda message: BarrierTimeoutError(others, message), barrier=request
            )
        finally:
            self.activity.operated(self.clock.now() - began)
        return list(response.payloads)

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
            failure=failure[:1024],
            timeout_ms=milliseconds(timeout),
        )
        label = f"the id of communicator {communicator!r} (attempt {attempt})"
        leaders = participants[:: limits.RANKS_PER_ID]
        if unique_ids is not None:
            self._told[label] = {"comm_bootstrap": request}
        response = self._ask_generation(
            label, timeout, lambda message: CollectiveTimeoutError(leaders, message), comm_bootstrap=request
        )
        return list(response.unique_ids)

    def describe(self, ranks: Iterable[int], timeout: float) -> list[MemberReport]:
        wanted = sorted(set(ranks))
        response = self._link.try_ask("describe", timeout, describe=wire.DescribeRequest(ranks=wanted))
        return [] if response is None else [report_of(member) for member in response.members]

    # -- what the line asks and tells ----------------------------------------------------------------------------------

    def hello(self, resume_token: str) -> wire.Hello:
        """The first frame of a stream."""
        self._hello.resume_token = resume_token
        self._hello.token = self._token.current()
        return self._hello

    def beat(self) -> wire.Beat:
        """What this member does now."""
        return self.activity.beat(self._generation, self.clock.now())

    def welcomed(self) -> None:
        """Whoever still waits for a place is told of on the new stream; a coordinator that restarted is told what it forgot."""
        self._pending = ()
        self._latch.unhealthy.clear()
        if self._latch.cause is None:
            with contextlib.suppress(FerroError):  # the line is over
                for label, request in list(self._told.items()):
                    self._link.post(label, self._latch, **request)

    def result(self, position: identity_pb2.Position, result: wire.Result) -> None:
        """Enters the next generation before anything that happens in it can be pushed."""
        if result.WhichOneof("outcome") != "join":
            return
        response = result.join
        if response.generation == self._generation:
            return
        peers = tuple(
            Peer(rank, peer.name, peer.host, peer.address, tuple((label.name, label.value) for label in peer.labels))
            for rank, peer in enumerate(response.peers)
        )
        say_where(self.job, response.rank, response.generation)
        self._link.seated()
        self._pending = ()
        self._ordinals.clear()
        self._told.clear()
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
            )
        )
        seat = f"rank {response.rank} of {len(peers)} in generation {response.generation}"
        _log.info("%s has %s: %s", self.name, seat, response.reason)

    def event(self, event: wire.Event) -> None:
        """What the coordinator pushes."""
        kind = event.WhichOneof("kind")
        if kind == "broken" and event.broken.generation == self._generation:
            rank = self.membership.assignment.rank
            self._trip(self.membership.latch, cause_on(rank, event.broken.origin_rank, error_of(event.broken.cause)))
        elif kind == "standings":
            for member in event.standings.members:
                self._standing_changed(member)
        elif kind == "pending":
            self._pending = tuple(event.pending.names)
        elif kind == "draining":
            _log.info("the coordinator stops within %d ms", event.draining.within_ms)

    def session_ended(self, cause: FerroError) -> None:
        """The coordinator does not know this session any more."""
        self._trip(self._latch, cause)

    def explain(self, request: Request, stream: Stream | None) -> str:
        """What a request waits for, and on whom."""
        return explanation(request, stream, wire.StatusRequest(job=self.job, token=self._token.current()))

    def abandon_in_child(self) -> None:
        """In a forked child: every use raises, nothing of the parent's is touched."""
        self.left = True
        self._link.abandon_in_child()
        self._latch.cause = self._link.over

    # -- within --------------------------------------------------------------------------------------------------------

    @property
    def _generation(self) -> int:
        """The last generation it had a rank in, of the coordinator's present cluster; 0 for none."""
        return self._number_of(self.membership if hasattr(self, "membership") else None)

    def _number_of(self, membership: Membership | None) -> int:
        """As `_generation`, of the one given."""
        if membership is None or membership.assignment.cluster_id != self._link.cluster_id:
            return 0
        return membership.assignment.generation

    @property
    def _latch(self) -> Latch:
        return self.membership.latch if hasattr(self, "membership") else self._latch_before

    def _ask_generation(self, label: str, seconds: float, late: Any, **body: Any) -> Any:
        """Asks for something of the current generation; its end is this request's end, with the same cause."""
        latch = self.membership.latch
        latch.check()
        try:
            return self._link.ask(label, seconds, late, latch, **body)
        except FerroError:
            latch.check()
            raise

    def _participants(self, ranks: Iterable[int] | None) -> tuple[int, ...]:
        assignment = self.membership.assignment
        return limits.check_participants(ranks, assignment.rank, assignment.size)

    def _standing_changed(self, member: identity_pb2.Member) -> None:
        report, unwell = report_of(member), self._latch.unhealthy
        _log.info("%s", report)
        if report.state in UNWELL:
            unwell[report.rank] = report.standing
        else:
            unwell.pop(report.rank, None)
        if report.state == "left" and (self._latch, report.rank) in self._links_lost:
            self.report(needed_one_who_left(report.rank))

    def _close_what_it_carries(self) -> None:
        while self._at_leave:
            self._at_leave.pop()()

    def _trip(self, latch: Latch, cause: FerroError) -> None:
        if latch.trip(cause):
            self._link.wake()


def _bounded(failure: FerroError) -> Any:
    """The failure as it is sent: what makes it too large for a frame is its facts, and its message says them too."""
    detail = detail_of(failure)
    if detail.ByteSize() > DETAIL_BYTES_MAX:
        del detail.fields[:]
        detail.message = detail.message[: DETAIL_BYTES_MAX // 8]
    return detail
