"""`ferrorpc bench --fit FILE`: measures what messages and folding cost here, and writes that as a cost table.

Ranks are real processes and talk over gRPC. They bring arrays to each other one round after the other (all_gather by ring) and
all at once (direct), and fold them (reduce_scatter, direct). What each of these does in rounds, messages, bytes and folded
bytes is known from the catalogue, so four figures are fitted to all times by least squares of relative errors, none below 0.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from ferrorpc.cli.run import launch, make_plan
from ferrorpc.collectives.algorithms.entry import Entry
from ferrorpc.collectives.basis import LANE, Basis
from ferrorpc.collectives.call import Operation
from ferrorpc.config import size_bytes
from ferrorpc.errors import BackendUnavailableError
from ferrorpc.wire.cost_table import Costs, CostTable

SIZES: Final = ("1KiB", "32KiB", "256KiB", "1MiB", "8MiB")
"""Bytes that each rank brings."""
MOVES: Final = (("all_gather", "ring"), ("all_gather", "direct"), ("reduce_scatter", "direct"))
SECONDS: Final = 0.5
"""About how long each case is repeated."""
_WORKER: Final = "ferrorpc.cli.bench.cases_worker"


class Case(NamedTuple):
    """One collective of float32 by one algorithm; `nbytes` of each rank."""

    operation: str
    algorithm: str
    nbytes: int

    @property
    def entry(self) -> Entry:
        """Its place in the catalogue."""
        return next(found for found in Basis().entries(Operation(self.operation)) if found.name == self.algorithm)


def measure(ranks: int, cases: Sequence[Case], seconds: float = SECONDS) -> list[float]:
    """The median time of each case in a new world of so many processes on this machine, in seconds.

    Raises:
        BackendUnavailableError: the processes failed; their words are on standard error.
    """
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


def fit(ranks: int, cases: Sequence[Case], times: Sequence[float]) -> Costs:
    """The costs that explain these times best."""
    rows = []
    for case in cases:
        cost = case.entry.cost(ranks, case.nbytes)
        messages, through_links = max(cost.rounds, cost.messages), cost.sent_bytes + cost.filling_bytes
        rows.append((cost.rounds, messages, through_links, cost.folded_bytes))
    figures = least_squares(np.array(rows, float), np.array(times, float))
    return Costs(*(float(f"{figure:.4g}") for figure in figures))


def least_squares(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """x >= 0 that makes rows @ x near times, by relative error: a figure that would be negative is left out, and the others
    are fitted again."""
    scaled = rows / times[:, None]
    kept = [column for column in range(rows.shape[1]) if rows[:, column].any()]
    solution = np.zeros(rows.shape[1])
    while kept:
        units = np.abs(scaled[:, kept]).max(axis=0)
        found = np.linalg.lstsq(scaled[:, kept] / units, np.ones(len(times)), rcond=None)[0] / units
        if (found >= 0).all():
            solution[kept] = found
            break
        kept.remove(kept[int(np.argmin(found * units))])
    return solution


def table_of(ranks: Sequence[int], seconds: float = SECONDS) -> CostTable:
    """Measures at each number of ranks."""
    cases = [Case(operation, algorithm, size_bytes(size)) for operation, algorithm in MOVES for size in SIZES]
    rows = {each: fit(each, cases, measure(each, cases, seconds)) for each in ranks}
    return CostTable("fitted on one host, " + ", ".join(map(str, ranks)) + " ranks", {LANE: rows})
