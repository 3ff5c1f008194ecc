"""ZBV: the model goes down the ranks and back up, so that the last rank passes its first chunk's output on without a message.

Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, and "Pipeline Parallelism with Controllable Memory",
arXiv:2405.15362. Rank r holds pieces r and 2p-1-r. At equal costs of forward, input and weights, and with 2p-1 or more
microbatches, no rank is idle between its first action and its last. What is left of the bubble is the ramp at both ends,
(p-1)/(6m+p-1). Fewer microbatches keep the order that they would have among 2p-1. Every rank holds min(p, m) activations.
"""

from __future__ import annotations

from ferrorpc.pipeline.actions import Action, F, I
from ferrorpc.pipeline.schedules.building_blocks import DOWN, UP, RowBuilder, counts_of, v_placement
from ferrorpc.pipeline.schedules.schedule import Schedule


def zbv(stages: int, microbatches: int) -> Schedule:
    """ZBV for any number of stages and microbatches; each rank holds two chunks.

    Raises:
        UsageError: a count is below 1.
    """
    stages, microbatches = counts_of("zbv", stages=stages, microbatches=microbatches)
    enough = max(microbatches, 2 * stages - 1)
    rows = [[each for each in _row(rank, stages, enough) if each.microbatch < microbatches] for rank in range(stages)]
    return Schedule.of("zbv", rows)


def _row(rank: int, stages: int, microbatches: int) -> list[Action]:
    row = RowBuilder(v_placement(rank, stages), microbatches)
    for _ in range(2 * (stages - rank) - 1):
        row.add(F, DOWN)
    for _ in range(rank):
        row.add(F, UP)
        row.add(F, DOWN)
    for _ in range(stages - rank):
        _add_split(row)
    while row.forwards_left(DOWN) or row.forwards_left(UP):
        row.add(F, DOWN)
        row.add(I, DOWN)
        row.add_weight(DOWN)
        _add_split(row)
    for _ in range(rank):
        row.add(I, DOWN)
        row.add(I, UP)
    for _ in range(stages - rank):
        row.add(I, DOWN)
        row.add_weight(DOWN)
    for chunk in (UP, DOWN):
        for _ in range(microbatches):
            row.add_weight(chunk)
    return row.actions


def _add_split(row: RowBuilder) -> None:
    """Adds a forward, and both parts of a backward, of the chunk on the way up."""
    row.add(F, UP)
    row.add(I, UP)
    row.add_weight(UP)
