"""ZB1P: 1F1B with a split backward: the input's gradient at once, for the rank that waits; the weights' later, in the bubble.

Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241 (there ZB-H1); with chunks, the same on interleaved 1F1B.
Rank r warms up with (v-1)k + p-1-r forwards and delays r backwards of weights, so every rank holds as much as 1F1B's first
rank. At equal costs of forward, input and weights: bubble (p-1)/(3*v*m+p-1), a third of 1F1B's; p activations for one chunk.
"""

from __future__ import annotations

from ferrorpc.pipeline.actions import I
from ferrorpc.pipeline.schedules.building_blocks import alternating_rows, counts_of
from ferrorpc.pipeline.schedules.schedule import Schedule


def zb1p(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """ZB1P for any number of stages, microbatches and chunks.

    Raises:
        UsageError: a count is below 1.
    """
    stages, microbatches, chunks = counts_of("zb1p", stages=stages, microbatches=microbatches, chunks=chunks)
    return Schedule.of("zb1p", alternating_rows(stages, microbatches, chunks, backward=I, warm_up=1))
