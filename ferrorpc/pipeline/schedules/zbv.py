"""ZBV: the model goes down the ranks and comes back up, so that the last forward turns round without a message.

Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, and "Pipeline Parallelism with Controllable Memory",
arXiv:2405.15362. Rank r holds pieces r and 2p-1-r. At equal costs of forward, input and weights, and with 2p-1 or more
microbatches, no rank waits between its first action and its last: what is left of the bubble is the ramp at both ends,
(p-1)/(6m+p-1). Fewer keep the order they would have among 2p-1. Every rank holds min(p, m) activations.
"""

from __future__ import annotations

from ferrorpc.pipeline.actions import Action, F, I
from ferrorpc.pipeline.schedules.layout import Row, check, vee
from ferrorpc.pipeline.schedules.schedule import Schedule

DOWN, UP = 0, 1
"""The two chunks of a rank."""


def zbv(stages: int, microbatches: int) -> Schedule:
    """ZBV for any number of stages and microbatches; each rank holds two chunks.

    Raises:
        UsageError: a count is below 1.
    """
    check("zbv", stages=stages, microbatches=microbatches)
    enough = max(microbatches, 2 * stages - 1)
    rows = [[each for each in _row(rank, stages, enough) if each.microbatch < microbatches] for rank in range(stages)]
    return Schedule.of("zbv", rows)


def _row(rank: int, stages: int, microbatches: int) -> list[Action]:
    row = Row(vee(rank, stages), microbatches)
    for _ in range(2 * (stages - rank) - 1):
        row.add(F, DOWN)
    for _ in range(rank):
        row.add(F, UP)
        row.add(F, DOWN)
    for _ in range(stages - rank):
        _through(row, UP)
    while row.left(DOWN) or row.left(UP):
        row.add(F, DOWN)
        row.add(I, DOWN)
        row.add_weight(DOWN)
        _through(row, UP)
    for _ in range(rank):
        row.add(I, DOWN)
        row.add(I, UP)
    for _ in range(stages - rank):
        row.add(I, DOWN)
        row.add_weight(DOWN)
    return row.finish()


def _through(row: Row, chunk: int) -> None:
    """A forward, and a whole backward in two."""
    row.add(F, chunk)
    row.add(I, chunk)
    row.add_weight(chunk)
