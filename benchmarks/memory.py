"""Measures a group's peak memory, its growth over many operations, and its processor use while idle.

    python -m benchmarks.memory [--transports shared_memory,grpc] [--json FILE]

Every figure is from fresh processes, of the rank with the highest value. Shared pages count once, divided among the processes
that map them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ferrorpc.cli.bench import machine
from ferrorpc.cli.bench.case import ALL_REDUCE, ORDINARY, REGISTERED, Case, Contender, ferrorpc_system, size_text
from ferrorpc.cli.bench.rank_processes import RankProcesses
from ferrorpc.cli.table import table
from ferrorpc.errors import FerroError

MIB = 1 << 20
PEAK_SIZES = (16 * MIB, 64 * MIB)
PEAK_REPETITIONS = 5
SMALL = Case(ALL_REDUCE, 2, 4 << 10)
REPETITIONS, BLOCKS = 50, 200
GROWTH_BYTES_MAX = 2 * MIB
NOISE_BYTES = MIB // 2
"""Less than this is noise: interpreters allocate and free pages of their own."""
IDLE_AFTER_SECONDS, IDLE_SECONDS = 1.0, 5.0
IDLE_SHARE_MAX = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory and idle processor time of a group of two ranks.")
    parser.add_argument("--transports", default="shared_memory,grpc")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    facts = machine.describe()
    rows = [row for transport in arguments.transports.split(",") for row in measure(transport)]
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(describe(rows))
    print(machine.line(facts, []))


def measure(transport: str) -> list[dict[str, Any]]:
    """Every figure of one transport: {"transport", "what", "value", "unit", "must", "verdict"}, or {"transport", "skipped"}."""
    try:
        return [{"transport": transport, **row} for row in _rows(transport)]
    except FerroError as error:
        return [{"transport": transport, "skipped": error.message}]


def describe(rows: list[dict[str, Any]]) -> str:
    """The figures as a table."""
    header = ("transport", "what", "measured", "at most", "verdict")
    lines = [
        (row["transport"], row["what"], *map(_figure, (row, row), ("value", "must")), row["verdict"])
        for row in rows
        if "what" in row
    ]
    notes = [f"not measured: {row['transport']}: {row['skipped']}" for row in rows if "skipped" in row]
    return "\n".join([table(header, lines, right=frozenset(header[2:4])), *notes])


def _rows(transport: str) -> Iterator[dict[str, Any]]:
    for size in PEAK_SIZES:
        for memory in (ORDINARY, *([REGISTERED] if transport != "grpc" else [])):
            what = f"peak beyond the arrays, all_reduce of {size_text(size)} in place, {memory}"
            # The bound for ordinary arrays is that of gRPC, which needs most.
            must = NOISE_BYTES if memory == REGISTERED else size // 2 + 32 * MIB
            yield _row(what, _peak(transport, size, memory), "bytes", must)
    yield _row(f"growth over {REPETITIONS * BLOCKS:,} operations of {size_text(SMALL.size_bytes)}", *_grown(transport))
    yield _row(f"processor of an idle rank, {IDLE_AFTER_SECONDS:.0f} s after its last operation", *_idle(transport))


def _peak(transport: str, size: int, memory: str) -> int:
    """Bytes beyond the arrays during the first few in-place sums."""
    contender = Contender(ferrorpc_system(transport), memory)
    with RankProcesses(contender.system, 2) as world:
        _small_sums(world, blocks=1)
        world.ask("finish")
        world.ask("settle")
        world.prepare(Case(ALL_REDUCE, 2, size), contender)
        replies = world.ask("turn", warm_ups=0, blocks=PEAK_REPETITIONS, count=1)
        return max(int(reply["peak_bytes"]) for reply in replies)


def _grown(transport: str) -> tuple[int, str, int]:
    with RankProcesses(ferrorpc_system(transport), 2) as world:
        _small_sums(world, blocks=BLOCKS // 4)
        before = world.ask("usage")
        world.ask("turn", warm_ups=0, blocks=BLOCKS, count=REPETITIONS)
        after = world.ask("usage")
    grown = max(int(now["resident_bytes"] - then["resident_bytes"]) for now, then in zip(after, before, strict=True))
    return grown, "bytes", GROWTH_BYTES_MAX


def _idle(transport: str) -> tuple[float, str, float]:
    with RankProcesses(ferrorpc_system(transport), 2) as world:
        _small_sums(world, blocks=1)
        time.sleep(IDLE_AFTER_SECONDS)
        before = world.ask("usage")
        time.sleep(IDLE_SECONDS)
        after = world.ask("usage")
    share = max(now["cpu_seconds"] - then["cpu_seconds"] for now, then in zip(after, before, strict=True)) / IDLE_SECONDS
    return share, "share", IDLE_SHARE_MAX


def _small_sums(ranks: RankProcesses, blocks: int) -> None:
    ranks.prepare(SMALL, Contender(ranks.system))
    ranks.ask("turn", warm_ups=0, blocks=blocks, count=REPETITIONS)


def _row(what: str, value: float, unit: str, must: float) -> dict[str, Any]:
    return {"what": what, "value": value, "unit": unit, "must": must, "verdict": "kept" if value <= must else "MISSED"}


def _figure(row: dict[str, Any], name: str) -> str:
    return f"{row[name] / MIB:.1f} MiB" if row["unit"] == "bytes" else f"{100 * row[name]:.2f} %"


if __name__ == "__main__":
    main()
