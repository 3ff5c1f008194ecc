"""Predicts how long a collective takes, by following every message of every rank chunk by chunk under a cost table.

A message occupies its sender's link for `message_seconds`, then for beta times the bytes of each of its chunks. A chunk begins
to arrive alpha after it began to leave, as soon as the receiver's link is free, and occupies that for as long as the sender's.
Folding takes gamma times the bytes. Where the table says how many processors all ranks share, whatever occupies a link or a
kernel occupies one of them too: on few processors the work of all ranks together takes its time, not the critical path.

Dependencies are followed element by element, as in the executor: a chunk is sent on as soon as its elements are final, so a
chain streams, and a ring folds one chunk while it receives the next. Actions on no elements only order others in time. How
steps wait for each other is in step_simulation.py.

Under that model the prediction is exact: dependencies, bytes and shared resources. The model leaves out copies inside a rank,
credit, caches, and whatever else runs on the processors.

Beyond CHUNKS_MAX or ACTIONS_MAX the closed form is used (`select.seconds`). It knows only the busiest rank and waits for whole
rounds, so it gives more where rounds overlap and less where ranks wait for others that are as busy.

Cost: about 80 us for each chunk of each message.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Final, NamedTuple

from ferrorpc.collectives.algorithms.algorithm import Algorithm
from ferrorpc.collectives.algorithms.plan import (
    Buffer,
    Copy,
    Finish,
    Fold,
    FoldOwn,
    FoldUnder,
    Load,
    Plan,
    Quantise,
    Receive,
    Region,
    Send,
)
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.dependencies import Wait, waits_of
from ferrorpc.collectives.select import bytes_of, seconds
from ferrorpc.collectives.step_simulation import FOLDING, INWARDS, OUTWARDS, CollectiveTimeline, Step, StepSimulation
from ferrorpc.errors import UsageError
from ferrorpc.transports.credit import CHUNK_BYTES
from ferrorpc.wire.cost_table import Costs

CHUNKS_MAX: Final = 60_000
"""Chunks of all messages together up to which a collective is simulated: some seconds."""
ACTIONS_MAX: Final = 200_000
"""Actions of all ranks together up to which it is simulated: likewise. Few messages may consist of many pieces."""
_WORK_BYTES: Final = 4
"""Bytes of an element of WORK where halves are folded."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted cost of one call by one algorithm, all ranks starting at once.

    Attributes:
        seconds: until the last rank ends.
        messages, sent_bytes: the most that one rank sends.
        steps: the simulation; None where the closed form was used.
    """

    algorithm: str
    seconds: float
    messages: float
    sent_bytes: float
    steps: StepSimulation | None

    def timeline(self, title: str) -> CollectiveTimeline:
        """The timeline of every lane. Consecutive chunks of one message are one span.

        Raises:
            UsageError: the closed form was used.
        """
        if self.steps is None:
            raise UsageError(
                f"{self.algorithm} has too many messages here to be followed one by one", hint="ask for fewer ranks or bytes"
            )
        return self.steps.timeline(title)


def predict(entry: Algorithm, call: Call, size: int, costs: Costs) -> Prediction:
    """Predicts one algorithm.

    Args:
        call: as the root makes it, or any rank where there is none.
        costs: of the lane, in a group of `size` ranks.
    """
    cost = entry.cost(size, bytes_of(call) // (size if call.operation is Operation.SCATTER else 1))
    messages = max(cost.rounds, cost.messages)
    closed_form = Prediction(entry.name, seconds(cost, size, costs), messages, cost.sent_bytes, None)
    if size * (messages + cost.sent_bytes / CHUNK_BYTES) > CHUNKS_MAX:
        return closed_form
    ranks, room = [], ACTIONS_MAX
    for rank in range(size):
        ranks.append(_Rank(rank, entry.build(_call_on(call, rank), rank, size), _call_on(call, rank)))
        room -= len(ranks[-1].plan.actions)
        if room < 0:
            return closed_form
    steps = StepSimulation(costs, size)
    _lower(entry.name, ranks, steps)
    return Prediction(
        entry.name, steps.run(), max(rank.messages for rank in ranks), max(rank.sent_bytes for rank in ranks), steps
    )


def _call_on(call: Call, rank: int) -> Call:
    """The call of one rank: only the root of a scatter has arrays; the array of a broadcast has been announced."""
    if call.operation is Operation.SCATTER and rank != call.root:
        return Call(call.operation, (), root=call.root)
    return call


def _lower(name: str, ranks: list[_Rank], steps: StepSimulation) -> None:
    """Turns all plans into steps, each listed after those it needs."""
    in_transit: InTransit = {}
    waiting = ranks
    while waiting:
        moved = [rank.advance(steps, in_transit) for rank in waiting]
        waiting = [rank for rank in waiting if rank.at < len(rank.plan.actions)]
        if waiting and not any(moved):
            raise UsageError(
                f"{name} never ends: {len(waiting)} ranks wait for messages that nobody sends",
                hint="see what `ferrorpc.collectives.algorithms.validate.findings` says of its plans",
            )


class _Chunk(NamedTuple):
    """Elements [start, stop) of a message, and the step in which they leave."""

    start: int
    stop: int
    nbytes: int
    step: int


InTransit = dict[tuple[int, int, int], list[_Chunk]]
"""Messages in transit, by source, destination and slot."""


class _Done(NamedTuple):
    """Elements [start, stop) of an action's region, and the step in which it has done them."""

    start: int
    stop: int
    step: int


_START: Final = attrgetter("start")
_STOP: Final = attrgetter("stop")


