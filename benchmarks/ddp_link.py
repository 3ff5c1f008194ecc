"""Measures how much of a training step's communication is hidden behind computation, on two hosts with a slow link.

    python -m benchmarks.ddp_link [--model transformer] [--rows 8 12] [--device-ms 450 700] [--bucket-mb 2] [--rate 1000]
                                  [--json FILE]

As root, with iproute2.

The hosts are the namespaces of benchmarks.link. For each batch size, four pairs of ranks take turns in one run: with the model
and without communication, with the model over the link, and both again with steps that compute nothing and only give every
parameter a gradient. With --device-ms steps wait instead of computing, to simulate a device that leaves the processors free.

    compute         the step without communication
    communication   what the link adds to a step that computes nothing: there all of it is exposed
    exposed         what the link adds to a step that computes
    hidden          1 - exposed / communication
    processor       what the link adds to a step that computes, in processor time of a rank

A bucket is sent when its last gradient is complete, so nothing can hide the last bucket. On a link where the default bucket of
25 MiB takes as long as a backward pass, buckets have to be smaller.

Both ranks of a pair compute at the same time on this machine's processors. If there are only two, the processor time of the
communication is always exposed, unless steps wait for a device. Only the backward pass can hide communication; it is about two
thirds of a step's computation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.ddp import GRPC, Pair, Timings
from benchmarks.ddp_worker import ALONE, ROWS, TORCH
from benchmarks.link import link, ready
from benchmarks.options import amount, count
from ferrorpc.cli.bench.rank_processes import Host
from ferrorpc.cli.table import table

MUST_HIDDEN: Final = 0.7
AIM_HIDDEN: Final = 0.9


@dataclass(frozen=True, slots=True)
class Computing:
    """What a step computes: the model, with so many rows per rank; or nothing, while it waits for a simulated device."""

    rows: int | None = None
    device_ms: float = 0.0

    def __str__(self) -> str:
        return f"{self.device_ms:g} ms on a device" if self.rows is None else f"{self.rows} rows"


def measure(
    model: str, computing: Computing, bucket_mb: float, systems: Sequence[str], hosts: Sequence[Host], steps: int, turns: int
) -> list[dict[str, Any]]:
    """A row for each system."""
    kinds = [(ALONE, False), (ALONE, True), *((system, bare) for system in systems for bare in (False, True))]

    def pair_of(system: str, bare: bool) -> Pair:
        if bare or computing.rows is None:
            device_ms = 0.0 if bare else computing.device_ms
            return Pair(system, model, bucket_mb=bucket_mb, bare=True, device_ms=device_ms, hosts=hosts)
        return Pair(system, model, rows=computing.rows, bucket_mb=bucket_mb, hosts=hosts)

    with ExitStack() as stack:
        pairs = {kind: stack.enter_context(pair_of(*kind)) for kind in kinds}
        seen = {kind: Timings() for kind in kinds}
        for pair in pairs.values():
            pair.turn(2)
        for _ in range(turns):
            for kind, pair in pairs.items():
                seen[kind].add(pair.turn(steps), steps)
    return [_row(model, str(computing), system, seen) for system in systems]


def _row(model: str, computing: str, system: str, seen: dict[tuple[str, bool], Timings]) -> dict[str, Any]:
    step = {kind: statistics.median(each.seconds) for kind, each in seen.items()}
    processor = {kind: statistics.median(each.cpu_seconds) for kind, each in seen.items()}
    communication = step[system, True] - step[ALONE, True]
    exposed = step[system, False] - step[ALONE, False]
    return {
        "model": model, "step": computing, "system": system, "compute": step[ALONE, False], "communication": communication,
        "exposed": exposed, "hidden": 1 - exposed / communication,
        "processor": processor[system, False] - processor[ALONE, False],
    }  # fmt: skip


def show(found: list[dict[str, Any]]) -> None:
    """Prints the figures. Only steps that compute at least as long as they communicate get a verdict."""
    header = ["model", "step", "system", "compute ms", "communication ms", "exposed ms", "hidden", "processor ms", "verdict"]
    cells = [
        [
            row["model"],
            row["step"],
            row["system"],
            *(f"{row[name] * 1000:.0f}" for name in ("compute", "communication", "exposed")),
            f"{row['hidden']:.0%}",
            f"{row['processor'] * 1000:.0f}",
            _verdict(row),
        ]
        for row in found
    ]
    print(table(header, cells, right=frozenset(header[3:8])))


def _verdict(row: dict[str, Any]) -> str:
    if row["system"] != GRPC:
        return ""
    if row["compute"] < row["communication"]:
        return "computes less than it communicates"
    return "aim" if row["hidden"] >= AIM_HIDDEN else "must" if row["hidden"] >= MUST_HIDDEN else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description="Hidden communication on a shaped link.")
    parser.add_argument("--model", choices=list(ROWS), default="transformer")
    parser.add_argument("--rows", type=count, nargs="+", help="of a rank's batch (default: 8 12, unless --device-ms)")
    parser.add_argument("--device-ms", type=amount, nargs="+", default=[], help="ms per step that a simulated device computes")
    parser.add_argument("--bucket-mb", type=amount, default=2, help="MiB that a bucket may hold, in both systems")
    parser.add_argument("--systems", nargs="+", choices=(GRPC, TORCH), default=[GRPC, TORCH])
    parser.add_argument("--rate", type=count, default=1000, metavar="MBIT", help="megabits per second, each way")
    parser.add_argument("--steps", type=count, default=2, help="of one turn")
    parser.add_argument("--turns", type=count, default=4, help="of each pair")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    if not ready():
        return
    rows = arguments.rows or ([] if arguments.device_ms else [8, 12])
    steps = [*(Computing(each) for each in rows), *(Computing(device_ms=each) for each in arguments.device_ms)]
    with link(arguments.rate) as hosts:
        found = [
            row
            for computing in steps
            for row in measure(
                arguments.model, computing, arguments.bucket_mb, arguments.systems, hosts, arguments.steps, arguments.turns
            )
        ]
    load = os.getloadavg()[0]
    shape = f"{arguments.rate} Mbit/s each way, buckets of {arguments.bucket_mb:g} MiB"
    print(f"{shape}; load {load:.1f} on {len(os.sched_getaffinity(0))} CPUs; steps of the slower rank")
    show(found)
    if arguments.json:
        arguments.json.write_text(json.dumps({"load": load, "rate_mbit": arguments.rate, "rows": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
