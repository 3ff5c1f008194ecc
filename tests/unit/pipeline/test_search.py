"""The search for a schedule at given costs."""

from __future__ import annotations

import random

import pytest

from ferrorpc import schedules
from ferrorpc.errors import UsageError
from ferrorpc.pipeline.actions import Kind
from ferrorpc.pipeline.schedules import Schedule
from ferrorpc.pipeline.schedules.hill_climbing import MakespanModel, improve
from ferrorpc.pipeline.schedules.list_scheduling import ListScheduler, PriorityRule
from ferrorpc.pipeline.schedules.search import COST_NAMES

EQUAL = {name: [1.0] * 4 for name in COST_NAMES}


def random_costs(draw: random.Random, stages: int) -> dict[str, list[float]]:
    return {name: [draw.uniform(0.5, 2) for _ in range(stages)] for name in COST_NAMES}


def best_named(costs: dict[str, list[float]], latency: float, cap: float | None, microbatches: int) -> float:
    """The makespan of the best named schedule below the cap."""
    found = []
    for name in schedules.NAMED:
        for chunks in (None, 1, 2, 3, 4):
            try:
                schedule = schedules.named(name, len(costs["forward"]), microbatches, chunks)
            except UsageError:
                continue
            timeline = schedule.simulate(**costs, latency=latency)
            if cap is None or max(timeline.peak_activations) <= cap:
                found.append(timeline.makespan)
    return min(found)


def test_it_is_never_worse_than_the_best_named_one_and_mostly_better():
    draw = random.Random(0)
    better = 0
    cases = [(4, 8, 4.0), (3, 5, None), (2, 6, 2.5), (4, 6, 8.0)] * 2
    for stages, microbatches, cap in cases:
        costs, latency = random_costs(draw, stages), draw.uniform(0, 0.5)
        found = schedules.search(costs, latency, cap, microbatches=microbatches)
        assert found.validate(peak=cap) == []
        assert (found.stages, found.microbatches) == (stages, microbatches)
        makespan, named = found.simulate(**costs, latency=latency).makespan, best_named(costs, latency, cap, microbatches)
        assert makespan <= named + 1e-9
        better += makespan < named - 1e-9
    assert better >= 0.6 * len(cases)


def test_where_a_named_one_is_perfect_it_is_found():
    found = schedules.search(EQUAL, memory_cap=4, microbatches=8)
    assert found.simulate().bubble_fraction <= schedules.zbv(4, 8).simulate().bubble_fraction + 1e-9


@pytest.mark.parametrize("stages", [2, 3])
def test_where_little_can_be_held_it_turns_round_on_the_last_rank(stages: int):
    """With room for one microbatch, a rank of a straight pipeline waits for it to go to the end and back: 2p + 1 units each."""
    found = schedules.search({name: [1.0] * stages for name in COST_NAMES}, memory_cap=1, microbatches=6)
    assert found.placement == (*range(stages), *reversed(range(stages)))
    assert found.simulate().makespan < 6 * (2 * stages + 1)


def test_a_cap_that_nothing_fits_and_costs_that_are_none_are_refused():
    with pytest.raises(UsageError, match=r"at most 0\.25 activations"):
        schedules.search(EQUAL, memory_cap=0.25)
    with pytest.raises(UsageError, match="lists of one length"):
        schedules.search({"forward": [1.0]})
    with pytest.raises(UsageError, match="lists of one length"):
        schedules.search({**EQUAL, "forward": [1.0]})
    with pytest.raises(UsageError, match="microbatches=0"):
        schedules.search(EQUAL, microbatches=0)
    with pytest.raises(UsageError, match="ranks=0"):
        schedules.search({name: [] for name in COST_NAMES})
    with pytest.raises(UsageError, match="latency"):
        schedules.search(EQUAL, -1.0)
    with pytest.raises(UsageError, match="cost"):
        schedules.search({**EQUAL, "forward": [1.0, 1.0, 1.0, float("nan")]})
    with pytest.raises(UsageError, match="lists of one length"):
        schedules.search(dict.fromkeys(COST_NAMES, 1.0))  # type: ignore[arg-type]
    for cap in "nan", "-inf":
        with pytest.raises(UsageError, match=f"memory_cap={cap}"):
            schedules.search(EQUAL, memory_cap=float(cap))


def test_a_cap_without_end_is_none():
    costs = {name: [1.0, 1.0] for name in COST_NAMES}
    found = schedules.search(costs, memory_cap=float("inf"), microbatches=2)
    assert found.actions == schedules.search(costs, microbatches=2).actions


def by_piece(schedule: Schedule) -> dict[tuple[Kind, int], float]:
    """A cost of 1 per rank for each kind of action, split over its pieces."""
    share = 1 / schedule.chunks
    one = {Kind.FORWARD: share, Kind.BACKWARD_INPUT: share, Kind.BACKWARD_WEIGHT: share, Kind.BACKWARD: 2 * share}
    return {(kind, piece): cost for kind, cost in one.items() for piece in range(schedule.virtual_stages)}


@pytest.mark.parametrize("name", schedules.NAMED)
def test_a_sweep_agrees_with_the_simulation(name: str):
    schedule = schedules.named(name, 3, 7)
    model = MakespanModel(schedule, by_piece(schedule), latency=0.3)
    assert model.makespan(schedule.actions) == pytest.approx(schedule.simulate(latency=0.3).makespan)


def test_a_sweep_that_stands_still_never_ends():
    schedule = schedules.one_f_one_b(2, 2)
    swapped = [list(row) for row in schedule.actions]
    swapped[1].reverse()
    assert MakespanModel(schedule, by_piece(schedule), 0.0).makespan(swapped) == float("inf")


def test_climbing_mends_a_bad_order_within_the_cap():
    bad = Schedule.from_text("0F0 0I0 0W0 0F1 0I1 0W1\n1F0 1I0 1W0 1F1 1I1 1W1\n", "bad")
    makespan, free = improve(bad, by_piece(bad), 0.0, None, trials=200)
    assert free.validate() == []
    assert makespan == pytest.approx(free.simulate().makespan)
    assert makespan < bad.simulate().makespan
    _, capped = improve(bad, by_piece(bad), 0.0, [1, 1], trials=200)
    assert capped.validate(peak=1) == []


@pytest.mark.parametrize("rule", [PriorityRule(), PriorityRule(True, 1.0, True), PriorityRule(False, 0.5, True)])
def test_a_list_schedule_is_sound_and_keeps_the_cap(rule: PriorityRule):
    placement = [0, 1, 2, 2, 1, 0]
    costs = {kind: [0.5] * 6 for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)}
    schedule = ListScheduler(placement, 7, costs, 0.2, [6, 6, 6], rule).build("greedy")
    assert schedule is not None
    assert schedule.validate(peak=3) == []
