"""Looped BFS: the model goes round the ranks several times, and all microbatches pass a chunk before the next chunk begins.

Lamy-Poirier, "Breadth-First Pipeline Parallelism", arXiv:2211.05953. All forwards come before all backwards, so a rank holds m
activations. The bubble is (p-1)/(v*m+p-1) for v chunks and p microbatches or more.
"""

from __future__ import annotations

from ferrorpc.pipeline.actions import Action, B, F
from ferrorpc.pipeline.schedules.building_blocks import counts_of, loop_placement
from ferrorpc.pipeline.schedules.schedule import Schedule


def looped_bfs(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Looped breadth-first for any number of stages, microbatches and chunks.

    Raises:
        UsageError: a count is below 1.
    """
    stages, microbatches, chunks = counts_of("looped_bfs", stages=stages, microbatches=microbatches, chunks=chunks)
    rows = []
    for rank in range(stages):
        pieces = loop_placement(rank, stages, chunks)
        forwards = [Action(piece, F, microbatch) for piece in pieces for microbatch in range(microbatches)]
        backwards = [Action(piece, B, microbatch) for piece in reversed(pieces) for microbatch in range(microbatches)]
        rows.append(forwards + backwards)
    return Schedule.of("looped_bfs", rows)
