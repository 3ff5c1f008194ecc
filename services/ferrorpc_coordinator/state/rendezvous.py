"""Rendezvous: members ask for a place in the next generation, and the round closes when its policy is satisfied.

A fixed world (min == max) closes when that many members are there. An elastic one closes when max are there, or when all
survivors of the previous generation have asked and min are there, or when min are there and the last call has passed. Two rules
protect running work: a working generation is never ended by processes that want to join it, only by all its own members asking;
and no round closes without survivors while there are any: a fixed world waits for all of them, an elastic one for the first.

Members that get no place keep waiting: they are the spares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from ferrorpc.errors import (
    FerroError,
    InvalidRankError,
    InvalidWorldSizeError,
    LimitExceededError,
    RendezvousTimeoutError,
    UsageError,
    require,
)
from ferrorpc.v1 import identity_pb2, rendezvous_pb2, session_pb2
from ferrorpc.wire.error_detail import detail_of
from ferrorpc_coordinator.state.conflicts import data_protocol_conflict, rank_conflict, run_conflict, size_conflict
from ferrorpc_coordinator.state.context import JobContext, Requester
from ferrorpc_coordinator.state.generations import Generation, Generations
from ferrorpc_coordinator.state.member import Liveness, Member
from ferrorpc_coordinator.state.members import Members
from ferrorpc_coordinator.state.ranks import Claim, assign, claimed
from ferrorpc_coordinator.state.settings import MILLISECOND, format_seconds
from ferrorpc_coordinator.state.strays import Strays
from ferrorpc_coordinator.state.throttle import BroadcastThrottle

NAMED_MAX: Final = 16
"""Processes of each kind that are named in a timeout's message."""

REPLACING: Final = (
    "replace lost ranks (`ferrorpc run --restart worker --max-restarts 3`), or allow a smaller world (`--world-size MIN:MAX`)"
)
"""What to try where those who were in a generation wait in vain for enough members to form the next one."""


@dataclass(slots=True, eq=False)
class PendingJoin:
    """One member's unanswered request to join."""

    member: Member
    requester: Requester
    request: rendezvous_pb2.JoinRequest
    since: int

    @property
    def size(self) -> tuple[int, int]:
        """Minimum and maximum size of the world."""
        return self.request.policy.min_size, self.request.policy.max_size

    @property
    def fixed(self) -> bool:
        """Whether minimum and maximum are equal."""
        return self.request.policy.min_size == self.request.policy.max_size


