"""The best order that can be found at given costs: the named schedules, list schedules built with many tastes, and what
becomes of the best of both when neighbours change places.

The named ones are among the candidates, so the result is never worse than the best of them under the same cap. A search takes
about a hundred sweeps over all actions for the candidates, and some hundreds for the climbing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from ferrorpc.errors import UsageError
from ferrorpc.pipeline.actions import B, F, I, Kind, W
from ferrorpc.pipeline.schedules.greedy import Greedy, Taste
from ferrorpc.pipeline.schedules.improve import Sweep, improve
from ferrorpc.pipeline.schedules.named import NAMED, named
from ferrorpc.pipeline.schedules.schedule import Schedule

NAMES = ("forward", "backward_input", "backward_weight")
PATIENCES = (0.0, 0.3, 0.7, 1.0)
CLIMBS = 2
"""How many of the best candidates are improved."""
TRIALS = 400
"""How many orders are looked at for each."""


def search(
    costs: Mapping[str, Sequence[float]],
    latency: float = 0.0,
    memory_cap: float | None = None,
    *,
    microbatches: int = 8,
) -> Schedule:
    """The fastest schedule found; among equals, the one that holds least.

    Args:
        costs: "forward", "backward_input" and "backward_weight", each a list with the time units of every rank.
        latency: of a message between two ranks.
        memory_cap: activations a rank may hold at once, in whole-rank microbatches; None for any number.
        microbatches: how many there are.

    Raises:
        UsageError: costs are missing or of different lengths, or nothing fits below the cap.
    """
    if set(costs) != set(NAMES) or len({len(costs[name]) for name in NAMES}) != 1:
        raise UsageError(
            f"costs are lists of one length called {', '.join(NAMES)}; these are {dict(costs)}",
            hint="give each a number for every piece of the model",
        )
    ranked = sorted(_fitting(costs, latency, memory_cap, microbatches), key=lambda found: found[:3])
    if not ranked:
        raise UsageError(f"no schedule holds at most {memory_cap} activations a rank", hint="raise memory_cap")
    makespan, _, _, best = ranked[0]
    for _, _, _, schedule in ranked[:CLIMBS]:
        chunks = schedule.virtual_stages // schedule.stages
        caps = None if memory_cap is None else [int(memory_cap * chunks + 1e-9)] * schedule.stages
        climbed = improve(schedule, _by_piece(schedule, costs), latency, caps, TRIALS)
        found = Sweep(climbed, _by_piece(climbed, costs), latency).makespan(climbed.actions)
        if found < makespan - 1e-9:
            makespan, best = found, climbed
    return best


def _by_piece(schedule: Schedule, costs: Mapping[str, Sequence[float]]) -> dict[tuple[Kind, int], float]:
    """(kind, piece) -> time units: a rank's cost is split evenly over its pieces."""
    chunks = schedule.virtual_stages // schedule.stages
    found = {}
    for piece, rank in enumerate(schedule.placement):
        forward, backward_input, backward_weight = (costs[name][rank] / chunks for name in NAMES)
        found[F, piece], found[I, piece], found[W, piece] = forward, backward_input, backward_weight
        found[B, piece] = backward_input + backward_weight
    return found


def _fitting(
    costs: Mapping[str, Sequence[float]], latency: float, memory_cap: float | None, microbatches: int
) -> Iterator[tuple[float, float, int, Schedule]]:
    """(makespan, peak, place, candidate) of those below the cap."""
    for place, schedule in enumerate(_candidates(costs, latency, memory_cap, microbatches)):
        peak = max(schedule.peak_activations)
        if memory_cap is None or peak <= memory_cap + 1e-9:
            sweep = Sweep(schedule, _by_piece(schedule, costs), latency)
            yield round(sweep.makespan(schedule.actions), 9), peak, place, schedule


def _candidates(
    costs: Mapping[str, Sequence[float]], latency: float, memory_cap: float | None, microbatches: int
) -> Iterator[Schedule]:
    stages = len(costs["forward"])
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
        split = {kind: [costs[name][rank] / chunks for rank in placement] for kind, name in zip((F, I, W), NAMES, strict=True)}
        for caps, taste in product(_caps(stages, int(cap * chunks + 1e-9), chunks), _tastes(chunks)):
            schedule = Greedy(placement, microbatches, split, latency, caps, taste).build("searched")
            if schedule is not None:
                yield schedule


def _caps(stages: int, cap: int, chunks: int) -> list[list[int]]:
    """What each rank may hold: all alike, or less the nearer the loss, as in 1F1B."""
    falling = [max(chunks, min(cap, chunks * (stages - rank))) for rank in range(stages)]
    even = [cap] * stages
    return [even] if falling == even else [even, falling]


def _tastes(chunks: int) -> list[Taste]:
    upstream = (False, True) if chunks > 1 else (False,)
    return [Taste(*each) for each in product((False, True), PATIENCES, upstream)]
