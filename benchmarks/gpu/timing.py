"""Timing on a GPU, the file of figures, and the exit code of a script with targets."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def exit_code(targets: Mapping[str, bool]) -> int:
    """Prints which targets were met. Returns the exit code, 1 if any was missed.

    Args:
        targets: whether each was met, by its description.
    """
    for words, met in targets.items():
        print(f"{'met' if met else 'missed'}: {words}")
    return int(not all(targets.values()))


def note(path: Path | None, what: str, figures: object) -> None:
    """Appends figures to a file of JSON lines at once, so that a run that is cut off loses nothing. None: does nothing."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"what": what, "figures": figures}) + "\n")


def gpu_seconds_of(
    cupy: Any, calls: Mapping[str, Callable[[], object]], turns: int, before: Callable[[], object]
) -> dict[str, float]:
    """The median seconds between two GPU events around each call, taken in turns, after one warm-up turn.

    Args:
        before: keeps the GPU busy for longer than the host takes to queue any of the calls, which excludes the host's part.
    """
    stream, new = cupy.cuda.get_current_stream(), cupy.cuda.Event
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            begin, end = new(), new()
            before()
            begin.record(stream)
            call()
            end.record(stream)
            stream.synchronize()
            if turn:
                times[name].append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    return {name: statistics.median(each) for name, each in times.items()}


def seconds_of(cupy: Any, calls: Mapping[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """The median seconds from each call until the current stream is done, taken in turns, after one warm-up turn."""
    settle = cupy.cuda.get_current_stream().synchronize
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            settle()
            begin = time.perf_counter()
            call()
            settle()
            if turn:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(each) for name, each in times.items()}


def group_seconds_of(group: Any, call: Callable[[], object], settle: Callable[[], object], turns: int) -> float:
    """The median seconds of a call that all ranks begin together, until the GPU is done, after one warm-up call.

    Args:
        settle: waits for the GPU.
    """
    times = []
    for _ in range(turns + 1):
        settle()
        group.barrier()
        begin = time.perf_counter()
        call()
        settle()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])
