"""A job whose members are threads of one process: the coordinator as shared state, for tests and simulations.

Everything waits through the world's Clock, so a world of the simulated clock replays from its seed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral

from ferrorpc.coordination import limits
from ferrorpc.coordination.activity import Activity
from ferrorpc.coordination.base import MemberReport, Membership, Session
from ferrorpc.coordination.local_store import Keyspace, LocalStore, Owner
from ferrorpc.coordination.monitor import Monitor
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
from ferrorpc.types import Assignment, Peer

_world_numbers = itertools.count(1)


@dataclass(slots=True)
class _Gathering:
    """A barrier, or an exchange of ids: who takes part, who has come with what, and how it ended for everybody."""

    label: str
    ranks: tuple[int, ...]
    ids_needed: int = 0
    """Of an exchange: it is complete with so many ids. A barrier (0) is complete when all have come."""
    arrived: dict[int, list[bytes]] = field(default_factory=dict)
    outcome: list[bytes] | FerroError | None = None

    @property
    def missing(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.arrived]

    def arrive(self, rank: int, brought: list[bytes]) -> None:
        self.arrived[rank] = brought
        parts = [part for rank in self.ranks for part in self.arrived.get(rank, ())]
        complete = len(parts) >= self.ids_needed if self.ids_needed else not self.missing
        if complete and self.outcome is None:
            self.outcome = parts


@dataclass(slots=True)
class _Generation:
    """One membership: its members in rank order, the cause of its end, and what happens in it."""

    number: int
    members: list[LocalSession]
    cause: FerroError | None = None
    origin: int = -1
    gatherings: dict[tuple[str, str, int], _Gathering] = field(default_factory=dict)


class LocalWorld:
    """All members of one job, in one process.

    Args:
        size: members of the first generation, and the most that any has.
        clock: what every wait goes through.
        job: name of the job.
        min_size: an elastic world goes on with this many; None for a fixed world, which waits for replacements.
        timeout: seconds for waits on the store and for barriers that are not told.
    """

    def __init__(
        self,
        size: int,
        clock: Clock = SYSTEM_CLOCK,
        job: str = "local",
        *,
        min_size: int | None = None,
        timeout: float = 60.0,
    ) -> None:
        self.job = job
        self.cluster_id = f"local-{next(_world_numbers)}"
        self.timeout = timeout
        self.monitor = Monitor(clock)
        self.keyspace = Keyspace()
        self.on_note: Callable[[int], None] | None = None
        """Told the rank of every `note`: where a test may end it."""
        self._max_size = size
        self._min_size = size if min_size is None else min_size
        whole = isinstance(size, Integral) and isinstance(self._min_size, Integral)
        if not (whole and 1 <= self._min_size <= self._max_size):
            raise InvalidWorldSizeError(f"a world of {self._min_size!r} to {size!r} members cannot be")
        self._names = itertools.count()
        self._endings: list[tuple[Membership, FerroError]] = []
        self.sessions: list[LocalSession] = []
        self.generation = _Generation(0, [])
        with self.monitor.lock:
            for _ in range(size):
                self._add_session()
            self._open(self.sessions, f"{size} of {size} joined")

    def session(self, rank: int) -> LocalSession:
        """The member that holds this rank in the current generation."""
        if not 0 <= rank < len(self.generation.members):
            raise InvalidRankError(f"rank {rank} is not one of the {len(self.generation.members)} ranks of this world")
        return self.generation.members[rank]

    def join(self, timeout: float) -> LocalSession:
        """A new member, as soon as a generation has room for it: at the others' next `rejoin`.

        Raises:
            RendezvousTimeoutError: there was none within `timeout` seconds.
        """
        with self.monitor.lock:
            session = self._add_session()
        try:
            session.rejoin(timeout)
        except RendezvousTimeoutError:
            session.leave()
            raise
        return session

    def kill(self, rank: int, reason: str) -> None:
        """Declares the member with this rank dead: the others raise PeerLostError, it is fenced."""
        session = self.session(rank)
        fenced = StaleGenerationError(f"rank {rank} was declared dead ({reason}) and is no longer part of job {self.job!r}")
        self.end_session(session, "dead", reason, fenced)

    def end_session(self, session: LocalSession, state: str, reason: str, own_cause: FerroError) -> None:
        """A member is gone, for good. With a reason, that is the end of its generation."""
        with self.monitor.lock:
            if not session.alive:
                return
            session.state, session.reason = state, reason
            self.keyspace.release(("session", session.number))
            generation, rank = self.generation, session.rank
            if session in generation.members:
                self._endings.append((session.membership, own_cause))
                if reason:
                    self._break(generation, rank, PeerLostError(rank, reason))
            self._close_round()
            self.monitor.changed()
        self.trip_latches()

    def end_generation(self, number: int, origin: int, cause: FerroError) -> None:
        """Ends this generation, unless it has ended: the first cause stays."""
        with self.monitor.lock:
            if self.generation.number == number:
                self._break(self.generation, origin, cause)
                self.monitor.changed()
        self.trip_latches()

    def trip_latches(self) -> None:
        """Tells the members of generations that ended. The caller does not hold the lock: a latch wakes others."""
        with self.monitor.lock:
            endings, self._endings = self._endings, []
        for membership, cause in endings:
            membership.latch.trip(cause)

    def ask_for_place(self, session: LocalSession) -> None:
        """The member takes part in the next round. The lock is held."""
        session.asking = True
        self._close_round()

    def missing(self) -> list[LocalSession]:
        """Members of the current generation for whom an open round waits. The lock is held."""
        return [member for member in self.generation.members if member.alive and not member.asking]

    def lacking(self, since: float) -> list[LocalSession]:
        """Members of the current generation for whom a round that is open since then waits in vain: they did not ask, or are
        gone without a replacement. Nobody is blamed for having given up meanwhile. The lock is held."""
        members = self.generation.members
        tired = [member for member in members if not member.asking and member.gave_up_at >= since]
        silent = [member for member in self.missing() if member not in tired]
        asking = [session for session in self.sessions if session.alive and session.asking]
        enough = len(silent) + len(asking) + len(tired) >= self._min_size
        gone = [] if enough else [member for member in members if not member.alive and member not in tired]
        return sorted(silent + gone, key=lambda member: member.rank)

    def to_admit(self) -> list[LocalSession]:
        """Members that ask for a place and would get one in the next generation. The lock is held."""
        members = self.generation.members
        room = self._max_size - sum(member.alive for member in members)
        return [session for session in self.sessions if session.asking and session.alive and session not in members][:room]

    def _add_session(self) -> LocalSession:
        number = next(self._names)
        session = LocalSession(self, number, f"member-{number}")
        self.sessions.append(session)
        return session

    def _break(self, generation: _Generation, origin: int, cause: FerroError) -> None:
        if generation.cause is not None:
            return
        generation.cause, generation.origin = cause, origin
        self.keyspace.release(("generation", generation.number))
        for rank, member in enumerate(generation.members):
            if member.alive:
                self._endings.append((member.membership, error_on_rank(rank, origin, cause)))

    def _close_round(self) -> None:
        """Opens the next generation once enough ask for it and every living member of the last does. The lock is held."""
        asking = [session for session in self.sessions if session.asking and session.alive]
        if len(asking) < self._min_size or self.missing():
            return
        old = self.generation
        returning = [member for member in old.members if member in asking]
        chosen = (returning + [session for session in asking if session not in returning])[: self._max_size]
        self._break(old, -1, generation_replaced(old.number, old.number + 1))
        self._open(chosen, f"replaces generation {old.number}: {old.cause.message if old.cause else 'it was asked for'}")
        self.monitor.changed()

    def _open(self, members: Sequence[LocalSession], reason: str) -> None:
        ranked = _in_rank_order(members)
        peers = tuple(Peer(rank, member.name) for rank, member in enumerate(ranked))
        self.generation = _Generation(self.generation.number + 1, ranked)
        for rank, member in enumerate(ranked):
            assignment = Assignment(self.job, self.cluster_id, self.generation.number, rank, peers, reason)
            member.enter(Membership(assignment))


def _in_rank_order(members: Sequence[LocalSession]) -> list[LocalSession]:
    """Everyone keeps the rank it had where the new world has it; the others fill the gaps in order of age."""
    places: list[LocalSession | None] = [None] * len(members)
    others = []
    for member in members:
        if 0 <= member.rank < len(places):
            places[member.rank] = member
        else:
            others.append(member)
    return [place if place is not None else others.pop(0) for place in places]


class _Noted(Activity):
    """Tells the world of each operation that begins."""

    def __init__(self, told: Callable[[], None]) -> None:
        super().__init__()
        self._tell = told

    def note(self, operation: str) -> None:
        super().note(operation)
        self._tell()


class LocalSession(Session):
    """One member of a LocalWorld. Made by the world."""

    membership: Membership

    def __init__(self, world: LocalWorld, number: int, name: str) -> None:
        self._world = world
        self._monitor = world.monitor
        self.clock = world.monitor.clock
        self.number = number
        self.name = name
        self.state = "joining"
        self.reason = ""
        self.asking = False
        self.gave_up_at = -math.inf
        """When its last `rejoin` ended in vain."""
        self.store = LocalStore(world.keyspace, world.monitor, world.timeout, self._check_alive, self._owner_of)
        self.activity = _Noted(self._noted)
        self._noted_at = self.clock.now()
        self._ordinals: dict[str, int] = {}

    @property
    def alive(self) -> bool:
        """Whether it is still part of the job."""
        return self.state not in ("dead", "left")

    @property
    def left(self) -> bool:
        """Whether it said goodbye."""
        return self.state == "left"

    @property
    def rank(self) -> int:
        """Its rank in the generation it was last in; -1 before the first."""
        return self.membership.assignment.rank if hasattr(self, "membership") else -1

    def enter(self, membership: Membership) -> None:
        """The world gives it a place. The lock is held."""
        self.membership = membership
        self.state, self.asking = "active", False
        self._ordinals.clear()

    def report(self, failure: FerroError, latch: Latch | None = None) -> None:
        membership = self.membership
        if latch is None or latch is membership.latch:
            self._world.end_generation(membership.assignment.generation, membership.assignment.rank, failure)
        else:
            latch.trip(failure)

    def report_link_lost(self, peer: int, reason: str, latch: Latch | None = None) -> None:
        with self._monitor.lock:
            if latch is not None and latch is not self.membership.latch:
                return
            members = self._world.generation.members
            current = self._world.generation.number == self.membership.assignment.generation
            cause = _of_lost_link(self.rank, peer, members[peer], reason) if current else link_lost(self.rank, peer, reason)
        self.report(cause, latch)

    def barrier(
        self, name: str, payload: bytes = b"", *, ranks: Iterable[int] | None = None, timeout: float | None = None
    ) -> list[bytes]:
        limits.check_key(name)
        payload, seconds = limits.check_payload(payload), seconds_of(timeout, self._world.timeout)
        gathering = _Gathering(f"barrier {name!r}", self._participants(ranks))
        with self._monitor.lock:
            ordinal = self._ordinals.get(name, 0) + 1
            generation, gathering = self._arrive(("barrier", name, ordinal), gathering, [payload])
            self._ordinals[name] = ordinal
        return self._await(generation, gathering, seconds)

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
        gathering = _Gathering(label, participants, -(-len(participants) // limits.RANKS_PER_ID))
        failure = unique_ids if isinstance(unique_ids, FerroError) else None
        brought = [] if isinstance(unique_ids, FerroError) else list(unique_ids or ())
        with self._monitor.lock:
            generation, gathering = self._arrive(("nccl", communicator, attempt), gathering, brought)
            gathering.outcome = gathering.outcome or failure
        return self._await(generation, gathering, timeout)

    def describe(self, ranks: Iterable[int], timeout: float) -> list[MemberReport]:
        with self._monitor.lock:
            members = self._world.generation.members
            return [members[rank].report_of(rank) for rank in ranks if 0 <= rank < len(members)]

    def report_of(self, rank: int) -> MemberReport:
        """What is known of this member. The lock is held."""
        age = self.clock.now() - self._noted_at
        return MemberReport(rank, self.name, "", self.state, self.activity.operations, age, self.activity.last, self.reason)

    @property
    def farewell(self) -> str:
        """Why it is gone."""
        return self.reason or "it left the job"

    @property
    def pending_members(self) -> list[str]:
        with self._monitor.lock:
            return [session.name for session in self._world.to_admit()]

    def rejoin(self, timeout: float) -> Membership:
        before, since = self._world.generation.number, self.clock.now()
        with self._monitor.lock:
            self._check_alive()
            self._world.ask_for_place(self)
        self._world.trip_latches()

        def placed() -> Membership | None:
            self._check_alive()
            return None if self.asking else self.membership

        found = self._monitor.wait(placed, self.clock.now() + timeout)
        if found is not None:
            return found
        with self._monitor.lock:
            if not self.asking:
                return self.membership
            absent = {member.rank: str(member.report_of(member.rank)) for member in self._world.lacking(since)}
            self.asking, self.gave_up_at = False, self.clock.now()
        lacks = "; ".join(absent.values()) or "new members"
        raise RendezvousTimeoutError(
            list(absent), f"no generation followed generation {before} within {timeout:g} s: it lacks {lacks}"
        )

    def _noted(self) -> None:
        self._noted_at = self.clock.now()
        if self._world.on_note is not None:
            self._world.on_note(self.rank)

    def leave(self, reason: str = "") -> None:
        own: FerroError = GroupClosedError(f"{self.name} has left job {self._world.job!r}")
        if reason:
            own = PeerLostError(self.rank, reason)
        self._world.end_session(self, "left", reason, own)

    def _participants(self, ranks: Iterable[int] | None) -> tuple[int, ...]:
        return limits.check_participants(ranks, self.rank, self.membership.assignment.size)

    def _arrive(self, key: tuple[str, str, int], gathering: _Gathering, brought: list[bytes]) -> tuple[_Generation, _Gathering]:
        """Joins the gathering of this name, or opens it. The lock is held."""
        self._check_alive()
        generation = self._world.generation
        if generation.number != self.membership.assignment.generation:
            raise StaleGenerationError(f"{self.name} has no rank in generation {generation.number}")
        found = generation.gatherings.setdefault(key, gathering)
        if found.ranks != gathering.ranks:
            mine, theirs = list(gathering.ranks), list(found.ranks)
            conflict = UsageError(f"{found.label}: rank {self.rank} names the participants {mine}, others {theirs}")
            found.outcome = found.outcome or conflict
            self._monitor.changed()
            raise conflict
        found.arrive(self.rank, brought)
        self._monitor.changed()
        return generation, found

    def _await(self, generation: _Generation, gathering: _Gathering, seconds: float) -> list[bytes]:
        rank = self.rank

        def ended() -> bool | None:
            if gathering.outcome is None:
                self._check_alive()
                if generation.cause is not None:
                    raise error_on_rank(rank, generation.origin, generation.cause).again()
                gone = [missing for missing in gathering.missing if not generation.members[missing].alive]
                if gone:
                    gathering.outcome = PeerLostError(gone[0], generation.members[gone[0]].farewell)
            return gathering.outcome is not None or None

        self._monitor.wait(ended, self.clock.now() + seconds)
        with self._monitor.lock:
            if gathering.outcome is None:
                gathering.outcome = _too_late(generation, gathering, seconds)
                self._monitor.changed()
        if isinstance(gathering.outcome, FerroError):
            raise gathering.outcome.again()
        return list(gathering.outcome)

    def _check_alive(self) -> None:
        if self.state == "left":
            raise GroupClosedError(f"{self.name} has left job {self._world.job!r}")
        if self.state == "dead":
            raise StaleGenerationError(f"{self.name} was declared dead ({self.reason}) and is no longer part of the job")

    def _owner_of(self, bind: str) -> Owner:
        """What a key is bound to. The lock is held."""
        generation = self._world.generation
        if bind == "generation" and generation.cause is not None:
            raise error_on_rank(self.rank, generation.origin, generation.cause).again()
        numbers = {"job": 0, "session": self.number, "generation": generation.number}
        return bind, numbers[bind]


def _of_lost_link(reporter: int, peer: int, member: LocalSession, reason: str) -> FerroError:
    """Why a rank cannot be reached."""
    if member.state == "dead":
        return PeerLostError(peer, member.farewell)
    if member.state == "left":
        return member_left(peer)
    return already_reforming(reporter, peer) if member.asking else link_lost(reporter, peer, reason)


def _too_late(generation: _Generation, gathering: _Gathering, seconds: float) -> FerroError:
    missing = "; ".join(str(generation.members[rank].report_of(rank)) for rank in gathering.missing)
    message = f"{gathering.label} was not complete within {seconds:g} s; missing: {missing}"
    late = CollectiveTimeoutError if gathering.ids_needed else BarrierTimeoutError
    return late(gathering.missing, message)
