"""Pipeline schedules as values; public as `ferrorpc.schedules`.

    s = ferrorpc.schedules.zbv(stages=4, microbatches=8)
    s.validate()                          # [] : sound
    s.simulate(latency=0.2).bubble_fraction
    s.to_svg("zbv.svg")

`ferrorpc.Pipeline` runs them.
"""

from __future__ import annotations

from ferrorpc.pipeline.actions import Action, Kind, action
from ferrorpc.pipeline.schedules.dualpipe_v import dualpipe_v
from ferrorpc.pipeline.schedules.gpipe import gpipe
from ferrorpc.pipeline.schedules.interleaved import interleaved
from ferrorpc.pipeline.schedules.looped_bfs import looped_bfs
from ferrorpc.pipeline.schedules.named import NAMED, named
from ferrorpc.pipeline.schedules.one_f_one_b import one_f_one_b
from ferrorpc.pipeline.schedules.schedule import Schedule
from ferrorpc.pipeline.schedules.search import search
from ferrorpc.pipeline.schedules.simulation import PipelineTimeline
from ferrorpc.pipeline.schedules.validation import Finding
from ferrorpc.pipeline.schedules.zb1p import zb1p
from ferrorpc.pipeline.schedules.zbv import zbv

__all__ = [
    "NAMED",
    "Action",
    "Finding",
    "Kind",
    "PipelineTimeline",
    "Schedule",
    "action",
    "dualpipe_v",
    "gpipe",
    "interleaved",
    "looped_bfs",
    "named",
    "one_f_one_b",
    "search",
    "zb1p",
    "zbv",
]
