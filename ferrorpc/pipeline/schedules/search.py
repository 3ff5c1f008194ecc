"""Searches for a fast schedule at given costs.

Candidates are the named schedules, and list schedules built by many priority rules. The best of them are improved by hill
climbing. As the named schedules are candidates, the result is never worse than the best of them under the same cap. A search
goes about a hundred times over all actions for the candidates, and some hundred times for the hill climbing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, TypeAlias

from ferrorpc.errors import UsageError
from ferrorpc.pipeline.actions import F, I, W
from ferrorpc.pipeline.schedules.building_blocks import counts_of
from ferrorpc.pipeline.schedules.hill_climbing import MakespanModel, improve
from ferrorpc.pipeline.schedules.list_scheduling import ListScheduler, PriorityRule
from ferrorpc.pipeline.schedules.named import NAMED, named
from ferrorpc.pipeline.schedules.schedule import Schedule
from ferrorpc.pipeline.schedules.simulation import durations_of, is_list, time_units
from ferrorpc.pipeline.schedules.validation import checked_cap

COST_NAMES = ("forward", "backward_input", "backward_weight")
RankCosts: TypeAlias = list[list[float]]
"""Of forward, backward of input and backward of weights: the time units of every rank."""
MIN_FITS = (0.0, 0.3, 0.7, 1.0)
CLIMBS = 2
"""How many of the best candidates are improved."""
TRIALS = 400
"""How many orders hill climbing tries for each of them."""


def search(
    costs: Mapping[str, Sequence[float]],
    latency: float = 0.0,
    memory_cap: float | None = None,
    *,
    microbatches: int = 8,
) -> Schedule:
    """The fastest schedule found; among equally fast ones, the one that holds the fewest activations.

    Args:
        costs: "forward", "backward_input" and "backward_weight", each a list with the time units of every rank.
        latency: of a message between two ranks.
        memory_cap: how many activations a rank may hold at once, in whole-rank microbatches; None for any number.
        microbatches: how many there are.

    Raises:
        UsageError: costs are missing, of different lengths, or no times; there is no microbatch, or no schedule keeps the cap.
    """
    by_rank, latency = _checked(costs), time_units(latency, "a latency")
    if memory_cap is not None:
        memory_cap = checked_cap(memory_cap, "memory_cap")
    _, microbatches = counts_of("search", ranks=len(by_rank[0]), microbatches=microbatches)
    ranked = sorted(_fitting(by_rank, latency, memory_cap, microbatches), key=lambda found: found[:2])
    if not ranked:
        raise UsageError(f"no schedule holds at most {memory_cap} activations a rank", hint="raise memory_cap")
    makespan, _, best = ranked[0]
    for _, _, schedule in ranked[:CLIMBS]:
        chunks = schedule.virtual_stages // schedule.stages
        caps = None if memory_cap is None else [int(min(memory_cap, microbatches) * chunks + 1e-9)] * schedule.stages
        found, climbed = improve(schedule, durations_of(schedule, by_rank), latency, caps, TRIALS)
        if found < makespan - 1e-9:
            makespan, best = found, climbed
    return best


def _checked(costs: Any) -> RankCosts:
    lists = dict(costs) if isinstance(costs, Mapping) else {}
    are_lists = set(lists) == set(COST_NAMES) and all(map(is_list, lists.values()))
    found = [[time_units(each, "a cost") for each in lists[name]] for name in COST_NAMES] if are_lists else []
    if len(set(map(len, found))) != 1:
        raise UsageError(
            f"costs are lists of one length called {', '.join(COST_NAMES)}; these are {costs!r}",
            hint="give each a number for every rank",
        )
    return found


def _fitting(
    by_rank: RankCosts, latency: float, memory_cap: float | None, microbatches: int
) -> Iterator[tuple[float, float, Schedule]]:
    """(makespan, peak, candidate) of the candidates that keep the cap."""
    for schedule in _candidates(by_rank, latency, memory_cap, microbatches):
        peak = max(schedule.peak_activations)
        if memory_cap is None or peak <= memory_cap + 1e-9:
            model = MakespanModel(schedule, durations_of(schedule, by_rank), latency)
            yield round(model.makespan(schedule.actions), 9), peak, schedule


def _candidates(by_rank: RankCosts, latency: float, memory_cap: float | None, microbatches: int) -> Iterator[Schedule]:
    stages = len(by_rank[0])
    for name in NAMED:
        for chunks in (1, 2, 3, 4):
            try:
                yield named(name, stages, microbatches, chunks)
            except UsageError:
                continue  # not admitted at these counts
    cap = min(microbatches, 2 * stages) if memory_cap is None else min(memory_cap, microbatches)
    straight = list(range(stages))
    for placement in (straight, straight + straight[::-1]):
        chunks = len(placement) // stages
        kinds = zip((F, I, W), by_rank, strict=True)
        split = {kind: [costs[rank] / chunks for rank in placement] for kind, costs in kinds}
        for caps, rule in product(_caps(stages, int(cap * chunks + 1e-9), chunks), _priority_rules(chunks)):
            schedule = ListScheduler(placement, microbatches, split, latency, caps, rule).build("searched")
            if schedule is not None:
                yield schedule


def _caps(stages: int, cap: int, chunks: int) -> list[list[int]]:
    """What each rank may hold: the same for all, or less for later ranks, as in 1F1B."""
    falling = [max(chunks, min(cap, chunks * (stages - rank))) for rank in range(stages)]
    even = [cap] * stages
    return [even] if falling == even else [even, falling]


def _priority_rules(chunks: int) -> list[PriorityRule]:
    early_chunk_first = (False, True) if chunks > 1 else (False,)
    return [PriorityRule(*each) for each in product((False, True), MIN_FITS, early_chunk_first)]
