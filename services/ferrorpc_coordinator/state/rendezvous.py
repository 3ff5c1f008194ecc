"""Rounds: members bid for a place in the next generation, and the round closes when its policy is satisfied.

A fixed world (min == max) closes when that many are there. An elastic one closes when max are there, or when all survivors
of the generation before have asked and min are there, or when min are there and the last call has passed. Two rules keep
the living safe: a generation that still works is never ended by those who want to join it, only by all of its own members
asking; and a fixed world does not close without a living member of the generation before.

Those who find no place bid on: they are the spares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from ferrorpc.errors import (
    ConfigError,
    InvalidRankError,
    InvalidWorldSizeError,
    LimitExceededError,
    RendezvousTimeoutError,
    UsageError,
    require,
)
from ferrorpc.v1 import identity_pb2, rendezvous_pb2, session_pb2
from ferrorpc.wire.error_detail import detail_of
from ferrorpc_coordinator.state.bulletin import Bulletin
from ferrorpc_coordinator.state.desk import Asker, Desk
from ferrorpc_coordinator.state.failures import seconds
from ferrorpc_coordinator.state.generations import Generation, Generations
from ferrorpc_coordinator.state.member import Member, Standing
from ferrorpc_coordinator.state.ranks import Claim, assign, claimed
from ferrorpc_coordinator.state.roster import Roster
from ferrorpc_coordinator.state.settings import MILLISECOND

NAMED_MAX: Final = 16
"""Members of one kind that a timeout tells of."""
STILLBORN_MAX: Final = 16
"""Processes that ended before they said Hello, of which a timeout tells."""


@dataclass(slots=True, eq=False)
class Bid:
    """One member's request for a place."""

    member: Member
    asker: Asker
    request: rendezvous_pb2.JoinRequest
    since: int

    @property
    def size(self) -> tuple[int, int]:
        """Min and max."""
        return self.request.policy.min_size, self.request.policy.max_size

    @property
    def fixed(self) -> bool:
        """Whether only one size will do."""
        return self.request.policy.min_size == self.request.policy.max_size


