"""DualPipeV: placed as ZBV; forwards of one chunk alternate with backwards of the other, and hide each other's messages.

DeepSeek-AI, "DualPipe" (its V-shaped half), github.com/deepseek-ai/DualPipe. Rank r holds pieces r and 2p-1-r. The steady
state alternates a forward of one chunk with a whole backward of the other; backwards of weights are delayed only towards the
end. Rank r holds up to p + 1/2 activations. The bubble at equal costs is ZBV's. It needs 2p microbatches.
"""

from __future__ import annotations

from ferrorpc.errors import UsageError
from ferrorpc.pipeline.actions import Action, B, F, I
from ferrorpc.pipeline.schedules.building_blocks import DOWN, UP, RowBuilder, counts_of, v_placement
from ferrorpc.pipeline.schedules.schedule import Schedule


def dualpipe_v(stages: int, microbatches: int) -> Schedule:
    """DualPipeV for at least twice as many microbatches as stages; each rank holds two chunks.

    Raises:
        UsageError: a count is below 1, or there are too few microbatches.
    """
    stages, microbatches = counts_of("dualpipe_v", stages=stages, microbatches=microbatches)
    if microbatches < 2 * stages:
        raise UsageError(
            f"dualpipe_v with {stages} stages and {microbatches} microbatches: it needs at least 2 * stages microbatches",
            hint=f"use {2 * stages} microbatches or more, or zbv, which takes any number",
        )
    return Schedule.of("dualpipe_v", [_row(rank, stages, microbatches) for rank in range(stages)])


def _row(rank: int, stages: int, microbatches: int) -> list[Action]:
    row = RowBuilder(v_placement(rank, stages), microbatches)
    after = stages - 1 - rank
    for _ in range(2 * after):
        row.add(F, DOWN)
    for _ in range(rank + 1):
        row.add(F, DOWN)
        row.add(F, UP)
    for _ in range(after):
        row.add(I, UP)
        row.add_weight()
        row.add(F, UP)
    for _ in range(microbatches - 2 * stages + rank + 1):
        row.add(F, DOWN)
        row.add(B, UP)
        row.add(F, UP)
        row.add(B, DOWN)
    for _ in range(after):
        row.add(B, UP)
        row.add(F, UP)
        row.add(B, DOWN)
    _cool_down(row, rank + 1)
    for _ in range(after):
        row.add_weight()
        row.add(I, DOWN)
    for _ in range(rank + 1):
        row.add_weight()
    return row.actions


def _cool_down(row: RowBuilder, pairs: int) -> None:
    """Adds pairs of backwards. From the middle on, backwards of weights are delayed, to fill idle time at the end."""
    for backward in range(2 * pairs):
        row.add(B if backward < pairs else I, UP if backward % 2 == 0 else DOWN)
