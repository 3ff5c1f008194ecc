"""`ferrorpc bench --fit FILE`: measures the cost of messages and reductions here, and writes it as a cost table.

Ranks are real processes that communicate over gRPC. The cases are all_gather by ring (messages one after the other) and direct
(all at once), reduce_scatter (direct), and a round trip between two ranks while all other CPUs are idle. The mix is needed to
separate a message's latency from the CPU time it costs. Three parameters are fitted to all times, none below 0. The fourth,
the cost of a reduction, is too small to be fitted beside them and is measured separately. The number of CPUs that the ranks
share is known.

Idea. The fit uses the model that later predicts (`collectives.predict`), by Gauss-Newton. A predicted time is a sum of the
parameters, each multiplied by how often it occurs on the critical path through the plan, so near any given table it is
linear. Least squares of relative errors on these counts give the next table. The critical path may change with the table, so
the best table seen is kept.

Source. The parameters are those of LogGP (Alexandrov et al., 1995): latency, overhead and gap per byte. Sharing of CPUs by the
ranks of one host is added here.

Cost: about 15 s for each number of ranks.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from ferrorpc.cli.bench.case import ROUND_TRIP, SEND
from ferrorpc.cli.run import run_alone
from ferrorpc.collectives.algorithms.algorithm import Algorithm, Cost
from ferrorpc.collectives.algorithms.plan import Buffer, Plan, Receive, Region, Send
from ferrorpc.collectives.call import Call, Operation, example
from ferrorpc.collectives.predict import predict
from ferrorpc.collectives.tuning import Tuning
from ferrorpc.config import size_bytes
from ferrorpc.errors import BackendUnavailableError
from ferrorpc.exit_codes import EXIT_INTERRUPTED
from ferrorpc.kernels.reduction import kernel
from ferrorpc.transports.credit import CHUNK_BYTES
from ferrorpc.types import DType, ReduceOp
from ferrorpc.wire.cost_table import Costs, CostTable

SIZES: Final = ("1KiB", "32KiB", "256KiB", "1MiB", "8MiB")
"""Bytes that each rank contributes."""
COLLECTIVES: Final = (("all_gather", "ring"), ("all_gather", "direct"), ("reduce_scatter", "direct"))
SECONDS: Final = 0.6
"""For about this long each case is repeated."""
PASSES: Final = 3
"""How often the processes are restarted."""
ITERATIONS: Final = 8
"""Of Gauss-Newton; the error hardly decreases after the third."""
INITIAL: Final = (1e-4, 1e-4, 1e-9)
"""Initial alpha, message and beta: typical orders of magnitude."""
STEPS: Final = (1e-7, 1e-7, 1e-13)
"""Step of each parameter for the numerical derivative: small compared with any realistic value."""
FOLDED_BYTES: Final = 32 << 20
FOLDS: Final = 15
_STOPPED: Final = (128 + signal.SIGTERM, 128 + signal.SIGHUP)
"""Exit codes of a launcher that was stopped. It took the signal of this process, which ends as by it."""
_WORKER: Final = "ferrorpc.cli.bench.fit_worker"


class Case(NamedTuple):
    """One collective of float32 by one algorithm, with `nbytes` from each rank; or SEND by ROUND_TRIP."""

    operation: str
    algorithm: str
    nbytes: int

    @property
    def entry(self) -> Algorithm:
        """Its entry in the catalogue of algorithms, or one made for the round trip."""
        if self.operation == SEND:
            return Algorithm(self.algorithm, _round_trip, lambda size, nbytes: Cost(2, nbytes, filling_bytes=nbytes))
        return next(found for found in Tuning().algorithms_of(Operation(self.operation)) if found.name == self.algorithm)

    def call(self, ranks: int) -> Call:
        """The call that a rank makes."""
        return example("all_gather" if self.operation == SEND else self.operation, self.nbytes, ranks)


def _round_trip(call: Call, rank: int, size: int) -> Plan:
    """One array from rank 0 to rank 1 and back. Simulated as one chunk: the reply is sent after the whole array has arrived."""
    mine, theirs = Region(Buffer.IN), Region(Buffer.OUT)
    request, reply = (Send(1, 0, mine), Receive(1, 0, theirs)), (Receive(0, 0, theirs), Send(0, 0, theirs))
    return Plan((request, reply, ())[min(rank, 2)])


def measure(worlds: Mapping[int, Sequence[Case]], seconds: float = SECONDS, passes: int = PASSES) -> dict[int, list[float]]:
    """The median time of each case in seconds, by number of ranks.

    The cases of a world take turns, and so do the worlds, each time in new processes: a machine's speed may change by half
    within a minute.

    Args:
        seconds: how long each case is repeated, in all passes together.

    Raises:
        BackendUnavailableError: the processes failed; their errors are on standard error.
    """
    found: dict[int, list[list[float]]] = {ranks: [] for ranks in worlds}
    for _ in range(passes):
        for ranks, cases in worlds.items():
            found[ranks].append(_measured(ranks, cases, seconds / passes))
    return {ranks: [statistics.median(each) for each in zip(*times, strict=True)] for ranks, times in found.items()}


def _measured(ranks: int, cases: Sequence[Case], seconds: float) -> list[float]:
    """The median time of each case in seconds, in a new world of `ranks` processes on this machine."""
    with tempfile.TemporaryDirectory(prefix="ferrorpc-fit-") as directory:
        out = Path(directory) / "times.json"
        arguments = (":".join(map(str, case)) for case in cases)
        target = (sys.executable, "-P", "-m", _WORKER, str(out), str(seconds), *arguments)
        code = run_alone(target, ranks, no_python=True)
        if code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        if code in _STOPPED:
            raise SystemExit(code)
        if code:
            raise BackendUnavailableError(
                f"{ranks} processes could not be measured: exit code {code}", "read their errors above"
            )
        return [float(each) for each in json.loads(out.read_text())]


def folding_seconds_per_byte() -> float:
    """The cost of adding one array to another here, both too large for the caches."""
    fold = kernel(ReduceOp.SUM, DType.FLOAT32, 2).fold
    into, arrived = (np.ones(FOLDED_BYTES // DType.FLOAT32.itemsize, np.float32) for _ in range(2))
    times = []
    for _ in range(FOLDS):
        started = time.perf_counter()
        fold(into, arrived)
        times.append(time.perf_counter() - started)
    return statistics.median(times) / FOLDED_BYTES


def fit(ranks: int, cases: Sequence[Case], times: Sequence[float], gamma: float, processors: int | None) -> Costs:
    """The costs that fit these times best.

    Args:
        gamma: seconds per byte of a reduction.
        processors: CPUs that all ranks share; None for unlimited.
    """

    def predicted(parameters: np.ndarray) -> np.ndarray:
        alpha, message, beta = map(float, parameters)
        costs = Costs(alpha, message, beta, gamma, processors)
        return np.array([predict(case.entry, case.call(ranks), ranks, costs).seconds for case in cases])

    measured = np.array(times, float)
    parameters = best = np.array(INITIAL)
    least = math.inf
    for _ in range(ITERATIONS):
        expected = predicted(parameters)
        error = float(np.sum((expected / measured - 1) ** 2))
        if error < least:
            best, least = parameters, error
        slopes = np.column_stack([(predicted(parameters + step) - expected) / step.sum() for step in np.diag(STEPS)])
        parameters = least_squares(slopes, measured - (expected - slopes @ parameters), measured)
    alpha, message, beta, folding = (float(f"{value:.4g}") for value in (*best, gamma))
    return Costs(alpha, message, beta, folding)


def least_squares(rows: np.ndarray, targets: np.ndarray, times: np.ndarray) -> np.ndarray:
    """The x >= 0 that minimises rows @ x - targets, with errors relative to the times.

    A parameter that would be negative is set to 0, and the others are fitted again.
    """
    scaled = rows / times[:, None]
    kept = [column for column in range(rows.shape[1]) if rows[:, column].any()]
    solution = np.zeros(rows.shape[1])
    while kept:
        units = np.abs(scaled[:, kept]).max(axis=0)
        found = np.linalg.lstsq(scaled[:, kept] / units, targets / times, rcond=None)[0] / units
        if (found >= 0).all():
            solution[kept] = found
            break
        kept.remove(kept[int(np.argmin(found * units))])
    return solution


def cases() -> list[Case]:
    """The cases that a table is fitted to. Round trips are of one chunk at most."""
    collectives = [Case(operation, algorithm, size_bytes(size)) for operation, algorithm in COLLECTIVES for size in SIZES]
    return collectives + [Case(SEND, ROUND_TRIP, nbytes) for nbytes in map(size_bytes, SIZES) if nbytes <= CHUNK_BYTES]


def table_of(times: Mapping[int, Sequence[float]]) -> CostTable:
    """The table of this host that fits the times of all `cases()`, by number of ranks."""
    processors, gamma = len(os.sched_getaffinity(0)), folding_seconds_per_byte()
    rows = {ranks: fit(ranks, cases(), found, gamma, processors) for ranks, found in times.items()}
    name = "fitted on one host, " + ", ".join(map(str, rows)) + " ranks"
    return CostTable(name, rows, processors)
