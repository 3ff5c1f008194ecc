"""Named barriers: all or nobody.

A barrier is (generation, name, ordinal). Its first outcome is the outcome for everyone: released with all payloads, or
failed (a participant died or left, arrivals contradict each other, the first deadline passed). The outcome is kept, so an
arrival that comes late or again gets the same answer, and no two members can disagree about whether they met.

Cost: O(1) for an arrival, O(n) for the release, whose answer is encoded once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from ferrorpc.errors import BarrierTimeoutError, FerroError, MessageTooLargeError, PeerLostError, UsageError, require
from ferrorpc.v1 import barrier_pb2, error_pb2, journal_pb2, session_pb2
from ferrorpc.wire.error_detail import detail_of
from ferrorpc_coordinator.state.desk import Asker, Desk
from ferrorpc_coordinator.state.failures import seconds
from ferrorpc_coordinator.state.generations import Generation
from ferrorpc_coordinator.state.member import Member
from ferrorpc_coordinator.state.roster import Roster
from ferrorpc_coordinator.state.settings import MILLISECOND

TABLE: Final = "barrier"
LASTS_MAX: Final = 100
"""Released barriers whose last arrival is remembered."""
STRAGGLERS_MAX: Final = 16
OWN: Final = "ferrorpc/"
"""What the names of ferrorpc's own barriers begin with: they are no work of the script, so nobody comes last to them."""
Outcome = barrier_pb2.BarrierResponse | error_pb2.ErrorDetail


class Key(NamedTuple):
    """Which barrier."""

    generation: int
    name: str
    ordinal: int


class Parties(NamedTuple):
    """Who meets: these world ranks, or (generation 0) any `count` arrivals."""

    ranks: tuple[int, ...]
    size: int

    def __str__(self) -> str:
        return f"ranks {list(self.ranks)}" if self.ranks else f"any {self.size} arrivals"


class Arrival(NamedTuple):
    """One participant that waits."""

    asker: Asker
    payload: bytes
    since: int
    until: int
    """When it will wait no longer."""


@dataclass(slots=True, eq=False)
class Barrier:
    """A barrier that is still open. `arrivals` is keyed by rank, or by client in generation 0."""

    parties: Parties
    generation: Generation | None
    since: int
    until: int
    arrivals: dict[int | str, Arrival] = field(default_factory=dict)
    payload_bytes: int = 0

    @property
    def complete(self) -> bool:
        """Whether everybody is here."""
        return len(self.arrivals) == self.parties.size


