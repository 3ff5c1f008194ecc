"""1F1B: after a warm-up, forwards and backwards alternate, so that no rank holds more than p activations.

Narayanan et al., "PipeDream", arXiv:1806.03377 (here with a flush at the end of the step, as in PipeDream-Flush and DAPPLE).
Rank r warms up with p-1-r forwards. Bubble (p-1)/(m+p-1), as GPipe; rank r holds min(p-r, m) activations instead of m.
"""

from __future__ import annotations

from ferrorpc.pipeline.actions import B
from ferrorpc.pipeline.schedules.building_blocks import alternating_rows, counts_of
from ferrorpc.pipeline.schedules.schedule import Schedule


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B for any number of stages and microbatches.

    Raises:
        UsageError: a count is below 1.
    """
    stages, microbatches = counts_of("one_f_one_b", stages=stages, microbatches=microbatches)
    return Schedule.of("one_f_one_b", alternating_rows(stages, microbatches, chunks=1, backward=B, warm_up=1))
