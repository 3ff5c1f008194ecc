"""Comparisons as tables. Every contender gets a line; one that was not measured gets a note with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ferrorpc.cli.bench.case import Case
from ferrorpc.cli.table import table


def describe(rows: Sequence[dict[str, Any]], peers: Sequence[str]) -> str:
    """One line for each case and contender.

    Args:
        rows: of `Comparison.run`.
        peers: labels that get a column "x LABEL": this peer's median divided by the contender's.

    The column "others" is the CPU use of all other processes meanwhile, as a percentage of one CPU.
    """
    shown = [peer for peer in peers if any("median_seconds" in row["results"].get(peer, {}) for row in rows)]
    numbers = ("median", "minimum", "p90", "CPU", "peak memory", "others", "blocks", *(f"x {peer}" for peer in shown))
    lines: list[tuple[str, ...]] = []
    notes: dict[str, list[str]] = {}
    for row in rows:
        title = Case(**row["case"]).title
        for label, result in row["results"].items():
            if "skipped" in result:
                notes.setdefault(f"not measured: {label}: {result['skipped']}", []).append(Case(**row["case"]).title)
                continue
            ratios = (ratio_text(ratio(row, label, peer)) for peer in shown)
            lines.append((title, label, *_figures(result, ratios)))
            title = ""
    return "\n".join(
        [table(("case", "system", *numbers), lines, right=frozenset(numbers)), *(_note(*each) for each in notes.items())]
    )


def ratio(row: dict[str, Any], label: str, peer: str, figure: str = "median_seconds") -> float | None:
    """The peer's median (or other figure) divided by this contender's; above 1 the contender wins. None if not measured."""
    ours, theirs = (row["results"].get(name, {}).get(figure) for name in (label, peer))
    return theirs / ours if ours and theirs else None


def time_text(seconds: float) -> str:
    """Three significant digits and a unit: "0.31 us", "12.4 ms"."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"


def _note(reason: str, titles: list[str]) -> str:
    return f"{reason} [{titles[0]}{f', and {len(titles) - 1} more' if len(titles) > 1 else ''}]"


def _figures(result: dict[str, Any], ratios: Any) -> tuple[str, ...]:
    times = (time_text(result[f"{name}_seconds"]) for name in ("median", "min", "p90", "cpu"))
    memory = f"{result['peak_bytes'] / (1 << 20):.1f} MiB"
    others = f"{100 * result['others_cpus']:.0f}%"
    return (*times, memory, others, f"{result['blocks']} of {result['repetitions']}", *ratios)


def ratio_text(value: float | None) -> str:
    """Two digits behind the point; "-" for what was not measured."""
    return "-" if value is None else f"{value:.2f}"
