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
    stream = cupy.cuda.get_current_stream()

    def timed(call: Callable[[], object]) -> float:
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        before()
        begin.record(stream)
        call()
        end.record(stream)
        stream.synchronize()
        return float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3

    return _in_turns(calls, turns, timed)


def seconds_of(cupy: Any, calls: Mapping[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """The median seconds from each call until the current stream is done, taken in turns, after one warm-up turn."""
    settle = cupy.cuda.get_current_stream().synchronize
    return _in_turns(calls, turns, lambda call: _seconds(call, settle))


def group_seconds_of(group: Any, call: Callable[[], object], settle: Callable[[], object], turns: int) -> float:
    """The median seconds of a call that all ranks begin together, until the GPU is done, after one warm-up call.

    Args:
        settle: waits for the GPU.
    """
    times = []
    for _ in range(turns + 1):
        settle()
        group.barrier()
        times.append(_seconds(call, settle))
    return statistics.median(times[1:])


def _in_turns(
    calls: Mapping[str, Callable[[], object]], turns: int, timed: Callable[[Callable[[], object]], float]
) -> dict[str, float]:
    times = [{name: timed(call) for name, call in calls.items()} for _ in range(turns + 1)]
    return {name: statistics.median(turn[name] for turn in times[1:]) for name in calls}


def _seconds(call: Callable[[], object], settle: Callable[[], object]) -> float:
    settle()
    begin = time.perf_counter()
    call()
    settle()
    return time.perf_counter() - begin
