"""A job whose members are threads of one process. Shared state takes the place of the coordinator.

All waits use the world's Clock. So a world on virtual time replays from its seed.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ferrorpc.coordination import limits
from ferrorpc.coordination.activity import ReportingActivity
from ferrorpc.coordination.base import MemberReport, Membership, Session, before_joining
from ferrorpc.coordination.condition import Condition
from ferrorpc.coordination.local_exchange import Exchange
from ferrorpc.coordination.local_store import Keyspace, LocalStore, Owner
from ferrorpc.coordination.nccl_ids import leaders
from ferrorpc.coordination.ordinals import told_to
from ferrorpc.errors import (
    BarrierTimeoutError,
    CollectiveTimeoutError,
    FerroError,
    GroupClosedError,
    InvalidRankError,
    InvalidWorldSizeError,
    PeerLostError,
    RendezvousTimeoutError,
    StaleGenerationError,
    UsageError,
)
from ferrorpc.generation_errors import already_reforming, error_on_rank, generation_replaced, link_lost, member_left
from ferrorpc.guard import SYSTEM_CLOCK, Clock, Latch, seconds_of
from ferrorpc.types import Assignment, Peer, integer_of

REMEMBERED_BARRIERS: Final = 1_024
"""As many barriers that all participants have left are known as a coordinator knows of one set of participants."""
_world_numbers = itertools.count(1)


@dataclass(slots=True)
class _Generation:
    """One generation: its members in rank order, the cause of its end, and its barriers and exchanges of ids."""

    number: int
    members: list[LocalSession]
    cause: FerroError | None = None
    origin: int = -1
    exchanges: dict[tuple[str, str, int], Exchange] = field(default_factory=dict)
    _past: deque[tuple[str, str, int]] = field(default_factory=deque)
    """Barriers that all participants have left, oldest first."""

    def leave_barrier(self, key: tuple[str, str, int], rank: int) -> None:
        """A rank leaves a barrier, known for a while once all have: to those interrupted, and so that no number recurs."""
        exchange = self.exchanges[key]
        if rank in exchange.left:
            return
        exchange.left.add(rank)
        if len(exchange.left) == len(exchange.ranks):
            exchange.arrived = {}
            if self._past:  # the payloads of the last one are kept, for who was interrupted as it left
                self.exchanges[self._past[-1]].outcome = []
            self._past.append(key)
        while len(self._past) > REMEMBERED_BARRIERS:
            del self.exchanges[self._past.popleft()]


class LocalWorld:
    """One job with all its members, in one process. The next generation waits for all living members of the last one, however
    long they take: a coordinator goes on without them in an elastic world, after some seconds.

    Args:
        size: members of the first generation, and the most that any generation has.
        clock: the clock of all waits.
        job: name of the job.
        min_size: fewest members that an elastic world goes on with; None for a fixed world, which waits for replacements.
        timeout: default of waits on the store and of barriers, in seconds.
    """

    def __init__(
        self, size: int, clock: Clock = SYSTEM_CLOCK, job: str = "local", *, min_size: int | None = None, timeout: float = 60.0
    ) -> None:
        self.job = job
        self.cluster_id = f"local-{next(_world_numbers)}"
        self.timeout = timeout
        self.condition = Condition(clock)
        self.keyspace = Keyspace(job)
        self.on_operation: Callable[[int], None] | None = None
        """Called with a member's number whenever that begins an operation. Tests use it to end the member there."""
        self._max_size = size
        self._min_size = size if min_size is None else min_size
        if not 1 <= integer_of(self._min_size) <= integer_of(size):
            raise InvalidWorldSizeError(f"a world of {self._min_size!r} to {size!r} members cannot be")
        self._names = itertools.count()
        self._endings: list[tuple[Membership, FerroError]] = []
        self.sessions: list[LocalSession] = []
        self.generation = _Generation(0, [])
        with self.condition.lock:
            for _ in range(size):
                self._add_session()
            self._begin_generation(self.sessions, f"{size} of {size} joined")

    def session(self, rank: int) -> LocalSession:
        """The member that holds this rank in the current generation."""
        if not 0 <= rank < len(self.generation.members):
            raise InvalidRankError(f"rank {rank} is not one of the {len(self.generation.members)} ranks of this world")
        return self.generation.members[rank]

    def join(self, timeout: float) -> LocalSession:
        """Adds a member, once a generation has room for it: at the others' next `rejoin`.

        Raises:
            RendezvousTimeoutError: no generation took it in within `timeout` seconds.
        """
        with self.condition.lock:
            session = self._add_session()
        try:
            session.rejoin(timeout)
        except BaseException:
            session.leave()
            raise
        return session

    def kill(self, rank: int, reason: str) -> None:
        """As `LocalSession.die`, of the member that holds this rank in the current generation."""
        self.session(rank).die(reason)

    def end_session(self, session: LocalSession, state: str, reason: str, own_cause: FerroError) -> None:
        """A member has left or died. A reason ends its generation."""
        with self.condition.lock:
            if not session.alive:
                return
            session.state, session.reason = state, reason
            self.keyspace.release(("session", session.number))
            generation, rank = self.generation, session.rank
            if session in generation.members:
                self._endings.append((session.membership, own_cause))
                if reason:
                    self._record_end(generation, rank, PeerLostError(rank, reason))
            self._try_next_generation()
            self.condition.notify_all()
        self.trip_latches()

    def end_generation(self, number: int, origin: int, cause: FerroError) -> None:
        """Ends this generation, unless it has ended already: the first cause stays."""
        with self.condition.lock:
            if self.generation.number == number:
                self._record_end(self.generation, origin, cause)
                self.condition.notify_all()
        self.trip_latches()

    def trip_latches(self) -> None:
        """Trips the latches of ended generations. The caller does not hold the lock, because a latch wakes other threads."""
        with self.condition.lock:
            endings, self._endings = self._endings, []
        for membership, cause in endings:
            membership.latch.trip(cause)

    def request_rank(self, session: LocalSession) -> None:
        """The member asks for a rank in the next generation. The caller holds the lock."""
        session.rejoining = session.reforming = True
        self._try_next_generation()
        self.condition.notify_all()

    def missing(self) -> list[LocalSession]:
        """Living members of this generation that have not asked for the next one. The caller holds the lock."""
        return [member for member in self.generation.members if member.alive and not member.rejoining]

    def absent_members(self, since: float) -> list[LocalSession]:
        """Members of this generation that a rendezvous, open since clock time `since`, lacks: those that did not ask, and those
        that are gone without a replacement, but not those that asked and gave up since then. The caller holds the lock."""
        members = self.generation.members
        gave_up = [member for member in members if not member.rejoining and member.gave_up_at >= since]
        silent = [member for member in self.missing() if member not in gave_up]
        rejoining = [session for session in self.sessions if session.alive and session.rejoining]
        enough = len(silent) + len(rejoining) + len(gave_up) >= self._min_size
        gone = [] if enough else [member for member in members if not member.alive and member not in gave_up]
        return sorted(silent + gone, key=lambda member: member.rank)

    def to_admit(self) -> list[LocalSession]:
        """New members that the next generation would admit. The caller holds the lock."""
        members = self.generation.members
        room = self._max_size - sum(member.alive for member in members)
        return [session for session in self.sessions if session.rejoining and session.alive and session not in members][:room]

    def _add_session(self) -> LocalSession:
        number = next(self._names)
        session = LocalSession(self, number, f"member-{number}")
        self.sessions.append(session)
        return session

    def _record_end(self, generation: _Generation, origin: int, cause: FerroError) -> None:
        if generation.cause is not None:
            return
        generation.cause, generation.origin = cause, origin
        self.keyspace.release(("generation", generation.number))
        for rank, member in enumerate(generation.members):
            if member.alive:
                self._endings.append((member.membership, error_on_rank(rank, origin, cause)))

    def _try_next_generation(self) -> None:
        """Begins the next generation if enough members ask for it, among them all living ones of the last. The caller holds the
        lock."""
        rejoining = [session for session in self.sessions if session.rejoining and session.alive]
        if len(rejoining) < self._min_size or self.missing():
            return
        old = self.generation
        returning = [member for member in old.members if member in rejoining]
        chosen = (returning + [session for session in rejoining if session not in returning])[: self._max_size]
        self._record_end(old, -1, generation_replaced(old.number, old.number + 1))
        why = old.cause.message if old.cause else "it was asked for"
        self._begin_generation(chosen, f"replaces generation {old.number}: {why}")

    def _begin_generation(self, members: Sequence[LocalSession], reason: str) -> None:
        self.sessions = [session for session in self.sessions if session.alive]
        ranked = _by_rank(members, elastic=self._min_size < self._max_size)
        peers = tuple(Peer(rank, member.name) for rank, member in enumerate(ranked))
        self.generation = _Generation(self.generation.number + 1, ranked)
        for rank, member in enumerate(ranked):
            assignment = Assignment(self.job, self.cluster_id, self.generation.number, rank, peers, reason)
            latch, activity = Latch(member.end_generation), ReportingActivity(member.note_operation)
            member.assign(Membership(assignment, latch, activity=activity))


