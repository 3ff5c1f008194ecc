"""Plots all_reduce: time by size, and each system's speed relative to Gloo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from benchmarks import targets
from ferrorpc.cli.bench import machine, report
from ferrorpc.cli.bench.case import ALL_REDUCE, GLOO, Case, size_text

COLOURS = {"gloo": "#d95f02", "mpich": "#7570b3"}
OURS = ("#00695c", "#26a69a", "#5c6b73", "#9aa5ab")
WIDTH, PANEL_HEIGHT = 14.0, 4.4


def draw(results: dict[str, Any], path: Path) -> None:
    """Writes a PNG with a column for each number of ranks: times above, ratios to Gloo below.

    Bands in the lower panels are the targets for ordinary arrays, from "must" to "aim".
    """
    columns = {ranks: rows for ranks in (2, 4) if (rows := _rows(results["rows"], ranks))}
    if not columns:
        raise SystemExit("there is no all_reduce of float32 on 2 or 4 ranks to draw")
    figure, axes = plt.subplots(
        2, len(columns), figsize=(WIDTH, 2 * PANEL_HEIGHT), squeeze=False, sharex="col", layout="constrained"
    )
    labels = list(dict.fromkeys(label for rows in columns.values() for row in rows for label in row["results"]))
    colours = _colours(labels)
    for column, (ranks, rows) in enumerate(columns.items()):
        _times(axes[0][column], rows, colours)
        axes[0][column].set_title(f"all_reduce, float32 sum in place, {ranks} ranks")
        _ratios(axes[1][column], rows, colours, ranks, results["transports"][0])
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=len(labels), frameon=False)
    figure.supxlabel(machine.line(results["machine"], results["loads"]), fontsize=7, color="#666666", wrap=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _rows(rows: Sequence[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    found = [row for row in rows if _is_sum(Case(**row["case"]), ranks)]
    return sorted(found, key=lambda row: int(row["case"]["size_bytes"]))


def _is_sum(case: Case, ranks: int) -> bool:
    return (case.operation, case.ranks, case.dtype) == (ALL_REDUCE, ranks, "float32")


def _colours(labels: Sequence[str]) -> dict[str, str]:
    ours = iter(OURS)
    return {label: COLOURS.get(label) or next(ours, "#000000") for label in labels}


def _times(axes: Axes, rows: Sequence[dict[str, Any]], colours: dict[str, str]) -> None:
    for label, colour in colours.items():
        seen = [(row["case"]["size_bytes"], row["results"][label]) for row in rows if "median_seconds" in row["results"][label]]
        if not seen:
            continue
        sizes = [size for size, _ in seen]
        axes.fill_between(
            sizes, [r["min_seconds"] for _, r in seen], [r["p90_seconds"] for _, r in seen], color=colour, alpha=0.10, lw=0
        )
        axes.plot(sizes, [result["median_seconds"] for _, result in seen], "o-", color=colour, label=label, ms=4, lw=1.8)
    axes.set_yscale("log")
    axes.set_ylabel("time of one (median; shade: minimum to p90)")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: report.time_text(value)))
    _sizes(axes, rows)


def _ratios(axes: Axes, rows: Sequence[dict[str, Any]], colours: dict[str, str], ranks: int, fast: str) -> None:
    for label, colour in colours.items():
        points = [(row["case"]["size_bytes"], report.ratio(row, label, GLOO.name)) for row in rows]
        seen = [(size, ratio) for size, ratio in points if ratio is not None]
        if seen and label != GLOO.name:
            axes.plot(*zip(*seen, strict=True), "o-", color=colour, label=label, ms=4, lw=1.8)
    for target in targets.TARGETS:
        sizes = [case.size_bytes for case in target.cases if _is_sum(case, ranks)]
        if sizes and (target.role, target.peer) == (targets.FAST, GLOO.name):
            edges = min(sizes) / 1.6, max(sizes) * 1.6
            axes.fill_between(edges, target.must, target.aim, color=colours.get(fast, "#000000"), alpha=0.13, lw=0)
    axes.axhline(1.0, color=COLOURS[GLOO.name], lw=1.5)
    axes.annotate("Gloo", (1.0, 1.0), xycoords=("axes fraction", "data"), xytext=(-4, 3), textcoords="offset points",
                  ha="right", color=COLOURS[GLOO.name])  # fmt: skip
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("times as fast as Gloo (medians; band: must to aim)")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    _sizes(axes, rows)


def _sizes(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    sizes = [row["case"]["size_bytes"] for row in rows]
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(int(value))))
    axes.tick_params(axis="x", labelsize=8, labelbottom=True)
    axes.grid(which="major", color="#dddddd", lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
