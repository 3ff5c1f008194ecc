"""Every schedule over every transport trains as one process does that runs the same microbatches one after the other.

The model has an edge that skips stages, a stage with several inputs and a weight shared by the first and the last stage;
microbatches are uneven. Gradients and weights after 8 steps (after FEW_STEPS with the other numbers of microbatches, in single
precision, and in fewer stages over a network) are those of one process bit for bit, and those of the whole batch at once up to
rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from ferrorpc import ProcessGroup, schedules
from ferrorpc.pipeline.runtime import Pipeline
from ferrorpc.testing import FaultPlan, run_groups, run_world
from tests.integration.test_grpc_backend import GrpcWorld
from tests.unit.pipeline.models import Joint, edges_of, one_process, stage_of, ties_of, whole_model
from tests.unit.pipeline.stages import batch, descend, half_square

STEPS = 8
FEW_STEPS = 4
MICROBATCHES = (4, 7, 8)
SCHEDULES = {"gpipe": 1, "1f1b": 1, "looped_bfs": 2, "interleaved": 2, "zb1p": 1, "zb1p 2": 2, "zbv": 2, "dualpipe_v": 2}
"""Name -> chunks of each rank."""
Runner = Callable[[Callable[[ProcessGroup], Any]], list[Any]]


@contextmanager
def simulated(size: int) -> Iterator[Runner]:
    """Messages take random times."""
    yield lambda body: run_world(size, body, faults=FaultPlan(delay_seconds=(0.0, 0.05)))


@contextmanager
def real(size: int, transport: str) -> Iterator[Runner]:
    """A server for each rank, in one process."""
    with GrpcWorld(size, transport=transport) as world:
        yield lambda body: run_groups([ProcessGroup(backend, timeout=30.0) for backend in world.backends], body)


WORLDS = {
    "simulated": simulated,
    "grpc": partial(real, transport="grpc"),
    "shared_memory": partial(real, transport="shared_memory"),
}


def rows(microbatches: int) -> int:
    """Of a batch whose microbatches are uneven."""
    return 2 * microbatches + 3


def orders(name: str, stages: int, transport: str = "simulated") -> list[schedules.Schedule]:
    """The schedule for every number of microbatches that it admits; for one of them on lanes, which do not know it."""
    key, chunks = name.partition(" ")[0], SCHEDULES[name]
    counts = MICROBATCHES if transport == "simulated" else MICROBATCHES[stages - 2 : stages - 1]
    admitted = [count for count in counts if name != "dualpipe_v" or count >= 2 * stages]
    return [schedules.named(key, stages, count, chunks) for count in admitted]


def trained(group: ProcessGroup, schedule: schedules.Schedule, dtype: Any, steps: int) -> dict[int, Joint]:
    """This rank's stages after all steps, the last one's gradients with them."""
    pieces = schedule.virtual_stages
    stages = {number: stage_of(number, pieces, dtype) for number in schedule.pieces(group.rank)}
    pipe = Pipeline(list(stages.values()), group, schedule, edges=edges_of(pieces), tied=ties_of(pieces))
    peak = schedule.simulate().peak_activations[group.rank]
    for step in range(steps):
        if step:
            descend(stages.values())
        pipe.step(*batch(rows(schedule.microbatches), seed=step, dtype=dtype), half_square)
        assert pipe.peak_activations == peak
    return stages


@cache
def alone(pieces: int, row_count: int, microbatches: int, dtype: Any, steps: int) -> list[Joint]:
    """The same in one process."""
    stages = whole_model(pieces, dtype)
    for step in range(steps):
        if step:
            descend(stages)
        one_process(stages, *batch(row_count, seed=step, dtype=dtype), half_square, microbatches)
    return stages


def arrays_of(stages: list[Joint]) -> list[np.ndarray[Any, Any]]:
    """Weights and gradients."""
    return [array for stage in stages for each in (stage.weight, stage.bias) for array in (each.data, each.grad)]


def check(results: list[list[dict[int, Joint]]], place: int, schedule: schedules.Schedule, dtype: Any, steps: int) -> None:
    held = {number: stage for of_rank in results for number, stage in of_rank[place].items()}
    found = arrays_of([held[number] for number in sorted(held)])
    row_count, tolerance = rows(schedule.microbatches), 1e-12 if dtype is np.float64 else 1e-5
    for mine, wanted in zip(found, arrays_of(alone(len(held), row_count, schedule.microbatches, dtype, steps)), strict=True):
        np.testing.assert_array_equal(mine, wanted)
    for mine, wanted in zip(found, arrays_of(alone(len(held), row_count, 1, dtype, steps)), strict=True):
        assert mine.dtype == dtype
        assert np.linalg.norm(mine - wanted) <= tolerance * np.linalg.norm(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("transport", WORLDS)
def test_steps_are_those_of_one_process(transport: str, name: str, stages: int) -> None:
    admitted = orders(name, stages, transport)
    last = STEPS if transport == "simulated" or stages == 4 else FEW_STEPS
    lengths = [(schedule, FEW_STEPS) for schedule in admitted[:-1]] + [(admitted[-1], last)]
    with WORLDS[transport](stages) as run:
        results = run(lambda group: [trained(group, schedule, np.float64, steps) for schedule, steps in lengths])
    for place, (schedule, steps) in enumerate(lengths):
        check(results, place, schedule, np.float64, steps)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_so_they_are_in_single_precision(name: str, stages: int) -> None:
    schedule = orders(name, stages)[-1]
    with simulated(stages) as run:
        check(run(lambda group: [trained(group, schedule, np.float32, FEW_STEPS)]), 0, schedule, np.float32, FEW_STEPS)
