"""Generations: which member has which rank, and the first cause that ended each generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from ferrorpc.errors import StaleGenerationError, UsageError
from ferrorpc.generation_errors import PEER_LEFT, already_reforming, generation_replaced, link_lost
from ferrorpc.v1 import error_pb2, journal_pb2, rendezvous_pb2, session_pb2
from ferrorpc.wire.error_detail import detail_of
from ferrorpc_coordinator.state.context import JobContext
from ferrorpc_coordinator.state.member import Liveness, Member
from ferrorpc_coordinator.state.members import Members
from ferrorpc_coordinator.state.settings import MILLISECOND

TABLE: Final = "generation"
END_REASON_CHARACTERS_MAX: Final = 4_096
"""The status has the reasons of many generations. A cause may be longer: a mismatch names the call of every rank."""


class Refused(Exception):
    """A request named a broken generation: it is answered with that generation's first cause."""

    def __init__(self, detail: error_pb2.ErrorDetail) -> None:
        super().__init__(detail.message)
        self.detail = detail


@dataclass(slots=True, eq=False)
class Generation:
    """One membership of the job. It is over once `end_reason` is set, and broken if `broken` is set too."""

    number: int
    members: tuple[Member, ...]
    """In rank order."""
    policy: rendezvous_pb2.WorldPolicy
    reason: str
    end_reason: str = ""
    ended_at: int = field(default=0, init=False)
    """When it ended; 0 also if that was before the coordinator started."""
    broken: session_pb2.GenerationBroken | None = None
    cost_table: str = ""
    """The cost table by which its members choose algorithms; empty for the one shipped with ferrorpc."""
    departed: set[int] = field(default_factory=set)
    """Ranks that left. The generation goes on without them until an operation needs one."""
    reforming: set[int] = field(default_factory=set)
    """Ranks that have asked for the next generation, and closed their data streams for it. Some may have given up since."""
    ranks: tuple[int, ...] = field(init=False)
    links: dict[tuple[int, int], int] = field(default_factory=dict)
    """Reported broken data streams that are not decided yet: (reporter, peer) -> time of the report."""

    def __post_init__(self) -> None:
        self.ranks = tuple(range(len(self.members)))

    @property
    def over(self) -> bool:
        """Whether it has ended: no operation of it can succeed any more."""
        return bool(self.end_reason)

    @property
    def living(self) -> list[Member]:
        """Its members that are neither dead nor departed."""
        return [member for member in self.members if member.alive]

    def row(self) -> journal_pb2.GenerationRow:
        """The journal row."""
        row = journal_pb2.GenerationRow(
            policy=self.policy, reason=self.reason, end_reason=self.end_reason, cost_table=self.cost_table
        )
        for member in self.members:
            row.seats.add(name=member.name, incarnation=member.incarnation, pinned=member.pinned)
        if self.broken is not None:
            row.broken.CopyFrom(self.broken)
        return row


def before_the_first() -> Generation:
    """What a job has until its first round closes: a generation of number 0 that is over, without members."""
    return Generation(0, (), rendezvous_pb2.WorldPolicy(), "", end_reason="there was none")


