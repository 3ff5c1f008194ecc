"""GPipe: all forwards, then all backwards.

Huang et al., "GPipe", arXiv:1811.06965. The simplest order, and the one that needs the most memory.
Bubble (p-1)/(m+p-1) for p stages and m microbatches; every rank holds m activations.
"""

from __future__ import annotations

from ferrorpc.pipeline.actions import Action, B, F
from ferrorpc.pipeline.schedules.building_blocks import counts_of
from ferrorpc.pipeline.schedules.schedule import Schedule


def gpipe(stages: int, microbatches: int) -> Schedule:
    """GPipe for any number of stages and microbatches.

    Raises:
        UsageError: a count is below 1.
    """
    stages, microbatches = counts_of("gpipe", stages=stages, microbatches=microbatches)
    return Schedule.of(
        "gpipe",
        [[Action(rank, kind, microbatch) for kind in (F, B) for microbatch in range(microbatches)] for rank in range(stages)],
    )
