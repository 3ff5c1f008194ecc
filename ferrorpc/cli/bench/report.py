"""Comparisons as tables. A contender that could not be measured is a line with the reason; one that loses is a line too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ferrorpc.cli.bench.case import Case
from ferrorpc.cli.table import table


def describe(rows: Sequence[dict[str, Any]], peers: Sequence[str]) -> str:
    """One line for each case and contender.

    Args:
        rows: of `Comparison.run`.
        peers: labels that get a column "x LABEL": how many times this peer's median each contender's fits into.
    """
    shown = [peer for peer in peers if any("median_seconds" in row["results"].get(peer, {}) for row in rows)]
    numbers = ("median", "minimum", "p90", "CPU", "peak memory", "blocks", *(f"x {peer}" for peer in shown))
    lines: list[tuple[str, ...]] = []
    for row in rows:
        title = Case(**row["case"]).title
        for label, result in row["results"].items():
            ratios = (_times(ratio(row, label, peer)) for peer in shown)
            lines.append((title, label, *(_figures(result, ratios) if "median_seconds" in result else ("-",) * len(numbers))))
            title = ""
    reasons = {label: result["skipped"] for row in rows for label, result in row["results"].items() if "skipped" in result}
    notes = [f"not measured: {label}: {reason}" for label, reason in reasons.items()]
    return "\n".join([table(("case", "system", *numbers), lines, right=frozenset(numbers)), *notes])


def ratio(row: dict[str, Any], label: str, peer: str) -> float | None:
    """The peer's median over this contender's, more is better; None where either was not measured."""
    ours, theirs = (row["results"].get(name, {}).get("median_seconds") for name in (label, peer))
    return theirs / ours if ours and theirs else None


def time_text(seconds: float) -> str:
    """Three digits and a unit: "0.31 us", "12.4 ms"."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"


def _figures(result: dict[str, Any], ratios: Any) -> tuple[str, ...]:
    times = (time_text(result[f"{name}_seconds"]) for name in ("median", "min", "p90", "cpu"))
    memory = f"{result['peak_bytes'] / (1 << 20):.1f} MiB"
    return (*times, memory, f"{result['blocks']} of {result['repetitions']}", *ratios)


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