class _Rank:
    """One rank's plan, as far as it has been turned into steps."""

    def __init__(self, rank: int, plan: Plan, call: Call) -> None:
        self.rank = rank
        self.plan = plan
        self.at = 0
        self.messages = 0
        self.sent_bytes = 0
        dtype = call.inputs[0].dtype if call.inputs else None
        self._itemsize = 1 if dtype is None else dtype.itemsize
        self._work_itemsize = max(self._itemsize, _WORK_BYTES) if dtype is not None and dtype.is_half else self._itemsize
        self._done: list[list[_Done]] = [[] for _ in plan.actions]
        self._counts = {(Buffer.IN, item): math.prod(spec.shape) for item, spec in enumerate(call.inputs)}
        self._counts |= {(Buffer.WORK, item): count for item, count in enumerate(plan.work_items)}

    @cached_property
    def _needs(self) -> list[tuple[Wait, ...]]:
        """What each action waits for; found only where the plan is followed."""
        return waits_of(self.plan.actions, None)

    def advance(self, steps: StepSimulation, in_transit: InTransit) -> bool:
        """Turns actions into steps as far as possible. Returns whether there were any."""
        began = self.at
        for action in self.plan.actions[began:]:
            if isinstance(action, Receive | Fold | FoldUnder):
                chunks = in_transit.pop((action.peer, self.rank, action.slot), None)
                if chunks is None:
                    break
                self._take(steps, action, chunks)
            elif isinstance(action, Send):
                in_transit[self.rank, action.peer, action.slot] = self._send(steps, action)
            else:
                self._compute(steps, action)
            self.at += 1
        return self.at > began

    def _add(
        self,
        steps: StepSimulation,
        lane: int | None,
        took: float,
        needs: Iterable[int],
        peer: int,
        begun: int | None = None,
        lag_seconds: float = 0.0,
    ) -> int:
        return steps.add(Step(self.rank, lane, took, tuple(needs), begun, lag_seconds, peer, self.at))

    def _after_fences(self) -> list[int]:
        """The steps this action waits for because they, or it, move nothing."""
        return [done.step for wait in self._needs[self.at] if not wait.high for done in self._done[wait.action]]

    def _before(self, first: int, last: int) -> set[int]:
        """The steps that must end before elements [first, last) of this action's region are touched."""
        found: set[int] = set()
        for action, began, low, high, start in self._needs[self.at]:
            low, high = max(start + first, low) - began, min(start + last, high) - began
            done = self._done[action]  # in order, and thousands where a message is large
            overlap = slice(bisect_right(done, low, key=_STOP), bisect_left(done, high, key=_START))
            found.update(each.step for each in done[overlap])
        return found

    def _send(self, steps: StepSimulation, action: Send) -> list[_Chunk]:
        start, stop = self._bounds(action.region)
        itemsize = self._work_itemsize if action.region.buffer is Buffer.WORK else self._itemsize
        costs = steps.costs
        chunks = []
        after = self._after_fences()
        for first, last in _runs(stop - start, max(CHUNK_BYTES // itemsize, 1)):
            nbytes = (last - first) * itemsize
            busy = nbytes * costs.beta_seconds_per_byte + (0.0 if first else costs.message_seconds)
            sent = self._add(steps, OUTWARDS, busy, (*after, *self._before(first, last)), action.peer)
            self._done[self.at].append(_Done(first, last, sent))
            chunks.append(_Chunk(first, last, nbytes, sent))
            self.sent_bytes += nbytes
        self.messages += 1
        return chunks

    def _take(self, steps: StepSimulation, action: Receive | Fold | FoldUnder, chunks: list[_Chunk]) -> None:
        region, costs = action.region, steps.costs
        if region.stop is None:
            self._counts[region.buffer, region.item] = chunks[-1].stop
        after = self._after_fences()
        for chunk in chunks:
            before = self._before(chunk.start, chunk.stop)
            busy = chunk.nbytes * costs.beta_seconds_per_byte + (0.0 if chunk.start else costs.message_seconds)
            # An empty message may arrive at any time; only the wait for it is ordered.
            needs = () if region.is_empty else after
            made = self._add(steps, INWARDS, busy, needs, action.peer, chunk.step, costs.alpha_seconds)
            if not isinstance(action, Receive):
                folding = chunk.nbytes * costs.gamma_seconds_per_byte
                made = self._add(steps, FOLDING, folding, (made, *before), action.peer)
            elif before or region.is_empty:
                made = self._add(steps, None, 0.0, (made, *before, *after), action.peer)
            self._done[self.at].append(_Done(chunk.start, chunk.stop, made))

    def _compute(self, steps: StepSimulation, action: Load | FoldOwn | Finish | Copy | Quantise) -> None:
        """An action without a message: only folding its own array takes time."""
        region = action.region
        start, stop = self._bounds(region if isinstance(action, Quantise) else action.source)
        if region.stop is None:
            self._counts[region.buffer, region.item] = region.start + stop - start
        after = self._after_fences()
        itemsize = self._work_itemsize
        for first, last in _runs(stop - start, max(CHUNK_BYTES // itemsize, 1)):
            needs = (*after, *self._before(first, last))
            if isinstance(action, FoldOwn):
                folding = (last - first) * itemsize * steps.costs.gamma_seconds_per_byte
                made = self._add(steps, FOLDING, folding, needs, self.rank)
            elif needs:
                made = self._add(steps, None, 0.0, needs, self.rank)
            else:
                continue
            self._done[self.at].append(_Done(first, last, made))

    def _bounds(self, region: Region) -> tuple[int, int]:
        stop = self._counts[region.buffer, region.item] if region.stop is None else region.stop
        return region.start, stop


def _runs(count: int, step: int) -> Iterator[tuple[int, int]]:
    """[0, count) in runs of `step`; one empty run where there is nothing."""
    for first in range(0, max(count, 1), step):
        yield first, min(first + step, count)
