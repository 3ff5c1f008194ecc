"""A span: a task as it ran."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """One task as it ran, on `lane` from `start` to `stop` in time units. The other fields are those of `program.Task`."""

    name: str
    lane: int
    start: float
    stop: float
    kind: str = ""
    text: str = ""
    shade: int = 0