class Barriers:
    """All barriers of a job: those that are open, and the last outcomes."""

    def __init__(self, desk: Desk, roster: Roster) -> None:
        self._desk = desk
        self._roster = roster
        self._open: dict[Key, Barrier] = {}
        self._outcomes: OrderedDict[Key, tuple[Parties, Outcome]] = OrderedDict()
        self._outcome_bytes = 0
        self._lasts: deque[tuple[int, int, int]] = deque(maxlen=LASTS_MAX)

    def arrive(self, asker: Asker, request: barrier_pb2.BarrierRequest, generation: Generation | None) -> None:
        """Takes an arrival. `generation` is None for a barrier of generation 0.

        Raises:
            UsageError: the arrival fits no barrier, or contradicts those that came before; then all of them get it.
            LimitExceededError: the payload is too large.
        """
        key = Key(request.generation, request.name, request.ordinal)
        parties = self._parties(asker, request, generation)
        known = self._outcomes.get(key)
        if known is not None:
            self._agree(key, asker, parties, known[0])
            self._desk.answer_many([(asker, None)], known[1])
            return
        barrier = self._open.get(key)
        if barrier is None:
            require("open barriers", len(self._open) + 1, "open_barriers", self._desk.limits.open_barriers)
            barrier = self._open[key] = Barrier(parties, generation, self._desk.now, 0)
        try:
            self._agree(key, asker, parties, barrier.parties)
            self._add(key, barrier, asker, request)
        except FerroError as error:
            self._finish(key, barrier, detail_of(error))
            raise
        if barrier.complete:
            self._release(key, barrier)
        else:
            self._fail_if_hopeless(key, barrier)

    def status(self) -> list[session_pb2.BarrierStatus]:
        """What is open, oldest first."""
        told = []
        for key, barrier in self._open.items():
            arrived = sorted((rank, arrival.since) for rank, arrival in barrier.arrivals.items() if isinstance(rank, int))
            status = session_pb2.BarrierStatus(name=key.name, generation=key.generation, ordinal=key.ordinal)
            status.arrived_ranks.extend(rank for rank, _ in arrived)
            status.arrived_after_ms.extend((since - barrier.since) // MILLISECOND for _, since in arrived)
            status.missing_ranks.extend(sorted(set(barrier.parties.ranks) - set(status.arrived_ranks)))
            status.age_ms = (self._desk.now - barrier.since) // MILLISECOND
            told.append(status)
        return told

    def stragglers(self) -> list[session_pb2.Straggler]:
        """Who came last to the script's last barriers in the newest generation, whoever was waited for longest first."""
        by_rank: dict[int, session_pb2.Straggler] = {}
        for generation, rank, waited_ns in self._lasts:
            if generation == self._desk.newest_generation:
                told = by_rank.setdefault(rank, session_pb2.Straggler(rank=rank))
                told.barriers += 1
                told.waited_ms += waited_ns // MILLISECOND
        return sorted(by_rank.values(), key=lambda told: (-told.waited_ms, -told.barriers, told.rank))[:STRAGGLERS_MAX]

    def lost(self, member: Member) -> None:
        """A member died or left. Whoever waits for it need not wait longer; in generation 0 it counts no more."""
        for key, barrier in list(self._open.items()):
            if barrier.generation is not None:
                self._fail_if_hopeless(key, barrier)
            else:
                self._withdraw(key, barrier, member.client)

    def cancelled(self, asker: Asker) -> None:
        """A unary caller went away; its arrival counts no more, unless it has arrived again by another call."""
        for key, barrier in list(self._open.items()):
            arrival = barrier.arrivals.get(asker.client)
            if arrival is not None and arrival.asker == asker:
                self._withdraw(key, barrier, asker.client)

    def generation_over(self, generation: Generation, cause: error_pb2.ErrorDetail) -> None:
        """Everyone who waits in this generation gets the cause; its outcomes are forgotten."""
        for key, barrier in [item for item in self._open.items() if item[1].generation is generation]:
            self._close(key)
            self._desk.answer_many([(arrival.asker, None) for arrival in barrier.arrivals.values()], cause)
        for key in [key for key in self._outcomes if key.generation == generation.number]:
            self._forget(key)

    # -- arriving ------------------------------------------------------------------------------------------------------

    def _parties(self, asker: Asker, request: barrier_pb2.BarrierRequest, generation: Generation | None) -> Parties:
        if not request.name or request.ordinal < 1 or len(request.name.encode()) > self._desk.limits.key_bytes:
            raise UsageError("a barrier needs a name of at most 512 bytes, and an ordinal from 1")
        most = self._desk.limits.payload_bytes
        require("a barrier's payload", len(request.payload), "payload_bytes", most, MessageTooLargeError)
        if generation is None:
            if request.count < 1 or request.ranks:
                raise UsageError("a barrier of generation 0 counts arrivals: it needs a count, and no ranks")
            return Parties((), request.count)
        size = len(generation.seats)
        if not request.ranks:
            return Parties(generation.ranks, size)
        ranks = tuple(sorted(set(request.ranks)))
        if ranks[-1] >= size or asker.member is None or asker.member.rank not in ranks:
            raise UsageError(f"{asker} arrived at barrier {request.name!r} of ranks {list(ranks)} in a world of {size}")
        return Parties(ranks, len(ranks))

    def _agree(self, key: Key, asker: Asker, mine: Parties, theirs: Parties) -> None:
        if mine != theirs:
            raise UsageError(
                f"barrier {key.name!r} #{key.ordinal}: {asker} meets {mine}, others {theirs}",
                hint="every participant must name the same ranks",
            )

    def _add(self, key: Key, barrier: Barrier, asker: Asker, request: barrier_pb2.BarrierRequest) -> None:
        who: int | str = asker.client if asker.member is None or barrier.generation is None else asker.member.rank
        until = self._desk.now + request.timeout_ms * MILLISECOND
        before = barrier.arrivals.get(who)
        if before is not None:
            barrier.payload_bytes -= len(before.payload)
            again = UsageError(f"{asker} arrived at barrier {key.name!r} #{key.ordinal} again; the later arrival counts")
            self._desk.answer(before.asker, detail_of(again))
        total = barrier.payload_bytes + len(request.payload)
        require(f"payloads of barrier {key.name!r}", total, "barrier_bytes", self._desk.limits.barrier_bytes)
        barrier.payload_bytes = total
        since = self._desk.now if before is None else before.since
        barrier.arrivals[who] = Arrival(asker, request.payload, since, until)
        if not barrier.until or until < barrier.until:
            self._end_by(key, barrier, until)

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
        self._desk.arm(("barrier", key), until, partial(self._time_out, key))

    # -- finishing -----------------------------------------------------------------------------------------------------

    def _release(self, key: Key, barrier: Barrier) -> None:
        arrivals = barrier.arrivals
        order = [arrivals[rank] for rank in barrier.parties.ranks] if barrier.parties.ranks else list(arrivals.values())
        times = [arrival.since for arrival in order]
        self._note_last(key, barrier)
        response = barrier_pb2.BarrierResponse(
            payloads=[arrival.payload for arrival in order], spread_ms=(max(times) - min(times)) // MILLISECOND
        )
        revision = self._desk.ledger.change()
        row = journal_pb2.BarrierRow(
            response=response, ranks=barrier.parties.ranks, count=barrier.parties.size, revision=revision
        )
        self._desk.put(TABLE, f"{key.generation}/{key.ordinal}/{key.name}", row)
        self._finish(key, barrier, response)

    def _note_last(self, key: Key, barrier: Barrier) -> None:
        arrivals = sorted((arrival.since, rank) for rank, arrival in barrier.arrivals.items() if isinstance(rank, int))
        if len(arrivals) > 1 and not key.name.startswith(OWN):
            (before, _), (last, rank) = arrivals[-2:]
            self._lasts.append((key.generation, rank, last - before))

    def _finish(self, key: Key, barrier: Barrier, outcome: Outcome) -> None:
        self._close(key)
        self._desk.answer_many([(arrival.asker, None) for arrival in barrier.arrivals.values()], outcome)
        self._remember(key, barrier.parties, outcome)

    def _close(self, key: Key) -> None:
        del self._open[key]
        self._desk.disarm(("barrier", key))

    def _fail_if_hopeless(self, key: Key, barrier: Barrier) -> None:
        if barrier.generation is None:
            return
        for rank in sorted(barrier.generation.departed):
            if rank in barrier.parties.ranks and rank not in barrier.arrivals:
                member = barrier.generation.seats[rank]
                why = member.reason or "it left the job"
                lost = PeerLostError(rank, why, f"rank {rank} ({member}) will not come to barrier {key.name!r}: {why}")
                self._finish(key, barrier, detail_of(lost))
                return

    def _time_out(self, key: Key) -> None:
        barrier = self._open[key]
        waited = seconds(self._desk.now - barrier.since)
        missing = [rank for rank in barrier.parties.ranks if rank not in barrier.arrivals]
        head = f"barrier {key.name!r} #{key.ordinal} timed out after {waited}: "
        if barrier.generation is None:
            text = f"{head}{len(barrier.arrivals)} of {barrier.parties.size} arrived"
        else:
            seats = barrier.generation.seats
            about = "; ".join(self._roster.sentence(seats[rank]) for rank in missing)
            text = f"{head}{len(barrier.arrivals)} of {barrier.parties.size} ranks arrived. Missing: {about}"
        self._desk.chronicle.add("barrier", text, rank=missing[0] if len(missing) == 1 else -1, generation=key.generation)
        self._finish(key, barrier, detail_of(BarrierTimeoutError(missing, text)))

    # -- remembering ---------------------------------------------------------------------------------------------------

    def _remember(self, key: Key, parties: Parties, outcome: Outcome) -> None:
        self._outcomes[key] = parties, outcome
        self._outcome_bytes += outcome.ByteSize()
        limits = self._desk.limits
        while len(self._outcomes) > limits.remembered_barriers or self._outcome_bytes > limits.remembered_barrier_bytes:
            self._forget(next(iter(self._outcomes)))

    def _forget(self, key: Key) -> None:
        _, outcome = self._outcomes.pop(key)
        self._outcome_bytes -= outcome.ByteSize()
        if isinstance(outcome, barrier_pb2.BarrierResponse):
            self._desk.remove(TABLE, f"{key.generation}/{key.ordinal}/{key.name}")

    def erase(self) -> None:
        """Forgets every outcome, with its row."""
        for key in list(self._outcomes):
            self._forget(key)

    def recover(self, rows: dict[str, bytes]) -> None:
        """Takes back the outcomes of released barriers, oldest first."""
        known = []
        for text, data in rows.items():
            generation, ordinal, name = text.split("/", 2)
            row = journal_pb2.BarrierRow.FromString(data)
            known.append((row.revision, Key(int(generation), name, int(ordinal)), row))
        for _, key, row in sorted(known, key=lambda item: item[0]):
            self._remember(key, Parties(tuple(row.ranks), row.count), row.response)
