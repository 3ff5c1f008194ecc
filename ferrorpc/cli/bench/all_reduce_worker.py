"""One rank of `ferrorpc bench all_reduce`, started by it through the launcher.

python -m ferrorpc.cli.bench.all_reduce_worker LANE RESULTS_FILE SECONDS BYTES [BYTES ...]
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Final

import numpy as np

WARM_UPS: Final = 3
REPETITIONS_MIN: Final = 5
REPETITIONS_MAX: Final = 2000


class Lane(ABC):
    """What is measured."""

    rank: int

    @abstractmethod
    def array(self, count: int) -> Any:
        """`count` float32 ones, of the kind this lane takes."""

    @abstractmethod
    def all_reduce(self, array: Any) -> None:
        """Sums in place."""

    @abstractmethod
    def slowest(self, seconds: list[float]) -> list[float]:
        """The elementwise maximum over ranks."""

    @abstractmethod
    def barrier(self) -> None:
        """A common start."""

    @abstractmethod
    def close(self) -> None:
        """The end."""


class GrpcLane(Lane):
    """ferrorpc over gRPC."""

    def __init__(self) -> None:
        from ferrorpc.bootstrap.process_group import init_process_group

        self._group = init_process_group(backend="grpc", transport="grpc")
        self.rank = self._group.rank

    def array(self, count: int) -> Any:
        return np.ones(count, np.float32)

    def all_reduce(self, array: Any) -> None:
        self._group.all_reduce(array, out=array)

    def slowest(self, seconds: list[float]) -> list[float]:
        return [float(value) for value in self._group.all_reduce(np.array(seconds), op="max")]

    def barrier(self) -> None:
        self._group.barrier()

    def close(self) -> None:
        self._group.close()


class GlooLane(Lane):
    """torch.distributed with Gloo, on the same launcher."""

    def __init__(self) -> None:
        import torch
        import torch.distributed

        self._torch = torch
        self._distributed = torch.distributed
        torch.distributed.init_process_group("gloo")
        torch.set_num_threads(1)
        self.rank = int(os.environ["RANK"])

    def array(self, count: int) -> Any:
        return self._torch.ones(count)

    def all_reduce(self, array: Any) -> None:
        self._distributed.all_reduce(array)

    def slowest(self, seconds: list[float]) -> list[float]:
        found = self._torch.tensor(seconds, dtype=self._torch.float64)
        self._distributed.all_reduce(found, op=self._distributed.ReduceOp.MAX)
        return [float(value) for value in found]

    def barrier(self) -> None:
        self._distributed.barrier()

    def close(self) -> None:
        self._distributed.destroy_process_group()


LANES: Final[dict[str, type[Lane]]] = {"grpc": GrpcLane, "gloo": GlooLane}


def measure(lane: Lane, size_bytes: int, seconds: float) -> dict[str, Any]:
    """Times one size: as many repetitions as fit in about `seconds`, the same number on every rank."""
    array = lane.array(max(1, size_bytes // 4))
    for _ in range(WARM_UPS):
        lane.all_reduce(array)
    one = max(lane.slowest([_timed(lane, array)])[0], 1e-6)
    repetitions = min(max(int(seconds / one), REPETITIONS_MIN), REPETITIONS_MAX)
    times = sorted(lane.slowest([_timed(lane, array) for _ in range(repetitions)]))
    return {
        "bytes": 4 * max(1, size_bytes // 4),
        "repetitions": repetitions,
        "median_seconds": float(np.median(times)),
        "p90_seconds": float(np.quantile(times, 0.9)),
        "min_seconds": times[0],
    }


def _timed(lane: Lane, array: Any) -> float:
    array[...] = 1  # sums must not grow without bound
    lane.barrier()
    started = time.perf_counter()
    lane.all_reduce(array)
    return time.perf_counter() - started


def main(lane_name: str, results_file: str, seconds: str, *sizes: str) -> None:
    """Measures all sizes; rank 0 writes the results."""
    lane = LANES[lane_name]()
    results = [measure(lane, int(size), float(seconds)) for size in sizes]
    if lane.rank == 0:
        Path(results_file).write_text(json.dumps(results))
    lane.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
