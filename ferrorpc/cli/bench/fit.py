"""`ferrorpc bench --fit FILE`: measures what messages and folding cost here, and writes that as a cost table.

Ranks are real processes and talk over gRPC. They bring arrays to each other one round after the other (all_gather by ring) and
all at once (direct), and fold them (reduce_scatter, direct); and two of them send one there and back, while all processors
are free: how long a message takes, and how much of that is work, are told apart by what is under way beside it. Three figures
are fitted to all times, none below 0. The fourth, folding, would drown in them, and is measured by itself; how many
processors the ranks share is known.

Idea. What is fitted is what will predict (`collectives.predict`), by Gauss-Newton: a predicted time is a sum of the figures,
each as often as it stands on the longest way through the plan, so around any table it is linear; least squares of relative
errors on those numbers give the next table. The way may change with the table, so the best table met is kept.

Source. The figures are those of LogGP (Alexandrov et al., 1995): its latency, overhead and gap per byte; that ranks of one
host work on shared processors is added here.

Cost: some 15 s for each number of ranks.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from ferrorpc.cli.run import launch, make_plan
from ferrorpc.collectives.algorithms.algorithm import Algorithm, Cost
from ferrorpc.collectives.algorithms.plan import Buffer, Plan, Receive, Region, Send
from ferrorpc.collectives.call import Call, Operation, example
from ferrorpc.collectives.predict import predict
from ferrorpc.collectives.tuning import LANE, Tuning
from ferrorpc.config import size_bytes
from ferrorpc.errors import BackendUnavailableError
from ferrorpc.kernels.reduction import kernel
from ferrorpc.transports.credit import CHUNK_BYTES
from ferrorpc.types import DType, ReduceOp
from ferrorpc.wire.cost_table import Costs, CostTable

SIZES: Final = ("1KiB", "32KiB", "256KiB", "1MiB", "8MiB")
"""Bytes that each rank brings."""
MOVES: Final = (("all_gather", "ring"), ("all_gather", "direct"), ("reduce_scatter", "direct"))
SEND: Final = "send"
THERE_AND_BACK: Final = "there_and_back"
SECONDS: Final = 0.6
"""About how long each case is repeated."""
PASSES: Final = 3
"""How often the processes are started anew."""
ROUNDS: Final = 8
"""Tables that are tried; the error hardly falls after the third."""
FIRST: Final = (1e-4, 1e-4, 1e-9)
"""Alpha, message and beta that are tried first: of the order that machines have."""
STEPS: Final = (1e-7, 1e-7, 1e-13)
"""By which each figure is changed to see what a prediction makes of it: small against any that are met."""
FOLDED_BYTES: Final = 32 << 20
FOLDS: Final = 15
_WORKER: Final = "ferrorpc.cli.bench.fit_worker"


class Case(NamedTuple):
    """One collective of float32 by one algorithm, `nbytes` of each rank; or SEND by THERE_AND_BACK."""

    operation: str
    algorithm: str
    nbytes: int

    @property
    def entry(self) -> Algorithm:
        """Its place in the catalogue, or what stands for one."""
        if self.operation == SEND:
            return Algorithm(self.algorithm, _there_and_back, lambda size, nbytes: Cost(2, nbytes, filling_bytes=nbytes))
        return next(found for found in Tuning().algorithms_of(Operation(self.operation)) if found.name == self.algorithm)

    def call(self, ranks: int) -> Call:
        """As a rank makes it."""
        return example("all_gather" if self.operation == SEND else self.operation, self.nbytes, ranks)


def _there_and_back(call: Call, rank: int, size: int) -> Plan:
    """One array from rank 0 to rank 1, and from there back. It is followed as one chunk: the answer waits for the whole."""
    mine, theirs = Region(Buffer.IN), Region(Buffer.OUT)
    asks, answers = (Send(1, 0, mine), Receive(1, 0, theirs)), (Receive(0, 0, theirs), Send(0, 0, theirs))
    return Plan(THERE_AND_BACK, (asks, answers, ())[min(rank, 2)])


def measure(worlds: Mapping[int, Sequence[Case]], seconds: float = SECONDS, passes: int = PASSES) -> dict[int, list[float]]:
    """How long each case takes, in seconds: the median, by number of ranks.

    All cases of a world take turns, and worlds of new processes do: the same machine may be half as fast again a minute later.

    Args:
        seconds: how long each case is repeated, in all passes together.

    Raises:
        BackendUnavailableError: the processes failed; their words are on standard error.
    """
    found: dict[int, list[list[float]]] = {ranks: [] for ranks in worlds}
    for _ in range(passes):
        for ranks, cases in worlds.items():
            found[ranks].append(_measured(ranks, cases, seconds / passes))
    return {ranks: [statistics.median(each) for each in zip(*times, strict=True)] for ranks, times in found.items()}


def _measured(ranks: int, cases: Sequence[Case], seconds: float) -> list[float]:
    """The median time of each case in a new world of so many processes on this machine, in seconds."""
    with tempfile.TemporaryDirectory(prefix="ferrorpc-fit-") as directory:
        out = Path(directory) / "times.json"
        words = (":".join(map(str, case)) for case in cases)
        target = (_WORKER, str(out), str(seconds), *words)
        code = launch(make_plan(target=target, module=True, processes=str(ranks), standalone=True))
        if code:
            raise BackendUnavailableError(
                f"{ranks} processes could not be measured: exit code {code}", "read their errors above"
            )
        return [float(each) for each in json.loads(out.read_text())]


def folding_seconds_per_byte() -> float:
    """What folding one array into another takes here, both too large for caches."""
    fold = kernel(ReduceOp.SUM, DType.FLOAT32, 2).fold
    into, arrived = (np.ones(FOLDED_BYTES // DType.FLOAT32.itemsize, np.float32) for _ in range(2))
    times = []
    for _ in range(FOLDS):
        started = time.perf_counter()
        fold(into, arrived)
        times.append(time.perf_counter() - started)
    return statistics.median(times) / FOLDED_BYTES


def fit(ranks: int, cases: Sequence[Case], times: Sequence[float], gamma: float, processors: int | None) -> Costs:
    """The costs that explain these times best.

    Args:
        gamma: seconds a byte of folding.
        processors: what all ranks share; None where none is short.
    """
    measured = np.array(times, float)
    figures = best = np.array(FIRST)
    least = math.inf
    for _ in range(ROUNDS):
        predicted = np.array([_predicted(ranks, case, figures, gamma, processors) for case in cases])
        error = float(np.sum((predicted / measured - 1) ** 2))
        if error < least:
            best, least = figures, error
        rows = np.array([_slopes(ranks, case, figures, gamma, processors) for case in cases])
        folding = predicted - rows @ figures
        figures = least_squares(rows, measured - folding, measured)
    alpha, message, beta, gamma = (float(f"{figure:.4g}") for figure in (*best, gamma))
    return Costs(alpha, message, beta, gamma)


def _predicted(ranks: int, case: Case, figures: np.ndarray, gamma: float, processors: int | None) -> float:
    alpha, message, beta = map(float, figures)
    return predict(case.entry, case.call(ranks), ranks, Costs(alpha, message, beta, gamma, processors)).seconds


def _slopes(ranks: int, case: Case, figures: np.ndarray, gamma: float, processors: int | None) -> list[float]:
    """How often each figure is paid, by the simulator around this table."""
    base = _predicted(ranks, case, figures, gamma, processors)
    slopes = []
    for place, step in enumerate(STEPS):
        moved = figures.copy()
        moved[place] += step
        slopes.append((_predicted(ranks, case, moved, gamma, processors) - base) / step)
    return slopes


def least_squares(rows: np.ndarray, targets: np.ndarray, times: np.ndarray) -> np.ndarray:
    """x >= 0 that makes rows @ x near the targets, errors counted as shares of the times: a figure that would be negative is
    left out, and the others are fitted again."""
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
    """What a table is fitted to. What is sent there and back is one chunk at most."""
    moves = [Case(operation, algorithm, size_bytes(size)) for operation, algorithm in MOVES for size in SIZES]
    return moves + [Case(SEND, THERE_AND_BACK, nbytes) for nbytes in map(size_bytes, SIZES) if nbytes <= CHUNK_BYTES]


def table_of(times: Mapping[int, Sequence[float]]) -> CostTable:
    """The table of this host that explains the times of all `cases()`, by number of ranks."""
    processors, gamma = len(os.sched_getaffinity(0)), folding_seconds_per_byte()
    rows = {ranks: fit(ranks, cases(), found, gamma, processors) for ranks, found in times.items()}
    name = "fitted on one host, " + ", ".join(map(str, rows)) + " ranks"
    return CostTable(name, {LANE: rows}, processors)
