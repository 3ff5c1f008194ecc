"""One rank of a job that captures CUDA graphs while operations are in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ferrorpc
from tests.gpu.scenarios import FAKE, opened, run, say

TIMEOUT = 30.0
REPLAYS = 3
MODES = ("streamCaptureModeRelaxed", "streamCaptureModeThreadLocal", "streamCaptureModeGlobal")


class Others:
    """Operations of this rank that other ranks have not begun: the world's, a subgroup's, and a stream's of the world.

    Args:
        x: an array of ones.
    """

    def __init__(self, group: ferrorpc.ProcessGroup, x: Any) -> None:
        self._group, self._x = group, x
        self._numbered = group.stream()
        self._part: Any = group.subgroup(list(range(group.size))[::-1])
        self._begun = 0

    def begin(self) -> list[Any]:
        """Begins some."""
        self._begun += 1
        return [
            self._group.all_reduce(self._x, async_op=True),
            self._part.all_reduce(self._x, async_op=True),
            self._numbered.all_reduce(self._x, self._begun),
        ]

    def refused(self, finished: Any, x: Any) -> None:
        """Raises AssertionError unless calls on the current stream, and waits on it, are refused."""
        group, other = self._group, 1 - self._group.rank
        for call in (
            lambda: group.all_reduce(x),
            lambda: group.all_reduce(x, async_op=True),
            lambda: group.all_reduce(x, out=x),
            lambda: group.all_gather(x),
            lambda: group.broadcast(x, root=group.rank),
            lambda: group.send(x, other),
            lambda: self._part.all_reduce(x),
            lambda: self._numbered.all_reduce(x, 1000),
            finished.wait,
        ):
            with pytest.raises(ferrorpc.UsageError, match="a CUDA graph is being captured"):
                call()

    def take_turns(self, name: str, capture: Callable[[Any], None]) -> None:
        """One rank captures, then the other; each while operations of its own are in flight, and one is finished."""
        group = self._group
        for turn in range(group.size):
            key = f"{name}/{turn}"
            finished = group.all_reduce(self._x, async_op=True)
            group.barrier()
            if group.rank == turn:
                works = self.begin()
                capture(finished)
                group.store.set(key, b"captured")
            else:
                group.store.get(key, timeout=TIMEOUT)
                works = self.begin()
            for work in (finished, *works):
                found = work.wait(host=True)
                assert float(found[-1]) == group.size, f"{key} has spoilt what was in flight"


def of_cupy(cupy: Any, options: dict[str, Any]) -> None:
    """CuPy's, in every mode of capturing."""
    x = cupy.asarray(np.ones(1001, np.float32))

    def capture(finished: Any, mode: str) -> None:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            y = cupy.asarray(np.zeros(1001, np.float32))

            def work() -> None:
                np.add(y, x, out=y)

            work()  # what is compiled now is not compiled while the graph is captured
            replay = work
            if FAKE:
                stream.fake.captured = True
                others.refused(finished, x)
                stream.fake.captured = False
            else:
                stream.begin_capture(getattr(cupy.cuda.runtime, mode))
                try:
                    work()
                    others.refused(finished, x)
                finally:
                    graph = stream.end_capture()
                replay = graph.launch
            for _ in range(REPLAYS):
                replay()
            assert cupy.asnumpy(y).tolist() == [1.0 + REPLAYS] * 1001

    with opened(timeout=TIMEOUT) as group:
        others = Others(group, x)
        for mode in MODES:
            others.take_turns(mode, lambda finished, mode=mode: capture(finished, mode))
    say("done")


def of_torch(cupy: Any, options: dict[str, Any]) -> None:
    """torch's."""
    import torch

    x = torch.ones(1001, device="cuda:0")

    def capture(finished: Any) -> None:
        y = torch.zeros(1001, device="cuda:0")
        y += x  # its kernel is loaded now
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y += x
            others.refused(finished, x)
        for _ in range(REPLAYS):
            graph.replay()
        assert y.tolist() == [1.0 + REPLAYS] * 1001

    with opened(timeout=TIMEOUT) as group:
        others = Others(group, x)
        others.take_turns("torch", capture)
    say("done")


SCENARIOS = {"of_cupy": of_cupy, "of_torch": of_torch}

if __name__ == "__main__":
    run(SCENARIOS)
