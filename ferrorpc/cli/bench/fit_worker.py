"""One rank of the measurement behind `ferrorpc bench --fit`, started through the launcher (`fit.measure`).

python -m ferrorpc.cli.bench.fit_worker RESULTS_FILE SECONDS OPERATION:ALGORITHM:BYTES [...]

All cases take turns repeatedly, so that a machine that is slower for some seconds affects all of them.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from ferrorpc.bootstrap.process_group import init_process_group
from ferrorpc.cli.bench.case import SEND
from ferrorpc.group import ProcessGroup

WARM_UPS: Final = 2
ROUNDS_MIN: Final = 3
ROUNDS_MAX: Final = 100
BURST_SECONDS: Final = 0.05
"""Length of a burst of operations. Long enough for an uneven start after the barrier to matter little."""
BURST_MAX: Final = 32


def main(results_file: str, seconds: str, *cases: str) -> None:
    """Times all cases in turns. Rank 0 writes, per case, the median of the slowest rank's time per operation."""
    with init_process_group(backend="grpc", transport="grpc") as group:
        runs = [_operation(group, case) for case in cases]
        for _ in range(WARM_UPS):
            seconds_each = _slowest(group, [_timed(group, run, 1) for run in runs])
        bursts = [min(max(round(BURST_SECONDS / each), 1), BURST_MAX) for each in seconds_each]
        round_seconds = sum(each * burst for each, burst in zip(seconds_each, bursts, strict=True))
        rounds = min(max(int(float(seconds) * len(runs) / round_seconds), ROUNDS_MIN), ROUNDS_MAX)
        times = [
            _slowest(group, [_timed(group, run, burst) for run, burst in zip(runs, bursts, strict=True)]) for _ in range(rounds)
        ]
        if group.rank == 0:
            Path(results_file).write_text(json.dumps([statistics.median(case) for case in zip(*times, strict=True)]))


def _timed(group: ProcessGroup, run: Callable[[], Any], burst: int) -> float:
    group.barrier()
    started = time.perf_counter()
    for _ in range(burst):
        run()
    return (time.perf_counter() - started) / burst


def _slowest(group: ProcessGroup, times: list[float]) -> list[float]:
    return [float(each) for each in group.all_reduce(np.array(times), op="max")]


def _operation(group: ProcessGroup, case: str) -> Callable[[], Any]:
    """The operation to time, with its arrays already allocated."""
    operation, algorithm, nbytes = case.split(":")
    x = np.zeros(int(nbytes) // 4, np.float32)
    if operation == SEND:
        return _round_trip(group, x)
    if operation == "all_reduce":
        return lambda: group.all_reduce(x, out=x, algorithm=algorithm)
    if operation == "all_gather":
        outputs = [np.empty_like(x) for _ in range(group.size)]
        return lambda: group.all_gather(x, out=outputs, algorithm=algorithm)
    parts = np.array_split(x, group.size)
    result = np.empty_like(parts[group.rank])
    return lambda: group.reduce_scatter(parts, out=result, algorithm=algorithm)


def _round_trip(group: ProcessGroup, x: np.ndarray) -> Callable[[], Any]:
    """Rank 0 sends to rank 1, which sends the array back; the others do nothing."""
    y = np.empty_like(x)

    def request() -> None:
        group.send(x, 1)
        group.recv(1, out=y)

    def reply() -> None:
        group.recv(0, out=y)
        group.send(y, 0)

    return (request, reply, lambda: None)[min(group.rank, 2)]


if __name__ == "__main__":
    main(*sys.argv[1:])
