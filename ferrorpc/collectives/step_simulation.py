"""Simulates the steps of a collective in time: which wait for each other, for a link, or for a processor.

Each rank has three *lanes*: its outgoing link, its incoming link, and its reduction kernel. A lane does one step at a time.
Where the ranks share the processors of one host, each running step also occupies one processor. Lanes and processors are
granted first come, first served; ties are broken by the order of the list.

Cost: about 20 us a step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from heapq import heappop, heappush
from typing import Final, NamedTuple

from ferrorpc.plans.span import Span
from ferrorpc.plans.timeline import Timeline
from ferrorpc.wire.cost_table import Costs

OUTWARDS, INWARDS, FOLDING = range(3)
MILLISECOND: Final = 1e-3
"""The time unit of timelines here."""
_LANE_NAMES: Final = ("sends", "receives", "folds")
_KINDS: Final = ("send", "receive", "fold")
_WORDS: Final = ("to", "from", "+")
_ENDS, _READY = range(2)
"""Events of a step; those at one time are processed in this order."""


class CollectiveTimeline(Timeline):
    """The timeline of one collective, in milliseconds."""

    key = "to 3: sent to rank 3 · from 3: received from it · + 3: its part folded in"

    def summary(self) -> str:
        return f"predicted {self.makespan:.4g} ms"

    def note(self, lane: int) -> str:
        return f"busy {1 - self.bubbles[lane]:.0%}"


class Step(NamedTuple):
    """A chunk on one lane of one rank, or (lane None) a step that takes no time.

    Attributes:
        needs: steps that must have ended.
        begun: a step of another rank that must have *begun* `lag_seconds` ago; None for none.
    """

    rank: int
    lane: int | None
    seconds: float
    needs: tuple[int, ...]
    begun: int | None
    lag_seconds: float
    peer: int
    action: int

    @property
    def place(self) -> int:
        """The index of its lane among those of all ranks."""
        return 3 * self.rank + (self.lane or 0)


class StepSimulation:
    """All steps of all ranks, each after those it needs, and their start times once it has run."""

    def __init__(self, costs: Costs, size: int) -> None:
        self.costs = costs
        self.size = size
        self.all: list[Step] = []
        self.starts: list[float] = []

    def add(self, step: Step) -> int:
        self.all.append(step)
        return len(self.all) - 1

    def run(self) -> float:
        """Computes the start of each step. Returns the end of the last one, in seconds."""
        waits, wakes = self._dependencies()
        ready = [0.0] * len(self.all)
        starts = self.starts = [0.0] * len(self.all)
        queue = [(0.0, _READY, index) for index, count in enumerate(waits) if not count]
        room = _Resources(self.all, 3 * self.size, self.costs.processors)
        last = 0.0
        while queue:
            now, what, index = heappop(queue)
            for begun in room.after_end(index) if what == _ENDS else room.for_ready(index):
                step = self.all[begun]
                starts[begun] = now
                last = max(last, now + step.seconds)
                if step.lane is not None:
                    heappush(queue, (now + step.seconds, _ENDS, begun))
                for other in wakes[begun]:
                    after = self.all[other]
                    moment = now + (after.lag_seconds if after.begun == begun else step.seconds)
                    ready[other] = max(ready[other], moment)
                    waits[other] -= 1
                    if not waits[other]:
                        heappush(queue, (ready[other], _READY, other))
        return last

    def _dependencies(self) -> tuple[list[int], list[list[int]]]:
        """For each step, how many it waits for, and which wait for it."""
        waits: list[int] = []
        wakes: list[list[int]] = [[] for _ in self.all]
        for index, step in enumerate(self.all):
            before = set(step.needs) if step.begun is None else {*step.needs, step.begun}
            waits.append(len(before))
            for need in before:
                wakes[need].append(index)
        return waits, wakes

    def timeline(self, title: str) -> CollectiveTimeline:
        """See `Prediction.timeline`."""
        spans: dict[int, list[Span]] = {}
        latest: dict[int, int] = {}
        for index in sorted(range(len(self.all)), key=self.starts.__getitem__):
            step = self.all[index]
            if step.lane is None or not step.seconds:
                continue
            place = step.place
            start = self.starts[index] / MILLISECOND
            stop = start + step.seconds / MILLISECOND
            drawn = spans.setdefault(place, [])
            if drawn and latest[place] == step.action and start - drawn[-1].stop < stop * 1e-9:
                start = drawn.pop().start
            latest[place] = step.action
            name = f"rank {step.rank} {_LANE_NAMES[step.lane]} {_WORDS[step.lane]} {step.peer}, action {step.action}"
            text = f"{_WORDS[step.lane]} {step.peer}"
            drawn.append(Span(name, place, start, stop, _KINDS[step.lane], text))
        places = sorted(spans)
        lanes = [f"rank {place // 3} {_LANE_NAMES[place % 3]}" for place in places]
        placed = [replace(each, lane=lane) for lane, place in enumerate(places) for each in spans[place]]
        return CollectiveTimeline(lanes, placed, title, "milliseconds")


class _Resources:
    """The queue of each lane, and the steps that have a lane and wait for a processor."""

    def __init__(self, steps: list[Step], lanes: int, processors: int | None) -> None:
        self._steps = steps
        self._lanes: list[deque[int]] = [deque() for _ in range(lanes)]
        """The first step of each queue has the lane."""
        self._free = lanes if processors is None else processors
        self._waiting: deque[int] = deque()

    def for_ready(self, index: int) -> list[int]:
        """A step is ready. Returns the steps that begin now."""
        step = self._steps[index]
        if step.lane is None:
            return [index]
        lane = self._lanes[step.place]
        lane.append(index)
        if len(lane) == 1:
            self._waiting.append(index)
        return self._start_waiting()

    def after_end(self, index: int) -> list[int]:
        """A step has ended. Returns the steps that begin now."""
        lane = self._lanes[self._steps[index].place]
        lane.popleft()
        self._free += 1
        if lane:
            self._waiting.append(lane[0])
        return self._start_waiting()

    def _start_waiting(self) -> list[int]:
        served = []
        while self._free and self._waiting:
            self._free -= 1
            served.append(self._waiting.popleft())
        return served