class Rendezvous:
    """The round of a job that has not closed yet."""

    def __init__(self, context: JobContext, members: Members, generations: Generations) -> None:
        self._context = context
        self._members = members
        self._generations = generations
        self._pending: dict[str, PendingJoin] = {}
        self._announced: list[str] | None = []
        """The names of waiting members last sent to the newest generation; None if they must be sent again."""
        self._pending_notice = BroadcastThrottle(context, "waiting", self._announce)
        self._last_call: int | None = None
        self.strays = Strays(context)
        """Of this round."""
        self._claimants: dict[int, Member] = {}
        """Rank -> the last process of this round that had this rank pinned."""
        self._timed_out: dict[str, tuple[PendingJoin, int]] = {}
        """Members whose request timed out in this round, and when."""

    @property
    def reforming(self) -> dict[str, int]:
        """Since when members of the newest generation have waited for the next one."""
        return {name: pending.since for name, pending in self._pending.items() if pending.member.rank >= 0}

    @property
    def longest_ns(self) -> int:
        """For how long members have waited; 0 if nobody does. Newcomers to a generation that goes on do not count: spares may
        wait for ever."""
        newest, since = self._generations.newest, list(self.reforming.values())
        if newest.over:
            since += [max(pending.since, newest.ended_at) for pending in self._pending.values()]
        return self._context.now - min(since, default=self._context.now)

    def joining(self, member: Member) -> bool:
        """Whether this member has asked to join."""
        return member.name in self._pending

    def join(self, requester: Requester, member: Member, request: rendezvous_pb2.JoinRequest) -> None:
        """Takes a request to join; it is answered when the round closes.

        Raises:
            InvalidWorldSizeError, InvalidRankError, LimitExceededError: the request is invalid.
            ConfigError: it contradicts another request; both are named.
        """
        newest = self._generations.newest
        if member.rank >= 0 and request.after_generation < newest.number:
            self._context.answer(requester, self._response(newest, member.rank))
            if newest.broken is not None:
                self._context.push([member], session_pb2.Event(broken=newest.broken))
            return
        try:
            self._check(member, request)
            self._check_size(member, request)
            self._check_run(member)
            self._check_data_protocol(member)
            self._check_rank(member, request.pinned_rank)
        except FerroError as error:
            self.strays.refused(member.name, error.message)
            raise
        self.strays.came(member.name)
        if member.rank >= 0:
            newest.reforming.add(member.rank)
        before = self._pending.pop(member.name, None)
        if before is not None:
            self._context.answer(
                before.requester, detail_of(UsageError(f"{member} asked again to join; the later request counts"))
            )
        member.pinned = request.pinned_rank >= 0
        if member.pinned:
            self._claimants[request.pinned_rank] = member
        self._timed_out.pop(member.name, None)
        self._pending[member.name] = PendingJoin(member, requester, request, self._context.now)
        until = self._context.now + request.timeout_ms * MILLISECOND
        self._context.arm(("join", member.name), until, partial(self._time_out, member.name))
        self.review()

    def withdraw(self, member: Member) -> None:
        """Drops the request of a member that died or left."""
        pending = self._pending.get(member.name)
        if pending is not None and pending.member is member:
            del self._pending[member.name]
            self._context.disarm(("join", member.name))

    # -- deciding ------------------------------------------------------------------------------------------------------

    def review(self) -> None:
        """Closes the round if its policy is satisfied; else starts or stops the last call, and announces the waiting
        members."""
        if self._pending:
            chosen = self._decide()
            if chosen is not None:
                self._close(chosen)
        else:
            self._cancel_last_call()
        self._pending_notice.notify()

    def waiting_reason(self) -> str:
        """Why the round is still open; empty if there is none."""
        if not self._pending:
            return ""
        first = next(iter(self._pending.values()))
        low, high = first.size
        came = self._came(low)
        world = str(low) if low == high else f"{low} to {high}"
        reason = f"{len(came)} of {world} members ask to join"
        not_joining = self._held_up_by(low)
        if not_joining:
            reason += f"; {self._unfinished()}: "
            reason += ", ".join(str(member) for member in not_joining[:8]) + (", ..." if len(not_joining) > 8 else "")
        elif missing := self._missing_ranks(came, first):
            reason += f"; missing: rank {', '.join(map(str, missing[:NAMED_MAX]))}; {self._describe_ranks(missing[:NAMED_MAX])}"
        if self._last_call is not None:
            reason += f"; last call for {format_seconds(max(0, self._last_call - self._context.now))} more"
        if exits := self.strays.exits:
            reason += f"; ended early: {'; '.join(exits)}"
        refusals = self.strays.refusals
        return f"{reason}; refused: {'; '.join(refusals)}" if refusals else reason

    def _unfinished(self) -> str:
        """What the newest generation does while living members of it have not asked to join."""
        newest = self._generations.newest
        state = "is over" if newest.over else "goes on"
        return f"generation {newest.number} {state}, its members have not all asked for another"

    def _ready(self) -> list[PendingJoin]:
        return [pending for pending in self._pending.values() if pending.member.connected]

    def _came(self, low: int, timed_out: Sequence[PendingJoin] = ()) -> list[PendingJoin]:
        """Who has asked to join, for those who wait; without those whose stream has ended, where only these are missing."""
        asked = [*self._pending.values(), *timed_out]
        return asked if len(asked) < low else [*self._ready(), *timed_out]

    def _held_up_by(self, low: int, timed_out: Sequence[PendingJoin] = ()) -> list[Member]:
        """Living members of the newest generation that have not asked to join; where enough came, also those that have, but
        whose stream has ended."""
        joining = self._ready() if len(self._came(low, timed_out)) >= low else self._pending.values()
        return self._living_without([*joining, *timed_out])

    def _living_without(self, joining: Sequence[PendingJoin]) -> list[Member]:
        """Living members of the newest generation that are not among these."""
        joining_members = {pending.member for pending in joining}
        return [member for member in self._generations.newest.living if member not in joining_members]

    def _decide(self) -> list[PendingJoin] | None:
        first = next(iter(self._pending.values()))
        low, high = first.size
        ready = self._ready() if len(self._pending) >= low else []
        if len(ready) < low:
            self._cancel_last_call()
            return None
        newest, not_joining = self._generations.newest, self._living_without(ready)
        if not_joining:
            has_survivor = any(pending.member.rank >= 0 for pending in ready)
            if first.fixed or not newest.over or not has_survivor:
                self._cancel_last_call()
                return None
        survivors_asked = not not_joining and bool(newest.living)
        full = len(ready) >= high and not not_joining
        if survivors_asked or full or self._last_call_passed(ready, bool(not_joining)):
            return self._choose(ready, high)
        return None

    def _choose(self, ready: list[PendingJoin], most: int) -> list[PendingJoin]:
        """Members of the newest generation first, then those with pinned ranks, then in order of arrival."""
        order = sorted(ready, key=lambda pending: (pending.member.rank < 0, pending.request.pinned_rank < 0))
        kept = set(order[:most])
        return [pending for pending in ready if pending in kept]

    def _last_call_passed(self, ready: list[PendingJoin], not_joining: bool) -> bool:
        if self._last_call is None:
            window = max(pending.request.policy.last_call_ms for pending in ready) * MILLISECOND
            if not_joining:
                window = max(window, self._context.settings.survivor_wait_ns)
            self._last_call = self._context.now + window
            self._context.arm(("last call",), self._last_call, self.review)
        return self._context.now >= self._last_call

    def _cancel_last_call(self) -> None:
        if self._last_call is not None:
            self._last_call = None
            self._context.disarm(("last call",))

    # -- closing -------------------------------------------------------------------------------------------------------

    def _close(self, chosen: list[PendingJoin]) -> None:
        self._cancel_last_call()
        newest = self._generations.newest
        number = max([self._context.last_generation, *(pending.request.after_generation for pending in chosen)]) + 1
        low, high = chosen[0].size
        ranks = assign([self._claim(pending) for pending in chosen], len(chosen), elastic=low < high)
        in_order = [pending for _, pending in sorted(zip(ranks, chosen, strict=True), key=lambda pair: pair[0])]
        reason = f"{len(chosen)} of {high} joined" if low == high else f"{len(chosen)} joined, {low} to {high} were wanted"
        if newest.number:
            reason += f", after generation {newest.number}: {newest.end_reason or 'all its members asked for another'}"
        members, policy = tuple(pending.member for pending in in_order), chosen[0].request.policy
        generation = Generation(number, members, policy, reason, cost_table=self._context.settings.cost_table)
        response = self._response(generation, 0)
        try:
            what = f"bytes of the names, addresses and labels of this round's {len(chosen)} members"
            require(what, response.ByteSize(), "world_bytes", self._context.limits.world_bytes)
        except LimitExceededError as error:
            self._reject(chosen, error)
            return
        self._generations.begin(generation)
        for known in (self.strays, self._claimants, self._timed_out):
            known.clear()
        for pending in chosen:
            self.withdraw(pending.member)
        own = (rendezvous_pb2.JoinResponse(rank=rank) for rank in range(len(in_order)))
        self._context.answer_many((pending.requester for pending in in_order), response, own)
        if self._announced:
            self._announced = None

    def _reject(self, chosen: list[PendingJoin], error: FerroError) -> None:
        """Rejects the requests of these members, with which the round cannot close."""
        for pending in chosen:
            self.withdraw(pending.member)
            self._context.answer(pending.requester, detail_of(error))

    def _claim(self, pending: PendingJoin) -> Claim:
        member, request = pending.member, pending.request
        return Claim(member.host, request.pinned_rank, member.rank, member.last_rank, request.hinted_rank)

    def _response(self, generation: Generation, rank: int) -> rendezvous_pb2.JoinResponse:
        response = rendezvous_pb2.JoinResponse(
            generation=generation.number, rank=rank, reason=generation.reason, cost_table=generation.cost_table
        )
        for number, member in enumerate(generation.members):
            peer = response.peers.add(
                name=member.name,
                incarnation=member.incarnation,
                rank=number,
                state=identity_pb2.MEMBER_STATE_ACTIVE,
                host=member.host,
                address=member.address,
            )
            for name, value in member.labels.items():
                peer.labels.add(name=name, value=value)
        return response

    def _to_admit(self) -> list[str]:
        """The waiting members that another generation would admit.

        Spares do not count, or members would reform for them for ever.
        """
        newest = self._generations.newest
        if not newest.number:
            return []
        waiting = [pending for pending in self._pending.values() if pending.member.rank < 0]
        room = max(0, waiting[0].size[1] - len(newest.living)) if waiting else 0
        return [pending.member.name for pending in sorted(waiting, key=lambda pending: pending.request.pinned_rank < 0)[:room]]

    def _announce(self) -> int:
        """Sends the names of waiting members to the newest generation, if they changed."""
        names = self._to_admit()
        if names == self._announced:
            return 0
        self._announced = names
        event = session_pb2.Event(pending=session_pb2.PendingMembers(names=names))
        return self._context.push(self._generations.newest.living, event)

    def catch_up(self, member: Member) -> None:
        """Sends a resumed member the names of the waiting members; without an event it assumes that there are none."""
        if self._announced:
            self._context.push([member], session_pb2.Event(pending=session_pb2.PendingMembers(names=self._announced)))

    # -- refusing ------------------------------------------------------------------------------------------------------

    def _check(self, member: Member, request: rendezvous_pb2.JoinRequest) -> None:
        low, high = request.policy.min_size, request.policy.max_size
        if not 1 <= low <= high:
            raise InvalidWorldSizeError(f"{member} asked for a world of {low}:{high}")
        require("the world's size", high, "members", self._context.limits.members)
        after, most = request.after_generation, self._context.limits.generation_number
        if after > self._context.last_generation:
            require("the generation to follow", after, "generation_number", most)
        if request.pinned_rank >= high:
            raise InvalidRankError(f"{member} has RANK={request.pinned_rank}, but the world has {high} ranks")

    def _check_size(self, member: Member, request: rendezvous_pb2.JoinRequest) -> None:
        """Raises ConfigError if others have, or ask for, another size of the world. That of a generation's connected members
        counts: who asks for another is refused, also if they came before, while nobody was connected. Otherwise the first's."""
        size, newest, job = (request.policy.min_size, request.policy.max_size), self._generations.newest, self._context.job
        holder, wanted = self._holder(member), (newest.policy.min_size, newest.policy.max_size)
        if holder is not None and holder is not member and wanted != size:
            raise size_conflict(job, member, size, holder, wanted)
        for other in [other for other in self._pending.values() if other.member is not member and other.size != size]:
            if holder is None:
                raise size_conflict(job, member, size, other.member, other.size)
            self._reject([other], size_conflict(job, other.member, other.size, holder, size))

    def _check_data_protocol(self, member: Member) -> None:
        """Raises VersionMismatchError if ranks would not understand each other. Whose version counts: as with sizes."""
        job, holder = self._context.job, self._holder(member)
        if holder is not None and not member.understands(holder):
            raise data_protocol_conflict(job, member, holder)
        for other in [other for other in self._pending.values() if not member.understands(other.member)]:
            if holder is None:
                raise data_protocol_conflict(job, member, other.member)
            self._reject([other], data_protocol_conflict(job, other.member, member))

    def _holder(self, member: Member) -> Member | None:
        """Whose size and version count in the newest generation: `member` itself if it has a rank there, else the first that
        is connected, if any is."""
        if member.rank >= 0:
            return member
        return next((known for known in self._generations.newest.members if known.connected), None)

    def _check_run(self, member: Member) -> None:
        """Raises ConfigError if members of another run ask. If `member` is of the run that goes on, refuses those instead."""
        others = [other for other in self._pending.values() if member.run and other.member.run not in ("", member.run)]
        goes_on = any(known.run == member.run for known in self._generations.newest.living)
        for other in others:
            if not goes_on:
                raise run_conflict(self._context.job, member, other.member)
            self._reject([other], run_conflict(self._context.job, other.member, member))

    def _check_rank(self, member: Member, rank: int) -> None:
        """Raises ConfigError if another process has the pinned rank, unless `member` holds it already: then that is refused."""
        if rank < 0:
            return
        ranked = self._generations.newest.members
        current = ranked[rank] if rank < len(ranked) else None
        for other in list(self._pending.values()):
            if other.request.pinned_rank != rank or other.member is member:
                continue
            if current is not member:
                raise rank_conflict(rank, member, other.member)
            self._reject([other], rank_conflict(rank, other.member, member))
        if current is not None and current is not member and current.pinned and current.connected:
            raise rank_conflict(rank, member, current)  # it may replace one whose stream has ended

    def _time_out(self, name: str) -> None:
        """Fails a request that timed out, with what is known of all members."""
        pending = self._pending[name]
        error = self._timeout_error(pending)
        self.withdraw(pending.member)
        self._timed_out[name] = pending, self._context.now
        oldest = next(iter(self._pending.values()), None)  # only those who waited beside one that still waits are known
        self._timed_out = {name: one for name, one in self._timed_out.items() if oldest is not None and one[1] >= oldest.since}
        self._context.occurrences.add("rendezvous", error.message)
        self._context.answer(pending.requester, detail_of(error))
        self.review()

    def _timeout_error(self, pending: PendingJoin) -> RendezvousTimeoutError:
        head = f"{pending.member} waited {format_seconds(self._context.now - pending.since)} to join job {self._context.job}: "
        present = "; ".join(self._members.summary(other.member) for other in list(self._pending.values())[:NAMED_MAX])
        gave_up = [other for other, when in self._timed_out.values() if when >= pending.since]
        timed_out = gave_up if len(self._ready()) + len(gave_up) < pending.size[0] else []
        # Who gave up is named only where nobody else holds the round up.
        not_joining = self._held_up_by(pending.size[0], gave_up) or self._held_up_by(pending.size[0], timed_out)
        if not_joining:
            ranks = [member.rank for member in not_joining]
            about = "; ".join(self._members.summary(member) for member in not_joining[:NAMED_MAX])
            head += f"{self._unfinished()}: {about}"
            spare = not self._generations.newest.over and pending.member.rank < 0  # a place can become free at any time
            return RendezvousTimeoutError(ranks, f"{head}. Waiting: {present}{self._refusals()}", retryable=spare)
        return self._missing_error(pending, timed_out, head, f"Present: {present}")

    def _missing_error(
        self, pending: PendingJoin, timed_out: list[PendingJoin], head: str, present: str
    ) -> RendezvousTimeoutError:
        low, high = pending.size
        came = self._came(low, timed_out)
        head += f"{len(came)} of {low if low == high else f'{low} to {high}'} came, "
        given_up = f". Gave up before: {', '.join(str(other.member) for other in timed_out[:NAMED_MAX])}" if timed_out else ""
        ranks, missing = self._missing_ranks(came, pending), max(0, low - len(came))
        unknown = [f"one more member ({number} of {missing})" for number in range(1, missing + 1)]
        if ranks:
            head += f"missing: rank {', '.join(map(str, ranks))}; {self._describe_ranks(ranks)}"
        else:
            head += f"{missing} missing whose ranks nobody claimed" if missing else "and others were still called for"
        text = f"{head}. {present}{given_up}{self._refusals()}{self._other_losses(ranks)}"
        return RendezvousTimeoutError(ranks or unknown, text, hint=REPLACING if pending.member.rank >= 0 else None)

    def _missing_ranks(self, came: list[PendingJoin], pending: PendingJoin) -> list[int]:
        """The unclaimed ranks of a fixed world; none unless everyone who came claims a rank."""
        taken = claimed([self._claim(other) for other in came], pending.size[1])
        known = pending.fixed and len(taken) == len(came)
        return sorted(set(range(pending.size[1])) - set(taken.values())) if known else []

    def _describe_ranks(self, ranks: list[int]) -> str:
        """Describes what is known of the processes that last had, or claimed, these ranks."""
        holders = self._last_holders(ranks)
        known = [
            ("" if holder.rank == rank else f"rank {rank} was claimed by ") + self._members.summary(holder)
            for rank, holder in list(holders.items())[:NAMED_MAX]
        ]
        never = [str(rank) for rank in ranks if rank not in holders]
        return "; ".join([*known, f"nothing was heard of rank {', '.join(never)}"] if never else known)

    def _last_holders(self, ranks: list[int]) -> dict[int, Member]:
        """The last process that had or claimed each of these ranks, if there was one."""
        gone = sorted((member for member in self._members if not member.alive), key=lambda member: member.revision)
        holders = {member.last_rank: member for member in gone}  # perhaps of one that had it before; the newest holders count
        holders |= {member.rank: member for member in self._generations.newest.members if not member.alive}
        holders |= self._claimants
        holders |= {member.rank: member for member in self._living_without(self._ready())}
        return {rank: holders[rank] for rank in ranks if rank in holders}

    def _refusals(self) -> str:
        refusals = self.strays.refusals
        return f". Refused: {'; '.join(refusals)}" if refusals else ""

    def _other_losses(self, ranks: list[int]) -> str:
        told = [*self._last_holders(ranks).values(), *(pending.member for pending in self._pending.values())]
        gone = [member for member in self._members if member.liveness in (Liveness.DEAD, Liveness.SUSPECT)]
        known = [self._members.summary(member) for member in gone if member not in told]
        known += self.strays.exits
        return f". Known of others: {'; '.join(known[-NAMED_MAX:])}" if known else ""
