"""ZB1P: 1F1B whose backward is in two: the input's gradient at once, for the ranks that wait, and the weights' into the bubble.

Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241 (there ZB-H1); with chunks, the same on interleaved 1F1B.
Rank r warms up with (v-1)k + p-1-r forwards and lets r backwards of weights wait, so every rank holds as much as 1F1B's first
does. At equal costs of forward, input and weights: bubble (p-1)/(3*v*m+p-1), a third of 1F1B's; p activations for one chunk.
"""

from __future__ import annotations

from ferrorpc.pipeline.actions import F, I
from ferrorpc.pipeline.schedules.layout import Row, check, loop, rounds
from ferrorpc.pipeline.schedules.schedule import Schedule


def zb1p(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """ZB1P for any number of stages, microbatches and chunks.

    Raises:
        UsageError: a count is below 1.
    """
    check("zb1p", stages=stages, microbatches=microbatches, chunks=chunks)
    groups = rounds(stages, microbatches)
    forwards = [chunk for group in groups for chunk in range(chunks) for _ in group]
    backwards = [chunk for group in groups for chunk in reversed(range(chunks)) for _ in group]
    rows = []
    for rank in range(stages):
        row = Row(loop(rank, stages, chunks), microbatches)
        ahead = (chunks - 1) * len(groups[0]) + stages - 1 - rank
        for chunk in forwards[:ahead]:
            row.add(F, chunk)
        for place, chunk in enumerate(backwards):
            for forward in forwards[ahead + place : ahead + place + 1]:
                row.add(F, forward)
            row.add(I, chunk)
            if place >= rank:
                row.add_weight()
        for _ in range(min(rank, len(backwards))):
            row.add_weight()
        rows.append(row.actions)
    return Schedule.of("zb1p", rows)
