"""Interleaved 1F1B: the model goes round the ranks v times, which makes the bubble v times smaller and needs more messages.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", arXiv:2104.04473. Microbatches go in groups
of k, which is p or slightly more: a group passes all chunks before the next group begins. Rank r warms up with
(v-1)k + 2(p-1-r) forwards of a chunk; then forwards and backwards alternate. If p divides m, the bubble is (p-1)/(v*m+p-1), and
rank 0 holds min(p + (p-1)/v, m) activations. With one chunk it is 1F1B.
"""

from __future__ import annotations

from ferrorpc.pipeline.actions import B
from ferrorpc.pipeline.schedules.building_blocks import alternating_rows, counts_of
from ferrorpc.pipeline.schedules.schedule import Schedule


def interleaved(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B for any number of stages, microbatches and chunks.

    Sizes of groups differ by at most one microbatch.

    Raises:
        UsageError: a count is below 1.
    """
    stages, microbatches, chunks = counts_of("interleaved", stages=stages, microbatches=microbatches, chunks=chunks)
    warm_up = 2 if chunks > 1 else 1
    return Schedule.of("interleaved", alternating_rows(stages, microbatches, chunks, backward=B, warm_up=warm_up))
