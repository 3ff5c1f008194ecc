"""How long things take on one GPU, measured in turns, and whether that is what they should take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def judged(targets: Mapping[str, bool]) -> int:
    """Prints what was missed of the targets, which are in words and whether each was met. The exit code."""
    missed = [words for words, met in targets.items() if not met]
    for words in missed:
        print(f"missed: {words}")
    return int(bool(missed))


def gpu_seconds_of(
    cupy: Any, acts: Mapping[str, Callable[[], object]], turns: int, before: Callable[[], object]
) -> dict[str, float]:
    """Seconds that the GPU has for each, between two of its events: medians of `turns`, after one that compiles.

    Args:
        before: keeps the GPU busy for longer than the host takes to queue any of them, so the host's part does not count.
    """
    stream, new = cupy.cuda.get_current_stream(), cupy.cuda.Event
    times: dict[str, list[float]] = {name: [] for name in acts}
    for turn in range(turns + 1):
        for name, act in acts.items():
            begin, end = new(), new()
            before()
            begin.record(stream)
            act()
            end.record(stream)
            stream.synchronize()
            if turn:
                times[name].append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    return {name: statistics.median(each) for name, each in times.items()}


def seconds_of(cupy: Any, acts: Mapping[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Seconds until the current stream is done with each: medians of `turns`, after one that compiles and pins."""
    settle = cupy.cuda.get_current_stream().synchronize
    times: dict[str, list[float]] = {name: [] for name in acts}
    for turn in range(turns + 1):
        for name, act in acts.items():
            settle()
            begin = time.perf_counter()
            act()
            settle()
            if turn:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(each) for name, each in times.items()}
