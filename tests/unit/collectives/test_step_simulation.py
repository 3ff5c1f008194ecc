"""StepSimulation begin when all they need is over, and the collective ends with the last of them."""

from __future__ import annotations

import pytest

from ferrorpc.collectives.step_simulation import FOLDING, INWARDS, OUTWARDS, Step, StepSimulation
from ferrorpc.wire.cost_table import Costs


def dependencies_of(*steps: Step, processors: int | None = None) -> StepSimulation:
    made = StepSimulation(Costs(0.0, 0.0, 0.0, 0.0, processors), 2)
    for step in steps:
        made.add(step)
    return made


def step(lane: int | None, seconds: float, *needs: int, rank: int = 0, begun: int | None = None, lag: float = 0.0) -> Step:
    return Step(rank, lane, seconds, needs, begun, lag, 1 - rank, 0)


def test_a_step_waits_for_the_last_of_its_needs_whichever_began_last() -> None:
    steps = dependencies_of(step(OUTWARDS, 10.0), step(INWARDS, 1.0), step(FOLDING, 1.0, 1), step(None, 0.0, 0, 2))
    assert steps.run() == 10.0
    assert steps.starts == [0.0, 0.0, 1.0, 10.0]


def test_it_is_over_with_the_step_that_ends_last_whichever_began_last() -> None:
    assert dependencies_of(step(OUTWARDS, 10.0), step(INWARDS, 1.0), step(FOLDING, 1.0, 1)).run() == 10.0


def test_a_chunk_arrives_a_while_after_it_began_to_leave() -> None:
    steps = dependencies_of(step(OUTWARDS, 10.0), step(INWARDS, 10.0, rank=1, begun=0, lag=2.0))
    assert steps.run() == 12.0


@pytest.mark.parametrize(("processors", "seconds"), [(None, 3.0), (2, 3.0), (1, 6.0)])
def test_steps_of_different_lanes_share_the_processors(processors: int | None, seconds: float) -> None:
    steps = dependencies_of(*(step(OUTWARDS, 1.0, rank=rank) for rank in (0, 0, 0, 1, 1, 1)), processors=processors)
    assert steps.run() == seconds
