"""Interleaved 1F1B: the model goes round the ranks v times, which makes the bubble v times smaller, for more messages.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", arXiv:2104.04473. Microbatches go in groups
of k, which is p or a few more: a group passes all chunks before the next group begins. Rank r warms up with
(v-1)k + 2(p-1-r) forwards of a chunk; then one forward and one backward in turn. Where p divides m: bubble (p-1)/(v*m+p-1), and
rank 0 holds min(p + (p-1)/v, m) activations. With one chunk it is 1F1B.
"""

from __future__ import annotations

from ferrorpc.pipeline.actions import B, F
from ferrorpc.pipeline.schedules.layout import Row, check, loop, rounds
from ferrorpc.pipeline.schedules.schedule import Schedule


def interleaved(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B for any number of stages, microbatches and chunks.

    Groups differ by one microbatch where they cannot be equal.

    Raises:
        UsageError: a count is below 1.
    """
    check("interleaved", stages=stages, microbatches=microbatches, chunks=chunks)
    groups = rounds(stages, microbatches)
    forwards = [chunk for group in groups for chunk in range(chunks) for _ in group]
    backwards = [chunk for group in groups for chunk in reversed(range(chunks)) for _ in group]
    rows = []
    for rank in range(stages):
        row = Row(loop(rank, stages, chunks), microbatches)
        ahead = (chunks - 1) * len(groups[0]) + (2 if chunks > 1 else 1) * (stages - 1 - rank)
        for chunk in forwards[:ahead]:
            row.add(F, chunk)
        for place, chunk in enumerate(backwards):
            for forward in forwards[ahead + place : ahead + place + 1]:
                row.add(F, forward)
            row.add(B, chunk)
        rows.append(row.actions)
    return Schedule.of("interleaved", rows)
