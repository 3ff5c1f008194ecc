"""Named barriers.

A barrier is identified by (generation, name, ordinal). Its first outcome holds for everyone: released with all payloads, or
failed (a participant died, left or asked for the next generation before it came, arrivals contradict each other, the first
deadline passed). The outcome is kept, so a late or repeated arrival gets the same answer, and all members agree on whether the
barrier was released.

Each set of participants has its own last outcomes: however many barriers pass among others, a member whose stream broke finds
the outcome of its own. If all outcomes together take too much memory, those who have just added one pay with their oldest.

Cost: O(1) for an arrival, O(n) for the release, whose answer is encoded once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

from ferrorpc.errors import BarrierTimeoutError, FerroError, MessageTooLargeError, PeerLostError, UsageError, require
from ferrorpc.generation_errors import already_reforming
from ferrorpc.v1 import barrier_pb2, error_pb2, journal_pb2, session_pb2
from ferrorpc.wire.error_detail import detail_of
from ferrorpc_coordinator.state.context import JobContext, Requester
from ferrorpc_coordinator.state.generations import Generation
from ferrorpc_coordinator.state.member import Member
from ferrorpc_coordinator.state.members import Members
from ferrorpc_coordinator.state.settings import MILLISECOND, format_seconds

TABLE: Final = "barrier"
LAST_ARRIVALS_MAX: Final = 100
"""Released barriers whose last arrival is kept."""
STRAGGLERS_MAX: Final = 16
DESCRIBED_MAX: Final = 256
"""Missing ranks that a timeout's message describes. The error has the numbers of all."""
OUTCOME_BYTES: Final = 1 << 10
"""Memory that a kept outcome takes besides its content and its participants, rounded up."""
INTERNAL_PREFIX: Final = "ferrorpc/"
"""Prefix of ferrorpc's own barriers. Their last arrivals are not counted, since the script has no part in them, and a full disk
does not refuse their payloads, which are small and without which nobody could join."""
Outcome = barrier_pb2.BarrierResponse | error_pb2.ErrorDetail


class Key(NamedTuple):
    """Identifies a barrier."""

    generation: int
    name: str
    ordinal: int

    def __str__(self) -> str:
        """Its key in the journal."""
        return f"{self.generation}/{self.ordinal}/{self.name}"


class Participants(NamedTuple):
    """The participants: these world ranks, or (in generation 0) any `size` clients."""

    ranks: tuple[int, ...]
    size: int

    def __str__(self) -> str:
        return f"ranks {list(self.ranks)}" if self.ranks else f"any {self.size} arrivals"


class Arrival(NamedTuple):
    """The arrival of one participant."""

    requester: Requester
    payload: bytes
    since: int
    until: int
    """Its deadline."""


@dataclass(slots=True, eq=False)
class Barrier:
    """An open barrier. `arrivals` is keyed by rank, or by client in generation 0."""

    participants: Participants
    generation: Generation | None
    since: int
    until: int
    arrivals: dict[int | str, Arrival] = field(default_factory=dict)
    payload_bytes: int = 0

    @property
    def complete(self) -> bool:
        """Whether all participants have arrived."""
        return len(self.arrivals) == self.participants.size

    @property
    def requesters(self) -> list[Requester]:
        """Who waits for its outcome."""
        return [arrival.requester for arrival in self.arrivals.values()]


