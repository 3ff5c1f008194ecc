"""Generations: who has which rank, and the one first cause that ends it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from ferrorpc.errors import GroupAbortedError, StaleGenerationError, UsageError
from ferrorpc.v1 import error_pb2, journal_pb2, rendezvous_pb2, session_pb2
from ferrorpc.wire.error_detail import detail_of
from ferrorpc_coordinator.state.desk import Desk
from ferrorpc_coordinator.state.failures import Refused
from ferrorpc_coordinator.state.member import Member, Standing
from ferrorpc_coordinator.state.roster import Roster
from ferrorpc_coordinator.state.settings import MILLISECOND

TABLE: Final = "generation"


@dataclass(slots=True, eq=False)
class Generation:
    """One membership. Over once `end_reason` is set; broken if `broken` is set too, and then for good."""

    number: int
    seats: tuple[Member, ...]
    """In rank order."""
    policy: rendezvous_pb2.WorldPolicy
    reason: str
    end_reason: str = ""
    broken: session_pb2.GenerationBroken | None = None
    cost_table: str = ""
    """What its members choose algorithms by; empty for what comes with ferrorpc."""
    departed: set[int] = field(default_factory=set)
    """Ranks that left; the generation goes on without them until somebody needs one."""
    ranks: tuple[int, ...] = field(init=False)
    links: dict[tuple[int, int], int] = field(default_factory=dict)
    """Broken data streams that await a verdict: (reporter, peer) -> when it was reported."""

    def __post_init__(self) -> None:
        self.ranks = tuple(range(len(self.seats)))

    @property
    def over(self) -> bool:
        """No operation of it can succeed any more."""
        return bool(self.end_reason)

    @property
    def living(self) -> list[Member]:
        """Those of its members that are not dead and did not leave."""
        return [member for member in self.seats if member.alive]

    def holds(self, member: Member) -> bool:
        """Whether this very process has a rank here."""
        return member.generation == self.number and 0 <= member.rank < len(self.seats) and self.seats[member.rank] is member

    def row(self) -> journal_pb2.GenerationRow:
        """What survives a restart."""
        row = journal_pb2.GenerationRow(
            policy=self.policy, reason=self.reason, end_reason=self.end_reason, cost_table=self.cost_table
        )
        for member in self.seats:
            row.seats.add(name=member.name, incarnation=member.incarnation, pinned=member.pinned)
        if self.broken is not None:
            row.broken.CopyFrom(self.broken)
        return row


class Generations:
    """The job's newest generation, and a line about each of the last ones.

    Args:
        condemn: called with the generation that a lost link ends, the cause and the rank that is to blame; it breaks it.
        asks_again: whether a member has asked for the next generation.
    """

    def __init__(
        self,
        desk: Desk,
        roster: Roster,
        condemn: Callable[[Generation, error_pb2.ErrorDetail, int], None],
        asks_again: Callable[[Member], bool],
    ) -> None:
        self._desk = desk
        self._roster = roster
        self._condemn = condemn
        self._asks_again = asks_again
        self.newest: Generation | None = None
        self.history: deque[session_pb2.GenerationStatus] = deque()
        self._lived: dict[int, tuple[int, int | None]] = {}
        """When each of them began and ended, as far as this coordinator lived to see it."""

    def require(self, member: Member, number: int) -> Generation:
        """The generation a member's request speaks of.

        Raises:
            StaleGenerationError: that generation is not the newest, or the member has no rank in it.
            Refused: it broke; with its first cause.
        """
        newest = self.newest
        if newest is None or newest.number != number or not newest.holds(member):
            has = "none" if newest is None else str(newest.number)
            raise StaleGenerationError(
                f"{member} spoke of generation {number}, in which it has no rank now; the newest generation is {has}",
                generation=number,
                newest=0 if newest is None else newest.number,
            )
        if newest.broken is not None:
            raise Refused(newest.broken.cause)
        return newest

    def begin(self, generation: Generation) -> None:
        """A round closed: this is the newest generation now; the one before is over."""
        before = self.newest
        if before is not None:
            if not before.over:
                self.end(before, f"replaced by generation {generation.number}")
            for member in before.seats:
                member.take_seat(-1, 0)
        self.newest = generation
        self._desk.newest_generation = generation.number
        for rank, member in enumerate(generation.seats):
            member.take_seat(rank, generation.number)
        self._desk.ledger.change()
        self._save(generation)
        self._remember(generation)
        self._lived[generation.number] = self._desk.now, None
        text = f"generation {generation.number} of {len(generation.seats)}: {generation.reason}"
        self._desk.chronicle.add("generation", text, generation=generation.number)

    def end(self, generation: Generation, reason: str) -> None:
        """Closes a generation without a failure."""
        generation.end_reason = reason
        self._desk.ledger.change()
        self._save(generation)
        self._forget_links(generation)
        self._line(generation).end_reason = reason
        if generation.number in self._lived:
            self._lived[generation.number] = self._lived[generation.number][0], self._desk.now
        origin = -1 if generation.broken is None else generation.broken.origin_rank
        kind = "ended" if generation.broken is None else "broken"
        text = f"generation {generation.number} {kind}: {reason}"
        self._desk.chronicle.add(kind, text, rank=origin, generation=generation.number)

    def told(self) -> list[session_pb2.GenerationStatus]:
        """A line about each of the last ones, with its times where they are known."""
        lines = []
        for line in self.history:
            told = session_pb2.GenerationStatus()
            told.CopyFrom(line)
            began, ended = self._lived.get(line.generation, (None, None))
            if began is not None:
                told.age_ms = (self._desk.now - began) // MILLISECOND
                if ended is not None:
                    told.lasted_ms = (ended - began) // MILLISECOND
            lines.append(told)
        return lines

    def break_(self, generation: Generation, cause: error_pb2.ErrorDetail, origin: int) -> bool:
        """Breaks a generation and tells all its members; False when it was over already: the first cause stays."""
        if generation.over:
            return False
        generation.broken = session_pb2.GenerationBroken(generation=generation.number, origin_rank=origin, cause=cause)
        self.end(generation, cause.message)
        self._desk.push(generation.seats, session_pb2.Event(broken=generation.broken))
        return True

    # -- links ---------------------------------------------------------------------------------------------------------

    def link_lost(self, reporter: Member, lost: session_pb2.LinkLost, generation: Generation) -> None:
        """Two ranks lost their data stream. The verdict falls when it is known whether one of them died."""
        if lost.peer_rank >= len(generation.seats) or lost.peer_rank == reporter.rank:
            raise UsageError(f"rank {reporter.rank} reported a lost link to rank {lost.peer_rank}, which cannot be")
        peer = generation.seats[lost.peer_rank]
        if peer.standing is Standing.LEFT:
            for event in self._roster.standings([peer]):
                self._desk.push([reporter], event)
            return
        link = (reporter.rank, peer.rank)
        if link not in generation.links:
            generation.links[link] = self._desk.now
            self._judge_at(generation, link, self._desk.now + self._desk.settings.grace_ns, lost.reason)

    def _judge_at(self, generation: Generation, link: tuple[int, int], when: int, reason: str) -> None:
        self._desk.arm(("link", generation.number, *link), when, partial(self._judge, generation, link, reason))

    def _judge(self, generation: Generation, link: tuple[int, int], reason: str) -> None:
        """Both alive: the link is to blame. Not yet known (suspect, or silent since): look again; death decides by itself."""
        reported = generation.links.get(link)
        if reported is None or generation.over:
            return
        reporter, peer = (generation.seats[rank] for rank in link)
        unsure = any(member.standing is Standing.SUSPECT for member in (reporter, peer))
        silent = peer.heard <= reported and self._desk.now < reported + max(peer.lease_ns, self._desk.settings.grace_ns)
        if unsure or silent:
            self._judge_at(generation, link, self._desk.now + self._desk.settings.pulse_ns, reason)
            return
        if peer.standing is Standing.LEFT:
            del generation.links[link]
            return
        if self._asks_again(peer):
            blame = f"it called reform() already, and an operation of rank {link[0]} still needs it"
            hint = "make every rank call reform() after the same operations, or after an error of the group"
            self._condemn(generation, detail_of(GroupAbortedError(link[1], blame, hint=hint)), link[1])
            return
        blame = f"the data stream between rank {link[0]} and rank {link[1]} broke: {reason}; both are alive"
        cause = GroupAbortedError(link[0], blame, hint="look at the network between the two hosts; group.reform() dials anew")
        self._condemn(generation, detail_of(cause), link[0])

    def _forget_links(self, generation: Generation) -> None:
        for link in generation.links:
            self._desk.disarm(("link", generation.number, *link))
        generation.links.clear()

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _save(self, generation: Generation) -> None:
        self._desk.put(TABLE, str(generation.number), generation.row())

    def _remember(self, generation: Generation) -> None:
        self.history.append(
            session_pb2.GenerationStatus(
                generation=generation.number,
                size=len(generation.seats),
                reason=generation.reason,
                end_reason=generation.end_reason,
            )
        )
        while len(self.history) > self._desk.limits.generations:
            forgotten = self.history.popleft().generation
            self._lived.pop(forgotten, None)
            self._desk.remove(TABLE, str(forgotten))

    def _line(self, generation: Generation) -> session_pb2.GenerationStatus:
        return next(line for line in reversed(self.history) if line.generation == generation.number)

    def recover(self, number: int, data: bytes) -> None:
        """Takes a row in; rows come in ascending order, the last one is the newest."""
        row = journal_pb2.GenerationRow.FromString(data)
        for rank, seat in enumerate(row.seats):
            member = self._roster.get(seat.name)
            if member is not None:
                member.last_rank = rank
        broken = row.broken if row.HasField("broken") else None
        seats = tuple(self._seated(seat, broken is not None) for seat in row.seats)
        generation = Generation(number, seats, row.policy, row.reason, row.end_reason, broken, row.cost_table)
        self._desk.newest_generation = number
        self.newest = generation
        self._remember(generation)

    def erase(self) -> None:
        """Removes every row."""
        for line in self.history:
            self._desk.remove(TABLE, str(line.generation))

    def seat_recovered(self) -> None:
        """After the last row: gives the members of the newest generation their ranks."""
        newest = self.newest
        if newest is None:
            return
        for rank, member in enumerate(newest.seats):
            member.take_seat(rank, newest.number)
            if member.standing is Standing.LEFT:
                newest.departed.add(rank)

    def _seated(self, seat: journal_pb2.Seat, broken: bool) -> Member:
        """The member in a seat. One whose name has another process now, or is forgotten, can only have left if the generation
        did not break: a death would have broken it in the same step."""
        member = self._roster.get(seat.name)
        if member is None or member.incarnation != seat.incarnation:
            standing, reason = (Standing.DEAD, "replaced") if broken else (Standing.LEFT, "it left the job")
            return Member(seat.name, seat.incarnation, "", b"", 0, standing=standing, reason=reason, recovered=True)
        member.pinned = seat.pinned
        return member