class Generations:
    """The job's newest generation, and the status of the last ones.

    Args:
        on_end: called when a generation has ended, with the error for those who wait in it.
    """

    def __init__(
        self,
        context: JobContext,
        members: Members,
        on_end: Callable[[Generation, error_pb2.ErrorDetail], None],
    ) -> None:
        self._context = context
        self._members = members
        self._on_end = on_end
        self.newest = before_the_first()
        self.history: dict[int, session_pb2.GenerationStatus] = {}
        """The last generations by number, oldest first."""
        self._began: dict[int, int] = {}
        """When those of them began that are not from before the coordinator's last start."""
        self.broken_count = 0
        """How many have broken since the coordinator started."""

    def require(self, member: Member, number: int) -> Generation:
        """The generation that a member's request names.

        Raises:
            StaleGenerationError: it is not the newest generation, or the member has no rank in it.
            Refused: it is broken; contains its first cause.
        """
        newest = self.newest
        if newest.number != number or member.rank < 0:
            raise StaleGenerationError(
                f"{member} named generation {number}, in which it has no rank now; the newest generation is "
                f"{newest.number or 'none'}",
                generation=number,
                newest=newest.number,
            )
        if newest.broken is not None:
            raise Refused(newest.broken.cause)
        return newest

    def begin(self, generation: Generation) -> None:
        """A round closed: makes this the newest generation; the one before is over."""
        before = self.newest
        if not before.over:
            replaced = generation_replaced(before.number, generation.number)
            self.end(before, f"replaced by generation {generation.number}", detail_of(replaced))
        for member in before.members:
            member.lose_rank()
        self.newest = generation
        self._context.newest_generation = generation.number
        for rank, member in enumerate(generation.members):
            member.assign_rank(rank, generation.number, self._context.now)
        self._context.durable_state.next_revision()
        self._save(generation)
        self._began[generation.number] = self._context.now
        self._remember(generation)
        text = f"generation {generation.number} of {len(generation.members)}: {generation.reason}"
        self._context.occurrences.add("generation", text, generation=generation.number)

    def end(self, generation: Generation, reason: str, cause: error_pb2.ErrorDetail) -> None:
        """Ends a generation, records the reason, and fails what waits in it with the cause."""
        generation.end_reason, generation.ended_at = reason, self._context.now
        self._context.durable_state.next_revision()
        self._save(generation)
        self._drop_links(generation)
        status, began = self.history[generation.number], self._began.get(generation.number)
        status.end_reason, status.broken = reason, generation.broken is not None
        if began is not None:
            status.lasted_ms = (self._context.now - began) // MILLISECOND
        kind, origin, code = "ended", -1, error_pb2.ERROR_CODE_UNSPECIFIED
        if generation.broken is not None:
            kind, origin, code = "broken", generation.broken.origin_rank, generation.broken.cause.code
        text = f"generation {generation.number} {kind}: {reason}"
        self._context.occurrences.add(kind, text, rank=origin, generation=generation.number, code=code)
        if generation.broken is not None:
            self._context.push(generation.members, session_pb2.Event(broken=generation.broken))
        self._on_end(generation, cause)

    def status(self) -> list[session_pb2.GenerationStatus]:
        """The status of the last generations."""
        for number, began in self._began.items():
            self.history[number].age_ms = (self._context.now - began) // MILLISECOND
        return list(self.history.values())

    def break_(self, generation: Generation, cause: error_pb2.ErrorDetail, origin: int) -> None:
        """Breaks a generation and tells all its members, unless it is over already: the first cause stays."""
        if not generation.over:
            self.broken_count += 1
            generation.broken = session_pb2.GenerationBroken(generation=generation.number, origin_rank=origin, cause=cause)
            self.end(generation, cause.message[:END_REASON_CHARACTERS_MAX] or "no reason was given", cause)

    # -- links ---------------------------------------------------------------------------------------------------------

    def link_lost(self, reporter: Member, lost: session_pb2.LinkLost, generation: Generation) -> None:
        """A rank reports that its data stream to another broke.

        The outcome is decided once it is known whether one of the two died. A peer that has said goodbye did not.
        """
        if lost.peer_rank >= len(generation.members) or lost.peer_rank == reporter.rank:
            raise UsageError(f"rank {reporter.rank} reported a lost link to rank {lost.peer_rank}, which is not its peer")
        peer = generation.members[lost.peer_rank]
        if peer.liveness is Liveness.LEFT:
            for event in self._members.state_events([peer]):
                self._context.push([reporter], event)
            return
        link = (reporter.rank, peer.rank)
        if link not in generation.links:
            generation.links[link] = self._context.now
            if lost.reason == PEER_LEFT:
                self._decide_link(generation, link, lost.reason)
            else:
                settings = self._context.settings
                first_look = self._context.now + min(settings.grace_ns, settings.silence_ns)
                self._decide_link_at(generation, link, first_look, lost.reason)

    def _decide_link_at(self, generation: Generation, link: tuple[int, int], when: int, reason: str) -> None:
        self._context.arm(("link", generation.number, *link), when, partial(self._decide_link, generation, link, reason))

    def _decide_link(self, generation: Generation, link: tuple[int, int], reason: str) -> None:
        """Decides a lost link, or checks again later.

        If both ranks are alive, the link broke the generation; if one of them left meanwhile, nothing did. If one died, its
        death has broken the generation already.
        """
        reported = generation.links.get(link)
        if reported is None or generation.over:
            return
        reporter, peer = (generation.members[rank] for rank in link)
        if Liveness.LEFT in (reporter.liveness, peer.liveness):
            del generation.links[link]
        elif self._is_undecided(generation, reporter, peer, reported, reason):
            self._decide_link_at(generation, link, self._context.now + self._context.settings.tick_interval_ns, reason)
        elif peer.rank in generation.reforming:
            self.break_(generation, detail_of(already_reforming(link[1], f"an operation of rank {link[0]}")), link[1])
        else:
            self.break_(generation, detail_of(link_lost(*link, reason)), link[0])

    def _is_undecided(self, generation: Generation, reporter: Member, peer: Member, reported: int, reason: str) -> bool:
        """Whether one of the two may be dead, or the peer has said goodbye and not told the coordinator yet."""
        now, settings = self._context.now, self._context.settings
        if Liveness.SUSPECT in (reporter.liveness, peer.liveness):
            return True
        if reason == PEER_LEFT:
            return peer.rank not in generation.reforming and now < reported + max(peer.lease_ns, settings.grace_ns)
        # Who has missed a beat may be dead; who has missed them for longer than a dead one's session takes to end is held up.
        return any(
            member.last_heard <= max(reported, now - settings.missed_beat_ns(member.lease_ns))
            and now < member.last_heard + max(member.lease_ns, settings.grace_ns)
            for member in (reporter, peer)
        )

    def _drop_links(self, generation: Generation) -> None:
        for link in generation.links:
            self._context.disarm(("link", generation.number, *link))
        generation.links.clear()

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _save(self, generation: Generation) -> None:
        self._context.put(TABLE, str(generation.number), generation.row())

    def _remember(self, generation: Generation) -> None:
        self.history[generation.number] = session_pb2.GenerationStatus(
            generation=generation.number,
            size=len(generation.members),
            reason=generation.reason,
            end_reason=generation.end_reason,
            broken=generation.broken is not None,
        )
        while len(self.history) > self._context.limits.generations:
            forgotten = next(iter(self.history))
            del self.history[forgotten]
            self._began.pop(forgotten, None)
            self._context.remove(TABLE, str(forgotten))

    def recover(self, number: int, data: bytes) -> None:
        """Restores a generation from its row. Rows come in ascending order; the last one is the newest generation."""
        row = journal_pb2.GenerationRow.FromString(data)
        for rank, seat in enumerate(row.seats):
            member = self._members.get(seat.name)
            if member is not None:
                member.last_rank = rank
        broken = row.broken if row.HasField("broken") else None
        members = tuple(self._recovered_member(seat, broken is not None) for seat in row.seats)
        generation = Generation(number, members, row.policy, row.reason, row.end_reason, broken, row.cost_table)
        self._context.newest_generation = number
        self.newest = generation
        self._remember(generation)

    def erase(self) -> None:
        """Removes all generations and their rows. Their numbers do not come again."""
        self._context.durable_state.remove_generations(self._context.newest_generation)
        for number in self.history:
            self._context.remove(TABLE, str(number))
        self.history.clear()
        self._began.clear()
        self.newest = before_the_first()

    def assign_recovered_ranks(self) -> None:
        """Gives the members of the newest generation their ranks, after the last row."""
        for rank, member in enumerate(self.newest.members):
            member.assign_rank(rank, self.newest.number, self._context.now)
            if member.liveness is Liveness.LEFT:
                self.newest.departed.add(rank)

    def _recovered_member(self, seat: journal_pb2.Seat, broken: bool) -> Member:
        """The member that had a recovered rank.

        If its name now belongs to another process or is unknown, it has left the job, unless the generation broke: a death
        would have broken it in the same step.
        """
        member = self._members.get(seat.name)
        if member is None or member.incarnation != seat.incarnation:
            liveness, reason = (Liveness.DEAD, "replaced") if broken else (Liveness.LEFT, "it left the job")
            return Member(seat.name, seat.incarnation, "", b"", 0, liveness=liveness, reason=reason, recovered=True)
        member.pinned = seat.pinned
        return member
