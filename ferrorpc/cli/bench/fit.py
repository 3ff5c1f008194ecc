"""`ferrorpc bench --fit FILE`: measures what messages and folding cost here, and writes that as a cost table.

Ranks are real processes and talk over gRPC. They bring arrays to each other one round after the other (all_gather by ring) and
all at once (direct), and fold them (reduce_scatter, direct). Four figures are fitted to all times, none below 0.

Idea. What is fitted is what will predict (`collectives.predict`), by Gauss-Newton: a predicted time is a sum of the figures,
each as often as it stands on the longest way through the plan, so around any table it is linear; least squares of relative
errors on those numbers give the next table. The first comes from the closed forms of the catalogue. The way may change with
the table, so the best table met is kept.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from ferrorpc.cli.run import launch, make_plan
from ferrorpc.collectives.algorithms.entry import Entry
from ferrorpc.collectives.basis import LANE, Basis
from ferrorpc.collectives.call import Operation, example
from ferrorpc.collectives.predict import predict
from ferrorpc.config import size_bytes
from ferrorpc.errors import BackendUnavailableError
from ferrorpc.wire.cost_table import Costs, CostTable

SIZES: Final = ("1KiB", "32KiB", "256KiB", "1MiB", "8MiB")
"""Bytes that each rank brings."""
MOVES: Final = (("all_gather", "ring"), ("all_gather", "direct"), ("reduce_scatter", "direct"))
SECONDS: Final = 0.5
"""About how long each case is repeated."""
ROUNDS: Final = 6
"""Tables that are tried; the error hardly falls after the third."""
STEPS: Final = (1e-7, 1e-7, 1e-13, 1e-13)
"""By which each figure is changed to see what a prediction makes of it: small against any that are met."""
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
    measured = np.array(times, float)
    figures = least_squares(np.array([_closed_form(ranks, case) for case in cases], float), measured)
    best, least = figures, math.inf
    for _ in range(ROUNDS):
        predicted = np.array([_predicted(ranks, case, figures) for case in cases])
        error = float(np.sum((predicted / measured - 1) ** 2))
        if error < least:
            best, least = figures, error
        figures = least_squares(np.array([_slopes(ranks, case, figures) for case in cases]), measured)
    return Costs(*(float(f"{figure:.4g}") for figure in best))


def _closed_form(ranks: int, case: Case) -> tuple[float, ...]:
    """How often each figure is paid, by the catalogue."""
    cost = case.entry.cost(ranks, case.nbytes)
    return cost.rounds, max(cost.rounds, cost.messages), cost.sent_bytes + cost.filling_bytes, cost.folded_bytes


def _predicted(ranks: int, case: Case, figures: np.ndarray) -> float:
    return predict(case.entry, example(case.operation, case.nbytes, ranks), ranks, Costs(*map(float, figures))).seconds


def _slopes(ranks: int, case: Case, figures: np.ndarray) -> list[float]:
    """How often each figure is paid, by the simulator around this table."""
    base = _predicted(ranks, case, figures)
    slopes = []
    for place, step in enumerate(STEPS):
        moved = figures.copy()
        moved[place] += step
        slopes.append((_predicted(ranks, case, moved) - base) / step)
    return slopes


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
    name = "fitted on one host, " + ", ".join(map(str, ranks)) + " ranks"
    return CostTable(name, {LANE: rows}, len(os.sched_getaffinity(0)))