def _by_rank(members: Sequence[LocalSession], elastic: bool) -> list[LocalSession]:
    """Members keep their rank if the new generation has it; the first survivor of an elastic world becomes rank 0, as with a
    coordinator. The others fill the gaps, oldest first."""
    ranked: list[LocalSession | None] = [None] * len(members)
    others = []
    for member in members:
        rank = 0 if elastic and member is members[0] else member.rank
        if 0 <= rank < len(ranked):
            ranked[rank] = member
        else:
            others.append(member)
    return [member if member is not None else others.pop(0) for member in ranked]


class LocalSession(Session):
    """One member of a LocalWorld, which makes it."""

    def __init__(self, world: LocalWorld, number: int, name: str) -> None:
        self._world = world
        self._condition = world.condition
        self.clock = world.condition.clock
        self.number = number
        self.name = name
        self.membership = before_joining(world.job)
        self.state, self.reason = "joining", ""
        self.rejoining = self.reforming = False  # the latter stays true when it gives up
        self.gave_up_at = -math.inf
        """Clock time when its last `rejoin` timed out in this generation."""
        self.store = LocalStore(world.keyspace, world.condition, world.timeout, self._check_alive, self._owner_of)
        self._last_operation_at = self.clock.now()

    @property
    def alive(self) -> bool:
        """Whether it is still part of the job."""
        return self.state not in ("dead", "left")

    @property
    def left(self) -> bool:
        """Whether it left the job."""
        return self.state == "left"

    @property
    def rank(self) -> int:
        """Its rank in its last generation; -1 before the first."""
        return self.membership.assignment.rank

    def assign(self, membership: Membership) -> None:
        """Gives it a rank in a new generation. The caller holds the lock."""
        self.membership = membership
        self.state, self.rejoining, self.reforming, self.gave_up_at = "active", False, False, -math.inf

    def end_generation(self, failure: FerroError, latch: Latch) -> None:
        """As `Latch.end`, of a generation of this session."""
        membership = self.membership
        if latch is membership.latch:
            # A copy: a traceback would keep the arrays of the operation that failed.
            self._world.end_generation(membership.assignment.generation, membership.assignment.rank, failure.again())
        else:
            latch.trip(failure)

    def report_link_lost(self, peer: int, reason: str, latch: Latch | None = None) -> None:
        with self._condition.lock:
            if latch is not None and latch is not self.membership.latch:
                return
            members = self._world.generation.members
            current = self._world.generation.number == self.membership.assignment.generation
            cause = _lost_link_error(self.rank, peer, members[peer], reason) if current else link_lost(self.rank, peer, reason)
        (latch or self.membership.latch).end(cause)

    def barrier(
        self, name: str, payload: bytes = b"", *, ranks: Iterable[int] | None = None, timeout: float | None = None
    ) -> list[bytes]:
        limits.check_key(name)
        payload, seconds = limits.check_payload(payload), seconds_of(timeout, self._world.timeout)
        exchange = Exchange(f"barrier {name!r}", self._participants(ranks))

        def meet(ordinal: int) -> list[bytes]:
            key = ("barrier", name, ordinal)
            with self._condition.lock:
                generation, met = self._arrive(key, exchange, [payload])
            try:
                payloads = self._wait_for(generation, met, seconds)
            except FerroError as error:
                self._leave_barrier(generation, key)
                raise told_to(self.rank, error) if isinstance(error, BarrierTimeoutError) else error from None
            self._leave_barrier(generation, key)  # not where it is interrupted: the next use goes on with it
            return payloads

        return self.membership.ordinals.use(name, exchange.ranks, meet)

    def _leave_barrier(self, generation: _Generation, key: tuple[str, str, int]) -> None:
        with self._condition.lock:
            generation.leave_barrier(key, self.rank)

    def exchange_nccl_id(
        self,
        communicator: str,
        attempt: int,
        ranks: Sequence[int],
        unique_ids: Sequence[bytes] | FerroError | None,
        timeout: float,
    ) -> list[bytes]:
        participants = self._participants(ranks)
        label = f"the id of communicator {communicator!r} (attempt {attempt})"
        exchange = Exchange(label, participants, len(leaders(participants)))
        failure = unique_ids if isinstance(unique_ids, FerroError) else None
        brought = [] if isinstance(unique_ids, FerroError) else list(unique_ids or ())
        with self._condition.lock:
            generation, exchange = self._arrive(("nccl", communicator, attempt), exchange, brought)
            exchange.outcome = exchange.outcome or failure
        return self._wait_for(generation, exchange, timeout)

    def describe(self, ranks: Iterable[int], timeout: float) -> list[MemberReport]:
        with self._condition.lock:
            members = self._world.generation.members
            return [members[rank].member_report(rank) for rank in ranks if 0 <= rank < len(members)]

    def member_report(self, rank: int) -> MemberReport:
        """What is known of this member. The caller holds the lock."""
        age = self.clock.now() - self._last_operation_at
        return MemberReport(rank, self.name, "", self.state, self.activity.operations, age, self.activity.last, self.reason)

    @property
    def departure_reason(self) -> str:
        """Why it died or left."""
        return self.reason or "it left the job"

    @property
    def pending_members(self) -> list[str]:
        self.clock.give_way()
        with self._condition.lock:
            return [session.name for session in self._world.to_admit()]

    def rejoin(self, timeout: float) -> Membership:
        before, since = self._world.generation.number, self.clock.now()
        with self._condition.lock:
            self._check_alive()
            self._world.request_rank(self)
        self._world.trip_latches()

        def assigned() -> bool | None:
            self._check_alive()
            return not self.rejoining or None

        self._condition.wait_for(assigned, self.clock.now() + timeout)
        with self._condition.lock:
            if not self.rejoining:
                return self.membership
            absent = {member.rank: str(member.member_report(member.rank)) for member in self._world.absent_members(since)}
            self.rejoining, self.gave_up_at = False, self.clock.now()
        lacks = "; ".join(absent.values()) or "new members"
        raise RendezvousTimeoutError(
            list(absent), f"no generation followed generation {before} within {timeout:.3g} s: it lacks {lacks}"
        )

    def note_operation(self) -> None:
        """It begins an operation."""
        self._last_operation_at = self.clock.now()
        if self._world.on_operation is not None:
            self._world.on_operation(self.number)

    def leave(self, reason: str = "") -> None:
        closed = GroupClosedError(f"{self.name} has left job {self._world.job!r}")
        self._world.end_session(self, "left", reason, PeerLostError(self.rank, reason) if reason else closed)

    def die(self, reason: str) -> None:
        """It is declared dead: it is fenced, and the others raise PeerLostError."""
        fate = f"rank {self.rank} was declared dead ({reason}) and is no longer part of job {self._world.job!r}"
        self._world.end_session(self, "dead", reason, StaleGenerationError(fate))

    def _arrive(self, key: tuple[str, str, int], exchange: Exchange, brought: list[bytes]) -> tuple[_Generation, Exchange]:
        """Arrives at the exchange of this key, opening it if need be. The caller holds the lock."""
        self._check_alive()
        generation = self._world.generation
        if generation.number != self.membership.assignment.generation:
            raise StaleGenerationError(f"{self.name} has no rank in generation {generation.number}")
        if generation.cause is not None:
            raise error_on_rank(self.rank, generation.origin, generation.cause).again()
        found = generation.exchanges.setdefault(key, exchange)
        if found.ranks != exchange.ranks:
            mine, theirs = list(exchange.ranks), list(found.ranks)
            conflict = UsageError(
                f"{found.label}: rank {self.rank} names the participants {mine}, others {theirs}",
                hint="every participant must name the same ranks",
            )
            found.outcome = found.outcome or conflict
            self._condition.notify_all()
            raise conflict
        found.arrive(self.rank, brought)
        self._condition.notify_all()
        return generation, found

    def _wait_for(self, generation: _Generation, exchange: Exchange, seconds: float) -> list[bytes]:
        rank = self.rank

        def ended() -> bool | None:
            if exchange.outcome is None:
                self._check_alive()
                if generation.cause is not None:
                    raise error_on_rank(rank, generation.origin, generation.cause).again()
                gone = [missing for missing in exchange.missing if not generation.members[missing].alive]
                if gone:
                    exchange.outcome = PeerLostError(gone[0], generation.members[gone[0]].departure_reason)
                reforming = [missing for missing in exchange.missing if generation.members[missing].reforming]
                if reforming and not gone and not exchange.ids_needed:
                    exchange.outcome = already_reforming(reforming[0], exchange.label)
            return exchange.outcome is not None or None

        self._condition.wait_for(ended, self.clock.now() + seconds)
        with self._condition.lock:
            if exchange.outcome is None:
                exchange.outcome = _timeout_error(generation, exchange, seconds)
                self._condition.notify_all()
        if isinstance(exchange.outcome, FerroError):
            raise exchange.outcome.again()
        return list(exchange.outcome)

    def _check_alive(self) -> None:
        if self.state == "left":
            raise GroupClosedError(f"{self.name} has left job {self._world.job!r}")
        if self.state == "dead":
            raise StaleGenerationError(f"{self.name} was declared dead ({self.reason}) and is no longer part of the job")

    def _owner_of(self, bind: str) -> Owner:
        """The owner that a binding means now. The caller holds the lock."""
        generation = self._world.generation
        if bind == "generation" and generation.cause is not None:
            raise error_on_rank(self.rank, generation.origin, generation.cause).again()
        numbers = {"job": 0, "session": self.number, "generation": generation.number}
        return bind, numbers[bind]


def _lost_link_error(reporter: int, peer: int, member: LocalSession, reason: str) -> FerroError:
    """The error for a peer that cannot be reached."""
    if member.state == "dead":
        return PeerLostError(peer, member.departure_reason)
    if member.state == "left":
        return member_left(peer, reason)
    needed_by = f"an operation of rank {reporter}"
    return already_reforming(peer, needed_by) if member.reforming else link_lost(reporter, peer, reason)


def _timeout_error(generation: _Generation, exchange: Exchange, seconds: float) -> FerroError:
    missing = "; ".join(str(generation.members[rank].member_report(rank)) for rank in exchange.missing)
    message = f"{exchange.label} was not complete within {seconds:g} s; missing: {missing}"
    error = CollectiveTimeoutError if exchange.ids_needed else BarrierTimeoutError
    return error(exchange.missing, message)
