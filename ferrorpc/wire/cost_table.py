"""The cost table: what messages and reductions cost, as JSON, written by hand or by `ferrorpc bench --fit`.

    {"version": 2, "name": "four hosts, 10 Gbit/s",
     "lanes": {"grpc": [{"ranks": 4, "alpha_seconds": 9e-5, "message_seconds": 2e-5,
                         "beta_seconds_per_byte": 6.5e-10, "gamma_seconds_per_byte": 1.5e-10}]}}

There is a row for every number of ranks that was measured. For other numbers the row of the nearest one (by ratio) is used. A
table for one host says how many "processors" its ranks share. Its figures are then processor times, and how long a rank waits
for a processor follows from what all ranks do. Without "processors" every rank has its own links. The coordinator publishes one
table for each generation, so that all ranks select algorithms by the same figures.

Version 1, which has no "version", is read too, but its "processors" belonged to another model and are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ferrorpc.errors import ConfigError

LANE: Final = "grpc"
"""The one lane of a table. The in-process lane simulates it; in shared memory sizes decide (collectives.arena.select)."""
VERSION: Final = 2
TABLE_BYTES_MAX: Final = 16 << 10
RANKS_MAX: Final = 1 << 20
_FIGURES: Final = ("alpha_seconds", "message_seconds", "beta_seconds_per_byte", "gamma_seconds_per_byte")
_FIGURE_MAX: Final = 1e3
"""In seconds; larger figures are probably in wrong units."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs on one lane.

    Attributes:
        alpha_seconds: latency of a message in which no processor works on it: network and wake-ups.
        message_seconds: how long each message occupies its sender, and likewise its receiver.
        beta_seconds_per_byte: transfer time of a message on the link of its sender and on that of its receiver.
        gamma_seconds_per_byte: of reducing one array into another.
        processors: number that all ranks share, where each message and reduction occupies one; None where there are enough.
    """

    alpha_seconds: float
    message_seconds: float
    beta_seconds_per_byte: float
    gamma_seconds_per_byte: float
    processors: int | None = None

    def figures(self) -> dict[str, float]:
        """The measured figures by name."""
        return {name: getattr(self, name) for name in _FIGURES}

    def __str__(self) -> str:
        shared = "" if self.processors is None else f", {self.processors} processors for all"
        return (
            f"{self.alpha_seconds * 1e6:.3g} us a round, {self.message_seconds * 1e6:.3g} us a message, "
            f"{_rate(self.beta_seconds_per_byte)} a link, {_rate(self.gamma_seconds_per_byte)} folding{shared}"
        )


@dataclass(frozen=True, slots=True)
class CostTable:
    """Costs by number of ranks.

    Attributes:
        name: a description of where it was measured.
        rows: number of ranks -> costs; at least one.
        processors: number that all ranks share; None where there are enough.
    """

    name: str
    rows: Mapping[int, Costs]
    processors: int | None = None

    def costs(self, ranks: int) -> Costs:
        """The costs in a group of so many ranks, measured with that or the nearest number of ranks."""
        nearest = min(self.rows, key=lambda measured: (abs(math.log(measured / max(ranks, 1))), measured))
        return replace(self.rows[nearest], processors=self.processors)

    def text(self) -> str:
        """The table as JSON, as `parse` reads it."""
        rows = [{"ranks": ranks, **costs.figures()} for ranks, costs in sorted(self.rows.items())]
        shared = {} if self.processors is None else {"processors": self.processors}
        return json.dumps({"version": VERSION, "name": self.name, **shared, "lanes": {LANE: rows}}, indent=1) + "\n"


def read(path: str) -> CostTable:
    """Reads a table from a file.

    Raises:
        ConfigError: the file cannot be read, or is no valid table.
    """
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        hint = "check --cost-table and FERRORPC_COST_TABLE; `ferrorpc bench --fit FILE` writes such a file"
        raise ConfigError(f"the cost table {path} cannot be used: {error}", hint=hint) from None


def parse(text: str) -> CostTable:
    """Parses a table.

    Raises:
        ValueError: the text is no valid table; the message says where and what was expected.
    """
    if len(text.encode()) > TABLE_BYTES_MAX:
        raise ValueError(f"a cost table has at most {TABLE_BYTES_MAX} bytes, this has {len(text.encode())}")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    known = isinstance(data, dict) and {"name", "lanes"} <= set(data) <= {"version", "name", "lanes", "processors"}
    _expect(known, "expected an object with version, name and lanes, and perhaps processors")
    version = data.get("version", 1)
    _expect(type(version) is int and 1 <= version <= VERSION, f"version is {version!r}, this is read up to {VERSION}")
    outdated = version == 1 and "processors" in data
    _expect(not outdated, "processors of version 1 stood for another model: measure again with `ferrorpc bench --fit`")
    _expect(isinstance(data["name"], str), "name is no text")
    processors = data.get("processors")
    sound = processors is None or (type(processors) is int and 1 <= processors <= RANKS_MAX)
    _expect(sound, f"processors is {processors!r}, not a number of processors")
    lanes = data["lanes"]
    known = isinstance(lanes, dict) and set(lanes) == {LANE}
    _expect(known, f"lanes must be an object with exactly: {LANE}")
    return CostTable(data["name"], _rows(lanes[LANE]), processors)


def _rows(rows: Any) -> dict[int, Costs]:
    _expect(isinstance(rows, list) and bool(rows), f"{LANE} must be a list of one row or more")
    found: dict[int, Costs] = {}
    for place, row in enumerate(rows):
        where = f"row {place} of {LANE}"
        _expect(isinstance(row, dict) and set(row) == {"ranks", *_FIGURES}, f"{where} must have ranks, {', '.join(_FIGURES)}")
        ranks = row["ranks"]
        _expect(type(ranks) is int and 1 <= ranks <= RANKS_MAX, f"{where}: ranks is {ranks!r}, not a number of ranks")
        _expect(ranks not in found, f"{where}: {ranks} ranks have a row already")
        for name in _FIGURES:
            value = row[name]
            sound = type(value) in (int, float) and 0 <= value <= _FIGURE_MAX
            _expect(sound, f"{where}: {name} is {value!r}, not a number from 0 to {_FIGURE_MAX:g}")
        alpha, message, beta, gamma = (float(row[name]) for name in _FIGURES)
        found[ranks] = Costs(alpha, message, beta, gamma)
    return found


def _expect(sound: bool, otherwise: str) -> None:
    if not sound:
        raise ValueError(otherwise)


def _rate(seconds_per_byte: float) -> str:
    return f"{1e-9 / seconds_per_byte:.3g} GB/s" if seconds_per_byte else "unlimited bytes"
