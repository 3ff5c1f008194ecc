"""The cost table: what messages and folding cost on each lane, as JSON that people and `ferrorpc bench --fit` write.

    {"name": "four hosts, 10 Gbit/s",
     "lanes": {"grpc": [{"ranks": 4, "alpha_seconds": 9e-5, "message_seconds": 2e-5,
                         "beta_seconds_per_byte": 6.5e-10, "gamma_seconds_per_byte": 1.5e-10}]}}

A lane has a row for every number of ranks that was measured; for other numbers the row of the nearest one (by ratio) holds. A
table that was measured on one host may say how many "processors" its ranks shared. Then more ranks than were measured are
taken to share them too, and everything takes as much longer as each has less of them.
The coordinator publishes one table for each generation, so that all ranks choose by the same figures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

LANES: Final = ("grpc",)
"""Lanes that run plans. In shared memory sizes decide, not a table (collectives.arena.select)."""
TABLE_BYTES_MAX: Final = 16 << 10
RANKS_MAX: Final = 1 << 20
_FIGURES: Final = ("alpha_seconds", "message_seconds", "beta_seconds_per_byte", "gamma_seconds_per_byte")
_FIGURE_MAX: Final = 1e3
"""Seconds; more is a mistake of units."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What things cost on one lane.

    Attributes:
        alpha_seconds: from a sender's call to its receiver's wake, for a message of no bytes.
        message_seconds: how long each message keeps its sender from the next.
        beta_seconds_per_byte: of a message, on the link of its sender and on that of its receiver.
        gamma_seconds_per_byte: of folding one array into another.
    """

    alpha_seconds: float
    message_seconds: float
    beta_seconds_per_byte: float
    gamma_seconds_per_byte: float

    def times(self, factor: float) -> Costs:
        """All of them multiplied."""
        return Costs(*(getattr(self, name) * factor for name in _FIGURES)) if factor != 1 else self

    def __str__(self) -> str:
        return (
            f"{self.alpha_seconds * 1e6:.3g} us a round, {self.message_seconds * 1e6:.3g} us a message, "
            f"{_rate(self.beta_seconds_per_byte)} a link, {_rate(self.gamma_seconds_per_byte)} folding"
        )


@dataclass(frozen=True, slots=True)
class CostTable:
    """Costs by lane and number of ranks.

    Attributes:
        name: whose figures these are, in words.
        lanes: lane -> number of ranks -> costs; each lane has one row or more.
        processors: what all ranks shared when they were measured; None where each had its own.
    """

    name: str
    lanes: Mapping[str, Mapping[int, Costs]]
    processors: int | None = None

    def costs(self, lane: str, ranks: int) -> Costs:
        """The costs of a lane in a group of so many ranks: measured there, or derived from the nearest number of ranks."""
        rows = self.lanes[lane]
        nearest = min(rows, key=lambda measured: (abs(math.log(measured / max(ranks, 1))), measured))
        return rows[nearest].times(self._crowding(ranks) / self._crowding(nearest))

    def _crowding(self, ranks: int) -> float:
        """Ranks a processor, where there are more of them."""
        return 1.0 if self.processors is None else max(1.0, ranks / self.processors)

    def text(self) -> str:
        """The table as `parse` reads it."""
        lanes = {
            lane: [{"ranks": ranks, **asdict(costs)} for ranks, costs in sorted(rows.items())]
            for lane, rows in self.lanes.items()
        }
        shared = {} if self.processors is None else {"processors": self.processors}
        return json.dumps({"name": self.name, **shared, "lanes": lanes}, indent=1) + "\n"


def parse(text: str) -> CostTable:
    """Reads a table.

    Raises:
        ValueError: it is none; the message says where and what was expected.
    """
    if len(text.encode()) > TABLE_BYTES_MAX:
        raise ValueError(f"a cost table has at most {TABLE_BYTES_MAX} bytes, this has {len(text.encode())}")
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    known = isinstance(data, dict) and {"name", "lanes"} <= set(data) <= {"name", "lanes", "processors"}
    _expect(known, "expected an object with name and lanes, and perhaps processors")
    _expect(isinstance(data["name"], str), "name is no text")
    processors = data.get("processors")
    sound = processors is None or (type(processors) is int and 1 <= processors <= RANKS_MAX)
    _expect(sound, f"processors is {processors!r}, not a number of processors")
    lanes = data["lanes"]
    known = isinstance(lanes, dict) and set(lanes) == set(LANES)
    _expect(known, f"lanes must be an object with exactly: {', '.join(LANES)}")
    return CostTable(data["name"], {lane: _rows(lane, rows) for lane, rows in lanes.items()}, processors)


def _rows(lane: str, rows: Any) -> dict[int, Costs]:
    _expect(isinstance(rows, list) and bool(rows), f"{lane} must be a list of one row or more")
    found: dict[int, Costs] = {}
    for place, row in enumerate(rows):
        where = f"row {place} of {lane}"
        _expect(isinstance(row, dict) and set(row) == {"ranks", *_FIGURES}, f"{where} must have ranks, {', '.join(_FIGURES)}")
        ranks = row["ranks"]
        _expect(type(ranks) is int and 1 <= ranks <= RANKS_MAX, f"{where}: ranks is {ranks!r}, not a number of ranks")
        _expect(ranks not in found, f"{where}: {ranks} ranks have a row already")
        for name in _FIGURES:
            value = row[name]
            sound = type(value) in (int, float) and 0 <= value <= _FIGURE_MAX
            _expect(sound, f"{where}: {name} is {value!r}, not a number from 0 to {_FIGURE_MAX:g}")
        found[ranks] = Costs(*(float(row[name]) for name in _FIGURES))
    return found


def _expect(sound: bool, otherwise: str) -> None:
    if not sound:
        raise ValueError(otherwise)


def _rate(seconds_per_byte: float) -> str:
    return f"{1e-9 / seconds_per_byte:.3g} GB/s" if seconds_per_byte else "unlimited bytes"