class Barriers:
    """All open barriers of a job, and the last outcomes."""

    def __init__(self, context: JobContext, members: Members) -> None:
        self._context = context
        self._members = members
        self._open: dict[Key, Barrier] = {}
        self._outcomes: OrderedDict[Key, tuple[Participants, Outcome]] = OrderedDict()
        self._outcomes_of: dict[tuple[int, Participants], dict[Key, None]] = {}
        """(generation, participants) -> their outcomes' keys, oldest first."""
        self._outcome_bytes = 0
        self._last_arrivals: deque[tuple[int, int, int]] = deque(maxlen=LAST_ARRIVALS_MAX)

    def arrive(self, requester: Requester, request: barrier_pb2.BarrierRequest, generation: Generation | None) -> None:
        """Adds an arrival. `generation` is None for a barrier of generation 0.

        Raises:
            UsageError: the arrival matches no barrier, or contradicts earlier ones, which then all fail with it.
            LimitExceededError: the payload is too large, or the journal's disk is full; the barrier then fails with it, too.
        """
        key = Key(request.generation, request.name, request.ordinal)
        participants = self._participants(requester, request, generation)
        known = self._outcomes.get(key)
        if known is not None:
            self._check_agreement(key, requester, participants, known[0])
            self._context.answer_many([requester], known[1])
            return
        barrier = self._open.get(key)
        if barrier is None:
            require("open barriers", len(self._open) + 1, "open_barriers", self._context.limits.open_barriers)
            barrier = self._open[key] = Barrier(participants, generation, self._context.now, 0)
        try:
            self._check_agreement(key, requester, participants, barrier.participants)
            self._add(key, barrier, requester, request)
        except FerroError as error:
            self._finish(key, barrier, detail_of(error))
            raise
        if barrier.complete:
            self._release(key, barrier)
        else:
            self._fail_if_impossible(key, barrier)

    def __len__(self) -> int:
        """The number of open barriers."""
        return len(self._open)

    @property
    def longest_ns(self) -> int:
        """How long the oldest open barrier has waited; 0 if none is open."""
        return max((self._context.now - barrier.since for barrier in self._open.values()), default=0)

    def status(self, after: int) -> Iterator[session_pb2.BarrierStatus]:
        """The open barriers, oldest first, without the first `after`."""
        for key, barrier in islice(self._open.items(), after, None):
            arrived = sorted((rank, arrival.since) for rank, arrival in barrier.arrivals.items() if isinstance(rank, int))
            status = session_pb2.BarrierStatus(name=key.name, generation=key.generation, ordinal=key.ordinal)
            status.arrived_ranks.extend(rank for rank, _ in arrived)
            status.arrived_after_ms.extend((since - barrier.since) // MILLISECOND for _, since in arrived)
            status.missing_ranks.extend(sorted(set(barrier.participants.ranks) - set(status.arrived_ranks)))
            status.age_ms = (self._context.now - barrier.since) // MILLISECOND
            yield status

    def stragglers(self) -> list[session_pb2.Straggler]:
        """The ranks that came last to the script's last barriers in the newest generation, the longest waited-for first."""
        by_rank: dict[int, session_pb2.Straggler] = {}
        for generation, rank, waited_ns in self._last_arrivals:
            if generation == self._context.newest_generation:
                straggler = by_rank.setdefault(rank, session_pb2.Straggler(rank=rank))
                straggler.barriers += 1
                straggler.waited_ms += waited_ns // MILLISECOND
        order = sorted(by_rank.values(), key=lambda one: (-one.waited_ms, -one.barriers, one.rank))
        return order[:STRAGGLERS_MAX]

    def member_gone(self, member: Member) -> None:
        """A member died or left: barriers that wait for it fail; in generation 0 its arrival is removed."""
        for key, barrier in list(self._open.items()):
            self._fail_if_impossible(key, barrier)
            self._withdraw(key, barrier, member.client)  # in a generation they arrive as ranks, and stay

    def member_reforms(self) -> None:
        """A member has asked for the next generation: barriers of this one that wait for it fail."""
        for key, barrier in list(self._open.items()):
            self._fail_if_impossible(key, barrier)

    def call_cancelled(self, requester: Requester) -> None:
        """The caller of a unary call has gone: removes its arrival, unless it has arrived again with another call."""
        for key, barrier in list(self._open.items()):
            arrival = barrier.arrivals.get(requester.client)
            if arrival is not None and arrival.requester == requester:
                self._withdraw(key, barrier, requester.client)

    def generation_over(self, generation: Generation, cause: error_pb2.ErrorDetail) -> None:
        """A generation is over: its open barriers fail with the cause, and its outcomes are forgotten."""
        for key, barrier in [item for item in self._open.items() if item[1].generation is generation]:
            self._close(key)
            self._context.answer_many(barrier.requesters, cause)
        for key in [key for key in self._outcomes if key.generation == generation.number]:
            self._forget(key)

    # -- arriving ------------------------------------------------------------------------------------------------------

    def _participants(
        self, requester: Requester, request: barrier_pb2.BarrierRequest, generation: Generation | None
    ) -> Participants:
        if not request.name or request.ordinal < 1 or len(request.name.encode()) > self._context.limits.key_bytes:
            raise UsageError("a barrier needs a name of at most 512 bytes, and an ordinal from 1")
        most = self._context.limits.payload_bytes
        require("a barrier's payload", len(request.payload), "payload_bytes", most, MessageTooLargeError)
        if generation is None:
            if request.count < 1 or request.ranks:
                raise UsageError("a barrier of generation 0 counts arrivals: it needs a count, and no ranks")
            return Participants((), request.count)
        size = len(generation.members)
        if not request.ranks:
            return Participants(generation.ranks, size)
        ranks = tuple(sorted(set(request.ranks)))
        if ranks[-1] >= size or requester.member is None or requester.member.rank not in ranks:
            raise UsageError(f"{requester} arrived at barrier {request.name!r} of ranks {list(ranks)} in a world of {size}")
        return Participants(ranks, len(ranks))

    def _check_agreement(self, key: Key, requester: Requester, mine: Participants, theirs: Participants) -> None:
        if mine != theirs:
            raise UsageError(
                f"barrier {key.name!r} #{key.ordinal}: {requester} names {mine}, others name {theirs}",
                hint="every participant must name the same ranks",
            )

    def _add(self, key: Key, barrier: Barrier, requester: Requester, request: barrier_pb2.BarrierRequest) -> None:
        who: int | str = requester.client if requester.member is None or barrier.generation is None else requester.member.rank
        until = self._context.now + request.timeout_ms * MILLISECOND
        before = barrier.arrivals.get(who)
        if before is not None:
            barrier.payload_bytes -= len(before.payload)
            again = UsageError(f"{requester} arrived at barrier {key.name!r} #{key.ordinal} again; the later arrival counts")
            self._context.answer(before.requester, detail_of(again))
        total = barrier.payload_bytes + len(request.payload)
        require(f"payloads of barrier {key.name!r}", total, "barrier_bytes", self._context.limits.barrier_bytes)
        if total and not key.name.startswith(INTERNAL_PREFIX):
            self._context.require_disk(f"barrier {key.name!r} #{key.ordinal} takes no payload")
        barrier.payload_bytes = total
        since = self._context.now if before is None else before.since
        barrier.arrivals[who] = Arrival(requester, request.payload, since, until)
        if not barrier.until or until < barrier.until:
            self._end_by(key, barrier, until)
        elif before is not None and before.until == barrier.until:
            self._end_by(key, barrier, min(arrival.until for arrival in barrier.arrivals.values()))

    def _withdraw(self, key: Key, barrier: Barrier, client: str) -> None:
        arrival = barrier.arrivals.pop(client, None)
        if arrival is not None:
            barrier.payload_bytes -= len(arrival.payload)
            if not barrier.arrivals:
                self._close(key)
            elif arrival.until == barrier.until:
                self._end_by(key, barrier, min(other.until for other in barrier.arrivals.values()))

    def _end_by(self, key: Key, barrier: Barrier, until: int) -> None:
        barrier.until = until
        self._context.arm(("barrier", key), until, partial(self._time_out, key))

    # -- finishing -----------------------------------------------------------------------------------------------------

    def _release(self, key: Key, barrier: Barrier) -> None:
        arrivals = barrier.arrivals
        order = (
            [arrivals[rank] for rank in barrier.participants.ranks] if barrier.participants.ranks else list(arrivals.values())
        )
        times = [arrival.since for arrival in order]
        self._record_last(key, barrier)
        response = barrier_pb2.BarrierResponse(
            payloads=[arrival.payload for arrival in order], spread_ms=(max(times) - min(times)) // MILLISECOND
        )
        revision = self._context.durable_state.next_revision()
        row = journal_pb2.BarrierRow(
            response=response, ranks=barrier.participants.ranks, count=barrier.participants.size, revision=revision
        )
        self._context.put(TABLE, str(key), row)
        self._finish(key, barrier, response)

    def _record_last(self, key: Key, barrier: Barrier) -> None:
        arrivals = sorted((arrival.since, rank) for rank, arrival in barrier.arrivals.items() if isinstance(rank, int))
        if len(arrivals) > 1 and not key.name.startswith(INTERNAL_PREFIX):
            (before, _), (last, rank) = arrivals[-2:]
            self._last_arrivals.append((key.generation, rank, last - before))

    def _finish(self, key: Key, barrier: Barrier, outcome: Outcome) -> None:
        self._close(key)
        self._context.answer_many(barrier.requesters, outcome)
        self._remember(key, barrier.participants, outcome)

    def _close(self, key: Key) -> None:
        del self._open[key]
        self._context.disarm(("barrier", key))

    def _fail_if_impossible(self, key: Key, barrier: Barrier) -> None:
        if barrier.generation is None:
            return
        departed, reforming = barrier.generation.departed, barrier.generation.reforming
        for rank in sorted(departed | reforming):
            if rank in barrier.participants.ranks and rank not in barrier.arrivals:
                member = barrier.generation.members[rank]
                why = member.reason or "it left the job"
                lost = PeerLostError(rank, why, f"rank {rank} ({member}) will not come to barrier {key.name!r}: {why}")
                error = lost if rank in departed else already_reforming(rank, f"barrier {key.name!r}")
                self._finish(key, barrier, detail_of(error))
                return

    def _time_out(self, key: Key) -> None:
        barrier = self._open[key]
        waited = format_seconds(self._context.now - barrier.since)
        missing = [rank for rank in barrier.participants.ranks if rank not in barrier.arrivals]
        head = f"barrier {key.name!r} #{key.ordinal} timed out after {waited}: "
        if barrier.generation is None:
            text = f"{head}{len(barrier.arrivals)} of {barrier.participants.size} arrived"
        else:
            members = barrier.generation.members
            about = "; ".join(self._members.summary(members[rank]) for rank in missing[:DESCRIBED_MAX])
            if len(missing) > DESCRIBED_MAX:
                about += f"; and {len(missing) - DESCRIBED_MAX} more"
            text = f"{head}{len(barrier.arrivals)} of {barrier.participants.size} ranks arrived. Missing: {about}"
        self._context.occurrences.add("barrier", text, rank=missing[0] if len(missing) == 1 else -1, generation=key.generation)
        self._finish(key, barrier, detail_of(BarrierTimeoutError(missing, text)))

    # -- remembering ---------------------------------------------------------------------------------------------------

    def _remember(self, key: Key, participants: Participants, outcome: Outcome) -> None:
        self._outcomes[key] = participants, outcome
        self._outcome_bytes += _memory_of(participants, outcome)
        same = self._outcomes_of.setdefault((key.generation, participants), {})
        same[key] = None
        limits = self._context.limits
        while len(same) > limits.remembered_barriers:
            self._forget(next(iter(same)))
        while self._outcome_bytes > limits.remembered_barrier_bytes:
            self._forget(next(iter(same if len(same) > 1 else self._outcomes)))

    def _forget(self, key: Key) -> None:
        participants, outcome = self._outcomes.pop(key)
        self._outcome_bytes -= _memory_of(participants, outcome)
        same = self._outcomes_of[key.generation, participants]
        del same[key]
        if not same:
            del self._outcomes_of[key.generation, participants]
        if isinstance(outcome, barrier_pb2.BarrierResponse):
            self._context.remove(TABLE, str(key))

    def erase(self) -> None:
        """Removes all outcomes and their rows."""
        for key in list(self._outcomes):
            self._forget(key)

    def recover(self, rows: dict[str, bytes]) -> None:
        """Restores the outcomes of released barriers from the journal, oldest first."""
        known = []
        for text, data in rows.items():
            generation, ordinal, name = text.split("/", 2)
            row = journal_pb2.BarrierRow.FromString(data)
            known.append((row.revision, Key(int(generation), name, int(ordinal)), row))
        for _, key, row in sorted(known, key=lambda item: item[0]):
            self._remember(key, Participants(tuple(row.ranks), row.count), row.response)


def _memory_of(participants: Participants, outcome: Outcome) -> int:
    return OUTCOME_BYTES + outcome.ByteSize() + 8 * len(participants.ranks)
