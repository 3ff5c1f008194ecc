"""Timelines as Chrome traces: JSON that chrome://tracing and ui.perfetto.dev show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ferrorpc.plans.span import Span

MICROSECONDS = 1e6


def render(title: str, lanes: Sequence[str], spans: Sequence[Span], start: float, unit_seconds: float) -> str:
    """The trace as JSON.

    Args:
        title: the name of the process that the lanes are threads of.
        start: the time unit at which the trace begins.
        unit_seconds: what one time unit lasts.
    """
    factor = unit_seconds * MICROSECONDS
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": title}}]
    for lane, name in enumerate(lanes):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": lane, "args": {"name": name}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": lane, "args": {"sort_index": lane}})
    for span in spans:
        times = {"ts": (span.start - start) * factor, "dur": (span.stop - span.start) * factor}
        events.append({"ph": "X", "name": span.name, "cat": span.kind or "task", "pid": 0, "tid": span.lane, **times})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1)