class Rendezvous:
    """The job's open round."""

    def __init__(self, desk: Desk, roster: Roster, generations: Generations, closing: Callable[[Generation], None]) -> None:
        self._desk = desk
        self._roster = roster
        self._generations = generations
        self._closing = closing
        self._bids: dict[str, Bid] = {}
        self._announced: list[str] | None = []
        """What the newest generation was told last; None when some of it must be told anew."""
        self._waiting = Bulletin(desk, "waiting", self._announce)
        self._last_call: int | None = None
        self._stillborn: dict[str, str] = {}
        self._claimants: dict[int, Member] = {}
        """Rank -> the last process of this round that its launcher gave this rank."""
        self._gave_up: dict[str, tuple[Bid, int]] = {}
        """Those whose time in this round ran out, and when."""

    def joining(self, member: Member) -> bool:
        """Whether this member waits for a place."""
        return member.name in self._bids

    def join(self, asker: Asker, member: Member, request: rendezvous_pb2.JoinRequest) -> None:
        """Takes a bid; it is answered when the round closes.

        Raises:
            InvalidWorldSizeError, InvalidRankError, LimitExceededError: the request alone is wrong.
            ConfigError: it contradicts another one; both are named.
        """
        newest = self._generations.newest
        if newest is not None and newest.holds(member) and request.after_generation < newest.number:
            self._desk.answer(asker, self._response(newest, member.rank))
            if newest.broken is not None:
                self._desk.push([member], session_pb2.Event(broken=newest.broken))
            return
        self._check(member, request)
        self._check_against_others(member, request)
        before = self._bids.pop(member.name, None)
        if before is not None:
            self._desk.answer(before.asker, detail_of(UsageError(f"{member} asked again to join; the later request counts")))
        member.pinned = request.pinned_rank >= 0
        if member.pinned:
            self._claimants[request.pinned_rank] = member
        self._gave_up.pop(member.name, None)
        self._bids[member.name] = Bid(member, asker, request, self._desk.now)
        until = self._desk.now + request.timeout_ms * MILLISECOND
        self._desk.arm(("join", member.name), until, partial(self._time_out, member.name))
        self.review()

    def withdraw(self, member: Member) -> None:
        """Forgets the bid of a member that died or left."""
        bid = self._bids.get(member.name)
        if bid is not None and bid.member is member:
            del self._bids[member.name]
            self._desk.disarm(("join", member.name))

    def never_came(self, name: str, how: str) -> None:
        """A process ended before it said Hello: whoever waits for it in vain will be told."""
        self._stillborn[name[:128]] = how[:512]
        while len(self._stillborn) > STILLBORN_MAX:
            del self._stillborn[next(iter(self._stillborn))]

    # -- deciding ------------------------------------------------------------------------------------------------------

    def review(self) -> None:
        """Closes the round if its time has come; else sees to the last call and to who is told of the waiting."""
        if self._bids:
            chosen = self._decide()
            if chosen is not None:
                self._close(chosen)
        else:
            self._hush()
        self._waiting.issue()

    def waiting_reason(self) -> str:
        """Why the round is still open; empty when none is."""
        if not self._bids:
            return ""
        first = next(iter(self._bids.values()))
        low, high = first.size
        ready = self._ready()
        world = str(low) if low == high else f"{low} to {high}"
        reason = f"{len(ready)} of {world} members ask to join"
        owing = self._owing()
        if owing:
            reason += f"; generation {self._desk.newest_generation} goes on until its other members ask too: "
            reason += ", ".join(str(member) for member in owing[:8]) + (", ..." if len(owing) > 8 else "")
        elif missing := self._missing_ranks(ready, first):
            reason += f"; missing: rank {', '.join(map(str, missing[:NAMED_MAX]))}; {self._about(missing[:NAMED_MAX])}"
        elif self._last_call is not None:
            reason += f"; last call for {seconds(max(0, self._last_call - self._desk.now))} more"
        return reason

    def _ready(self) -> list[Bid]:
        return [bid for bid in self._bids.values() if bid.member.connected]

    def _owing(self) -> list[Member]:
        """Living members of the newest generation that have not asked, or have asked and may be dying."""
        newest = self._generations.newest
        if newest is None:
            return []
        return [m for m in newest.seats if m.alive and (m.name not in self._bids or not m.connected)]

    def _decide(self) -> list[Bid] | None:
        first = next(iter(self._bids.values()))
        low, high = first.size
        if len(self._bids) < low:
            self._hush()
            return None
        ready = self._ready()
        if len(ready) < low:
            self._hush()
            return None
        newest, owing = self._generations.newest, self._owing()
        if owing and newest is not None and (first.fixed or not newest.over):
            self._hush()
            return None
        survivors_asked = newest is not None and not owing and any(member.alive for member in newest.seats)
        full = len(ready) >= high and not owing
        if first.fixed or survivors_asked or full or self._last_call_passed(ready, bool(owing)):
            return self._choose(ready, high)
        return None

    def _choose(self, ready: list[Bid], most: int) -> list[Bid]:
        """Members of the newest generation first, then those whose rank is pinned, then the order of arrival."""
        newest = self._generations.newest
        order = sorted(ready, key=lambda bid: (newest is None or not newest.holds(bid.member), bid.request.pinned_rank < 0))
        kept = set(map(id, order[:most]))
        return [bid for bid in ready if id(bid) in kept]

    def _last_call_passed(self, ready: list[Bid], owing: bool) -> bool:
        if self._last_call is None:
            window = max(bid.request.policy.last_call_ms for bid in ready) * MILLISECOND
            if owing:
                window = max(window, self._desk.settings.survivor_call_ns)
            self._last_call = self._desk.now + window
            self._desk.arm(("last call",), self._last_call, self.review)
        return self._desk.now >= self._last_call

    def _hush(self) -> None:
        if self._last_call is not None:
            self._last_call = None
            self._desk.disarm(("last call",))

    # -- closing -------------------------------------------------------------------------------------------------------

    def _close(self, chosen: list[Bid]) -> None:
        self._hush()
        newest = self._generations.newest
        number = max([self._desk.newest_generation, *(bid.request.after_generation for bid in chosen)]) + 1
        ranks = assign([self._claim(bid) for bid in chosen], len(chosen))
        in_order = [bid for _, bid in sorted(zip(ranks, chosen, strict=True), key=lambda pair: pair[0])]
        low, high = chosen[0].size
        reason = f"{len(chosen)} of {high} joined" if low == high else f"{len(chosen)} joined, {low} to {high} were wanted"
        if newest is not None:
            reason += f", after generation {newest.number}: {newest.end_reason or 'all its members asked for another'}"
        seats, policy = tuple(bid.member for bid in in_order), chosen[0].request.policy
        generation = Generation(number, seats, policy, reason, cost_table=self._desk.settings.cost_table)
        response = self._response(generation, 0)
        try:
            what = f"bytes that the {len(chosen)} members of this round say of themselves together"
            require(what, response.ByteSize(), "world_bytes", self._desk.limits.world_bytes)
        except LimitExceededError as error:
            self._send_away(chosen, error)
            return
        if newest is not None:
            self._closing(newest)
        self._generations.begin(generation)
        for known in (self._stillborn, self._claimants, self._gave_up):
            known.clear()
        for bid in chosen:
            self.withdraw(bid.member)
        askers = [(bid.asker, rendezvous_pb2.JoinResponse(rank=rank) if rank else None) for rank, bid in enumerate(in_order)]
        self._desk.answer_many(askers, response)
        if self._announced:
            self._announced = None

    def _send_away(self, chosen: list[Bid], error: LimitExceededError) -> None:
        """The round cannot close with these members: they are told why."""
        for bid in chosen:
            self.withdraw(bid.member)
            self._desk.answer(bid.asker, detail_of(error))

    def _claim(self, bid: Bid) -> Claim:
        member, newest = bid.member, self._generations.newest
        current = member.rank if newest is not None and newest.holds(member) else -1
        return Claim(member.host, bid.request.pinned_rank, current, member.last_rank, bid.request.hinted_rank)

    def _response(self, generation: Generation, rank: int) -> rendezvous_pb2.JoinResponse:
        response = rendezvous_pb2.JoinResponse(
            generation=generation.number, rank=rank, reason=generation.reason, cost_table=generation.cost_table
        )
        for number, member in enumerate(generation.seats):
            peer = response.peers.add(
                name=member.name,
                incarnation=member.incarnation,
                rank=number,
                state=identity_pb2.MEMBER_STATE_ACTIVE,
                host=member.host,
                address=member.address,
            )
            for name, value in member.labels:
                peer.labels.add(name=name, value=value)
        return response

    def _to_admit(self) -> list[str]:
        """Whom another generation would admit. Spares do not count: members that reform to admit them would do so for ever."""
        newest = self._generations.newest
        if newest is None:
            return []
        waiting = [bid for bid in self._bids.values() if not newest.holds(bid.member)]
        room = max(0, waiting[0].size[1] - len(newest.living)) if waiting else 0
        return [bid.member.name for bid in sorted(waiting, key=lambda bid: bid.request.pinned_rank < 0)[:room]]

    def _announce(self) -> int:
        """Tells the members of the newest generation whom another one would admit, when that changed."""
        newest, names = self._generations.newest, self._to_admit()
        if newest is None or names == self._announced:
            return 0
        self._announced = names
        return self._desk.push(newest.living, session_pb2.Event(pending=session_pb2.PendingMembers(names=names)))

    def catch_up(self, member: Member) -> None:
        """Tells a member that resumed who waits; one that is told nothing knows of nobody."""
        if self._announced:
            self._desk.push([member], session_pb2.Event(pending=session_pb2.PendingMembers(names=self._announced)))

    # -- refusing ------------------------------------------------------------------------------------------------------

    def _check(self, member: Member, request: rendezvous_pb2.JoinRequest) -> None:
        low, high = request.policy.min_size, request.policy.max_size
        if not 1 <= low <= high:
            raise InvalidWorldSizeError(f"{member} asked for a world of {low}:{high}")
        require("the world's size", high, "members", self._desk.limits.members)
        require("the generation to follow", request.after_generation, "generation_number", self._desk.limits.generation_number)
        if low == high and request.pinned_rank >= high:
            raise InvalidRankError(f"{member} has RANK={request.pinned_rank}, but the world has {high} ranks")

    def _check_against_others(self, member: Member, request: rendezvous_pb2.JoinRequest) -> None:
        """Two claimants of one pinned rank, or two ideas of the world's size, cannot both be right."""
        size = request.policy.min_size, request.policy.max_size
        for other in self._bids.values():
            if other.member is member:
                continue
            if other.size != size:
                raise ConfigError(
                    f"{member} asks for a world of {_world(size)}, {other.member} for one of {_world(other.size)}, "
                    f"in the same job {self._desk.job}",
                    hint="give every process the same FERRORPC_WORLD_SIZE, or another FERRORPC_JOB",
                )
            break
        if request.pinned_rank < 0:
            return
        holder = self._holder(request.pinned_rank, member)
        if holder is not None:
            raise ConfigError(
                f"rank {request.pinned_rank} is claimed by {member} and by {holder}",
                hint="give every process its own RANK; a process whose rank nobody gave it may leave RANK unset",
                claimants=[holder.name, member.name],
            )

    def _holder(self, rank: int, claimant: Member) -> Member | None:
        for bid in self._bids.values():
            if bid.request.pinned_rank == rank and bid.member is not claimant:
                return bid.member
        newest = self._generations.newest
        if newest is None or rank >= len(newest.seats):
            return None
        seated = newest.seats[rank]
        safe = seated.alive and seated.standing is not Standing.SUSPECT  # a suspect one may be what the claimant replaces
        return seated if seated is not claimant and seated.pinned and safe else None

    def _time_out(self, name: str) -> None:
        """Answers a bid whose time is over: who is missing, and what is known of everybody."""
        bid = self._bids[name]
        error = self._explanation(bid)
        self.withdraw(bid.member)
        self._gave_up[name] = bid, self._desk.now
        if not self._bids:
            self._gave_up.clear()
        self._desk.chronicle.add("rendezvous", error.message)
        self._desk.answer(bid.asker, detail_of(error))
        self.review()

    def _explanation(self, bid: Bid) -> RendezvousTimeoutError:
        head = f"{bid.member} waited {seconds(self._desk.now - bid.since)} to join job {self._desk.job}: "
        present = "; ".join(self._roster.sentence(other.member) for other in list(self._bids.values())[:NAMED_MAX])
        tired = self._tired(bid)
        gave_up = [other.member for other in tired]
        owing = [member for member in self._owing() if member not in gave_up]
        newest = self._generations.newest
        if owing and newest is not None:
            ranks = [member.rank for member in owing]
            about = "; ".join(self._roster.sentence(member) for member in owing[:NAMED_MAX])
            state = "is over" if newest.over else "goes on"
            head += f"generation {newest.number} {state}, its members did not all ask for another: {about}"
            spare = not newest.over and not newest.holds(bid.member)  # a place can become free at any time
            return RendezvousTimeoutError(ranks, f"{head}. Waiting: {present}", retryable=spare)
        return self._absence(bid, tired, head, f"Present: {present}")

    def _tired(self, bid: Bid) -> list[Bid]:
        """Those who gave up while this bid waited for the same ones in vain: they are not to blame."""
        earlier = [other for other, when in self._gave_up.values() if when >= bid.since]
        return earlier if len(self._ready()) + len(earlier) < bid.size[0] else []

    def _absence(self, bid: Bid, tired: list[Bid], head: str, present: str) -> RendezvousTimeoutError:
        low, high = bid.size
        came = self._ready() + tired
        head += f"{len(came)} of {low if low == high else f'{low} to {high}'} came, "
        given_up = f". Gave up before: {', '.join(str(other.member) for other in tired[:NAMED_MAX])}" if tired else ""
        ranks = self._missing_ranks(came, bid)
        if ranks:
            head += f"missing: rank {', '.join(map(str, ranks))}; {self._about(ranks)}"
            return RendezvousTimeoutError(ranks, f"{head}. {present}{given_up}{self._known_of_others(ranks)}")
        missing = max(0, low - len(came))
        unknown = [f"one more member ({number} of {missing})" for number in range(1, missing + 1)]
        head += f"{missing} missing whose ranks nobody claimed"
        return RendezvousTimeoutError(unknown, f"{head}. {present}{given_up}{self._known_of_others([])}")

    def _missing_ranks(self, came: list[Bid], bid: Bid) -> list[int]:
        """The ranks of a fixed world that nobody claims, where everyone who came claims one; none where it cannot be known."""
        taken = claimed([self._claim(other) for other in came], bid.size[1])
        known = bid.fixed and len(taken) == len(came)
        return sorted(set(range(bid.size[1])) - set(taken.values())) if known else []

    def _about(self, ranks: list[int]) -> str:
        """What is known of each of these ranks that did not come."""
        holders = self._last_holders(ranks)
        told = [
            ("" if holder.rank == rank else f"rank {rank} was claimed by ") + self._roster.sentence(holder)
            for rank, holder in list(holders.items())[:NAMED_MAX]
        ]
        never = [str(rank) for rank in ranks if rank not in holders]
        return "; ".join([*told, f"nothing was heard of rank {', '.join(never)}"] if never else told)

    def _last_holders(self, ranks: list[int]) -> dict[int, Member]:
        """Who had, or claimed, each of these ranks last, as far as anybody did."""
        holders = {member.last_rank: member for member in self._roster if not member.alive} | self._claimants
        return {rank: holders[rank] for rank in ranks if rank in holders}

    def _known_of_others(self, ranks: list[int]) -> str:
        told = self._last_holders(ranks).values()
        gone = [member for member in self._roster if member.standing in (Standing.DEAD, Standing.SUSPECT)]
        known = [self._roster.sentence(member) for member in gone if member not in told]
        known += [f"{name}: {how}, before it said Hello" for name, how in self._stillborn.items()]
        return f". Known of others: {'; '.join(known[-NAMED_MAX:])}" if known else ""


def _world(size: tuple[int, int]) -> str:
    """As FERRORPC_WORLD_SIZE says it: "4", or "2:4"."""
    low, high = size
    return f"{low}" if low == high else f"{low}:{high}"
