"""Replicas of a pipeline exchange gradients during its cool-down, in virtual time.

Every action takes a second or two, every message ten milliseconds, so that it is certain what came before what.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest

from ferrorpc import GradientSynchronizer, Mesh, Pipeline, ProcessGroup, schedules
from ferrorpc.guard import Clock
from ferrorpc.testing import FaultPlan, VirtualClock, run_world
from tests.unit.pipeline.stages import Layer, batch, half_square

MESSAGE_SECONDS = 0.01
STAGES = 2
MICROBATCHES = 4
BUCKET_MB = 0.0003
"""Too small for the gradients of a whole layer."""


@dataclass(frozen=True, slots=True)
class Watched(FaultPlan):
    """All messages take the same time. Records when each was sent, by (source, target)."""

    clock: Clock = field(default_factory=VirtualClock)
    departures: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))

    def delay(self, random: random.Random, source: int, target: int) -> float:
        self.departures[source, target].append(self.clock.now())
        return MESSAGE_SECONDS


class Slow(Layer):
    """A layer whose forward, and each part of its backward, takes a second. Records when they ran."""

    def __init__(self, number: int, clock: Clock) -> None:
        super().__init__(number)
        self._clock = clock
        self.starts: list[float] = []
        self.stops: list[float] = []

    def _spend(self) -> None:
        start = self._clock.now()
        self._clock.parker().park(start + 1.0)
        self.starts.append(start)
        self.stops.append(self._clock.now())

    def forward(self, x):
        self._spend()
        return super().forward(x)

    def backward_input(self, context, grad_y):
        self._spend()
        return super().backward_input(context, grad_y)

    def backward_weight(self, context, grad_y):
        self._spend()
        super().backward_weight(context, grad_y)


@dataclass
class Seen:
    """The results of one rank: its layers, by piece, and the mean gradients of its weights."""

    layers: dict[int, Slow]
    means: dict[str, np.ndarray]


def step(group: ProcessGroup, schedule: schedules.Schedule, clock: Clock, *, early: bool) -> Seen:
    """One step of two replicas. Gradients are sent when they are complete (`early`), or after the step."""
    mesh = Mesh({"dp": 2, "pp": STAGES}, group)
    layers = {number: Slow(number, clock) for number in schedule.pieces(mesh["pp"].rank)}
    pipe = Pipeline(list(layers.values()), mesh["pp"], schedule)
    like = {name: each.data for name, each in pipe.named_parameters()}
    sync = GradientSynchronizer(like, mesh["dp"], bucket_cap_mb=BUCKET_MB)
    with sync.step() as means:

        def ready(piece: int | None) -> None:
            for name, parameter in pipe.named_parameters(piece):
                means.ready(name, parameter.grad)

        data = batch(2 * MICROBATCHES, seed=mesh["dp"].rank)
        pipe.step(*data, half_square, on_gradients=ready if early else None)
        if not early:
            ready(None)
    return Seen(layers, means.grads)


def run(name: str, *, early: bool) -> tuple[list[Seen], list[list[float]]]:
    """(the results of each rank, the times at which each rank sent gradients to its counterpart in the other replica)."""
    schedule = schedules.named(name, STAGES, MICROBATCHES)
    clock = VirtualClock()
    faults = Watched(delay_seconds=(MESSAGE_SECONDS, MESSAGE_SECONDS), clock=clock)
    seen = run_world(2 * STAGES, lambda group: step(group, schedule, clock, early=early), faults=faults, clock=clock)
    begun = min(start for each in seen for layer in each.layers.values() for start in layer.starts)
    sent = []
    for rank in range(2 * STAGES):
        twin = (rank + STAGES) % (2 * STAGES)
        sent.append([when for when in faults.departures[rank, twin] if when > begun])
    return seen, sent


def last_start(seen: list[Seen]) -> float:
    """When the last action of the step began, on any rank."""
    return max(start for each in seen for layer in each.layers.values() for start in layer.starts)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb1p", "interleaved", "zbv"])
def test_a_bucket_leaves_in_the_instant_its_gradients_are_complete(name: str) -> None:
    seen, sent = run(name, early=True)
    for rank, each in enumerate(seen):
        for layer in each.layers.values():
            assert layer.stops[-1] in sent[rank]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_later_stage_has_exchanged_all_its_gradients_before_the_first_stage_begins_its_last_action(name: str) -> None:
    seen, sent = run(name, early=True)
    for rank in (1, 3):
        assert len(sent[rank]) >= 2, "the layer has more than one bucket"
        assert max(sent[rank]) < last_start(seen)


@pytest.mark.parametrize("name", ["interleaved", "zbv"])
def test_with_several_stages_a_rank_sends_the_first_ones_gradients_while_it_still_computes(name: str) -> None:
    seen, sent = run(name, early=True)
    own_last = [max(start for layer in each.layers.values() for start in layer.starts) for each in seen]
    for rank in range(2 * STAGES):
        assert min(sent[rank]) <= own_last[rank], "before its own last action begins, or as it does"


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb1p"])
def test_no_stage_waits_for_what_another_does_with_its_gradients(name: str) -> None:
    def body(group: ProcessGroup) -> list[float]:
        pipe, met = Pipeline(Layer(group.rank), group, name, MICROBATCHES), []

        def meet(piece: int) -> None:
            met.append(float(group.all_reduce(np.array(float(piece)), timeout=30)))

        pipe.step(*batch(MICROBATCHES), half_square, on_gradients=meet)
        return met

    assert run_world(3, body) == [[3.0]] * 3


class Telling(Layer):
    """A layer that tells rank 1 when it has got its second gradient."""

    def __init__(self, number: int, group: ProcessGroup) -> None:
        super().__init__(number)
        self._group = group
        self._backwards = 0

    def backward(self, context, grad_y):
        self._backwards += 1
        if self._backwards == 2:
            self._group.send(np.ones(1), 1, tag=7)
        return super().backward(context, grad_y)


def test_gradients_are_handed_over_behind_their_last_send_also_where_a_schedule_has_that_late() -> None:
    rows = [list(row) for row in schedules.interleaved(2, 2, chunks=2).with_messages().actions]
    last = rows[1].pop([str(each) for each in rows[1]].index("3SEND_B1"))
    rows[1].insert([str(each) for each in rows[1]].index("1SEND_B0"), last)
    schedule = schedules.Schedule.of("late", rows)
    assert "3B1 1RECV_B0 1B0 3SEND_B1 1SEND_B0" in schedule.to_text()

    def body(group: ProcessGroup) -> list[int]:
        pipe = Pipeline([Layer(0), Telling(2, group) if group.rank == 0 else Layer(3)], group, schedule)
        told: list[int] = []

        def meet(piece: int) -> None:
            if piece == 3:
                group.recv(0, tag=7, timeout=30)
            told.append(piece)

        pipe.step(*batch(2), half_square, on_gradients=meet)
        return told

    assert run_world(2, body) == [[2, 0], [3, 1]]


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_handed_over_after_the_step_they_leave_later_and_are_the_same(name: str) -> None:
    early, _ = run(name, early=True)
    late, sent = run(name, early=False)
    for rank, (mine, other) in enumerate(zip(early, late, strict=True)):
        assert min(sent[rank]) >= max(layer.stops[-1] for layer in other.layers.values())
        for key, mean in mine.means.items():
            np.testing.assert_array_equal(mean, other.means[key])
