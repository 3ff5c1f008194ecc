"""Makes schedules by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Final

from ferrorpc.errors import UsageError
from ferrorpc.pipeline.schedules.dualpipe_v import dualpipe_v
from ferrorpc.pipeline.schedules.gpipe import gpipe
from ferrorpc.pipeline.schedules.interleaved import interleaved
from ferrorpc.pipeline.schedules.looped_bfs import looped_bfs
from ferrorpc.pipeline.schedules.one_f_one_b import one_f_one_b
from ferrorpc.pipeline.schedules.schedule import Schedule
from ferrorpc.pipeline.schedules.zb1p import zb1p
from ferrorpc.pipeline.schedules.zbv import zbv

NAMED: Final[dict[str, Callable[..., Schedule]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "looped_bfs": looped_bfs,
    "interleaved": interleaved,
    "zb1p": zb1p,
    "zbv": zbv,
    "dualpipe_v": dualpipe_v,
}
"""The function that makes each named schedule."""
_ALIASES: Final = {"one_f_one_b": "1f1b", "dualpipev": "dualpipe_v", "interleaved_1f1b": "interleaved"}
_CHUNKS: Final = {"zbv": 2, "dualpipe_v": 2}
"""Chunks of a rank, for schedules with a fixed number other than 1."""


def named(name: str, stages: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """The schedule of this name.

    Args:
        chunks: pieces of the model on each rank; None for the schedule's default.

    Raises:
        UsageError: there is no such schedule, or it does not admit these counts; the message says why.
    """
    key = str(name).lower().replace("-", "_")
    key = _ALIASES.get(key, key)
    make = NAMED.get(key)
    if make is None:
        raise UsageError(f"there is no schedule {name!r}", hint=f"use one of: {', '.join(NAMED)}")
    if "chunks" in inspect.signature(make).parameters:
        return make(stages, microbatches) if chunks is None else make(stages, microbatches, chunks=chunks)
    fixed = _CHUNKS.get(key, 1)
    if chunks not in (None, fixed):
        wanted = "one stage" if fixed == 1 else f"a list of {fixed} stages"
        raise UsageError(
            f"{name} with {chunks} stage{'s' * (chunks != 1)} a rank: every rank holds {fixed} with this schedule",
            hint=f"pass {wanted} (chunks={fixed}), or use looped_bfs, interleaved or zb1p for another number",
        )
    return make(stages, microbatches)
