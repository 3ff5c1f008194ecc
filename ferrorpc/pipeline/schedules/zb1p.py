"""ZB1P: 1F1B with a split backward: the input's gradient at once, for the rank that waits; the weights' later, in the bubble.

Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241 (there ZB-H1); with chunks, the same on interleaved 1F1B.
Rank r warms up with (v-1)k + p-1-r forwards and delays r backwards of weights, so every rank holds as much as 1F1B's first
rank. At equal costs of forward, input and weights: bubble (p-1)/(3*v*m+p-1), a third of 1F1B's; p activations for one chunk.
"""

from __future__ import annotations

from ferrorpc.pipeline.actions import F, I
from ferrorpc.pipeline.schedules.building_blocks import (
    RowBuilder,
    counts_of,
    interleaved_chunks,
    loop_placement,
    microbatch_groups,
)
from ferrorpc.pipeline.schedules.schedule import Schedule


def zb1p(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """ZB1P for any number of stages, microbatches and chunks.

    Raises:
        UsageError: a count is below 1.
    """
    stages, microbatches, chunks = counts_of("zb1p", stages=stages, microbatches=microbatches, chunks=chunks)
    groups = microbatch_groups(stages, microbatches)
    forwards, backwards = interleaved_chunks(groups, chunks)
    rows = []
    for rank in range(stages):
        row = RowBuilder(loop_placement(rank, stages, chunks), microbatches)
        ahead = (chunks - 1) * len(groups[0]) + stages - 1 - rank
        for chunk in forwards[:ahead]:
            row.add(F, chunk)
        for place, chunk in enumerate(backwards):
            if ahead + place < len(forwards):
                row.add(F, forwards[ahead + place])
            row.add(I, chunk)
            if place >= rank:
                row.add_weight()
        for _ in range(min(rank, len(backwards))):
            row.add_weight()
        rows.append(row.actions)
    return Schedule.of("zb1p", rows)
