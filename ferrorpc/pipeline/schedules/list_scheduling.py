"""List scheduling: every rank takes the action that can start first, at known costs.

Graham, "Bounds on Multiprocessing Timing Anomalies", 1969, with what pipelines add: a cap on activations, backwards of weights
that fill idle time, and a priority among actions that could start at the same time. It builds one order in O(actions * pieces).
The order is not optimal, but it takes costs and latency into account, which the named schedules do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ferrorpc.pipeline.actions import Action, F, I, Kind, W
from ferrorpc.pipeline.schedules.schedule import Schedule


@dataclass(frozen=True, slots=True)
class PriorityRule:
    """How a rank chooses among actions.

    Attributes:
        forward_first: whether a forward goes before a backward of an input when both could start.
        min_fit: the share of a backward of weights that must fit into a gap for it to be put there; 0 fills every gap.
        early_chunk_first: whether the chunk nearer to the model's input goes first.
    """

    forward_first: bool = False
    min_fit: float = 0.0
    early_chunk_first: bool = False


class ListScheduler:
    """Builds one schedule.

    Args:
        placement: the rank of each piece.
        microbatches: how many there are.
        costs: of forward, backward of input and backward of weights, each a list by piece.
        latency: of a message between ranks.
        caps: how many activations each rank may hold, counted in pieces.
        rule: how ranks choose.
    """

    def __init__(
        self,
        placement: Sequence[int],
        microbatches: int,
        costs: Mapping[Kind, Sequence[float]],
        latency: float,
        caps: Sequence[int],
        rule: PriorityRule,
    ) -> None:
        self._placement = placement
        self._microbatches = microbatches
        self._costs = costs
        self._latency = latency
        self._caps = caps
        self._rule = rule
        self._last = len(placement) - 1
        self._pieces = [[s for s, holder in enumerate(placement) if holder == rank] for rank in range(len(caps))]
        self._next = {kind: [0] * len(placement) for kind in (F, I, W)}
        self._ends: dict[Action, float] = {}
        self._free = [0.0] * len(caps)
        self._live = [0] * len(caps)
        self._rows: list[list[Action]] = [[] for _ in caps]

    def build(self, name: str) -> Schedule | None:
        """The schedule; None if the caps make ranks wait for each other for ever."""
        for _ in range(3 * len(self._placement) * self._microbatches):
            choices = [choice for rank in range(len(self._caps)) if (choice := self._choice(rank)) is not None]
            if not choices:
                return None
            start, _, each = min(choices)
            self._take(each, start)
        return Schedule.of(name, self._rows)

    def _take(self, each: Action, start: float) -> None:
        rank = self._placement[each.stage]
        self._rows[rank].append(each)
        self._ends[each] = self._free[rank] = start + self._costs[each.kind][each.stage]
        self._next[each.kind][each.stage] += 1
        self._live[rank] += {F: 1, I: 0, W: -1}[each.kind]

    def _choice(self, rank: int) -> tuple[float, int, Action] | None:
        """(start, rank, action) of what the rank would do next; None if nothing can start."""
        critical = ((start, self._priority(each), each) for start, each in self._critical(rank))
        start, _, urgent = min(critical, default=(math.inf, (0, 0), None))
        filler, free = min(self._fillers(rank), key=lambda each: each.microbatch, default=None), self._free[rank]
        if filler is not None and start >= free + self._rule.min_fit * self._costs[W][filler.stage] + 1e-12:
            return free, rank, filler
        return None if urgent is None else (start, rank, urgent)

    def _critical(self, rank: int) -> Iterator[tuple[float, Action]]:
        """Forwards and backwards of inputs, which other ranks wait for, with the times at which they could start."""
        for stage in self._pieces[rank]:
            for kind, source in ((F, stage - 1), (I, stage + 1)):
                each = Action(stage, kind, self._next[kind][stage])
                if each.microbatch >= self._microbatches or (kind is F and not self._has_room(rank, stage)):
                    continue
                ready = self._ready(each, source)
                if ready is not None:
                    yield max(ready, self._free[rank]), each

    def _ready(self, each: Action, source: int) -> float | None:
        own = 0.0 if each.kind is F else self._ends.get(Action(each.stage, F, each.microbatch))
        if own is None or not 0 <= source <= self._last:
            return own
        end = self._ends.get(Action(source, each.kind, each.microbatch))
        if end is None:
            return None
        return max(own, end + (self._latency if self._placement[source] != self._placement[each.stage] else 0.0))

    def _fillers(self, rank: int) -> Iterator[Action]:
        for stage in self._pieces[rank]:
            if self._next[W][stage] < self._next[I][stage]:
                yield Action(stage, W, self._next[W][stage])

    def _has_room(self, rank: int, stage: int) -> bool:
        """Whether the cap allows a forward. Each later chunk has one slot reserved, or early chunks could block it for ever."""
        later = sum(1 for piece in self._pieces[rank] if piece > stage)
        return self._live[rank] + 1 + later <= self._caps[rank]

    def _priority(self, each: Action) -> tuple[int, int]:
        forward = each.kind is F
        return int(forward is not self._rule.forward_first), each.stage if self._rule.early_chunk_first else -each.stage
