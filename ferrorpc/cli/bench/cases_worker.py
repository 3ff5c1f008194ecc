"""One rank of what times collectives by algorithm and size, started through the launcher (`fit.measure`).

python -m ferrorpc.cli.bench.cases_worker RESULTS_FILE SECONDS OPERATION:ALGORITHM:BYTES [...]
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
from ferrorpc.group import ProcessGroup

WARM_UPS: Final = 2
REPETITIONS_MIN: Final = 3
REPETITIONS_MAX: Final = 100
BURST: Final = 4
"""Operations one after the other in a repetition: how unevenly ranks leave the barrier before it counts for little then."""


def main(results_file: str, seconds: str, *cases: str) -> None:
    """Times all cases; rank 0 writes the medians of the slowest rank's time for one of a burst of operations."""
    with init_process_group(backend="grpc", transport="grpc") as group:
        found = [_timed(group, case, float(seconds)) for case in cases]
        if group.rank == 0:
            Path(results_file).write_text(json.dumps(found))


def _timed(group: ProcessGroup, case: str, seconds: float) -> float:
    operation, algorithm, nbytes = case.split(":")
    run = _operation(group, operation, algorithm, int(nbytes) // 4)
    for _ in range(WARM_UPS):
        once = _slowest(group, run, 1)[0]
    repetitions = min(max(int(seconds / max(BURST * once, 1e-6)), REPETITIONS_MIN), REPETITIONS_MAX)
    return statistics.median(_slowest(group, run, repetitions))


def _slowest(group: ProcessGroup, run: Callable[[], Any], repetitions: int) -> list[float]:
    times = []
    for _ in range(repetitions):
        group.barrier()
        started = time.perf_counter()
        for _ in range(BURST):
            run()
        times.append((time.perf_counter() - started) / BURST)
    return [float(each) for each in group.all_reduce(np.array(times), op="max")]


def _operation(group: ProcessGroup, operation: str, algorithm: str, count: int) -> Callable[[], Any]:
    """The call, with everything it needs allocated before."""
    x = np.zeros(count, np.float32)
    if operation == "all_reduce":
        return lambda: group.all_reduce(x, out=x, algorithm=algorithm)
    if operation == "all_gather":
        outputs = [np.empty_like(x) for _ in range(group.size)]
        return lambda: group.all_gather(x, out=outputs, algorithm=algorithm)
    parts = np.array_split(x, group.size)
    result = np.empty_like(parts[group.rank])
    return lambda: group.reduce_scatter(parts, out=result, algorithm=algorithm)


if __name__ == "__main__":
    main(*sys.argv[1:])
