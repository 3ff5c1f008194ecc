"""Compares data-parallel training with torch's: what a step costs beyond computation, with two ranks on this host.

    python -m benchmarks.ddp [--models transformer mlp] [--systems torch shared_memory grpc] [--steps 4] [--turns 5]
                             [--json FILE]

Each system has its own pair of processes, with the same model and batches, and one compute thread each. Pairs take turns of a
few steps in one run; between turns they are blocked in a read. One pair trains without any communication: its step is the
compute-only step. Medians are over the steps of all turns, of the slower rank's time.

    exposed   step time minus the compute-only step
    cpu       processor seconds per step of all threads of a rank, minus those of the compute-only step
    memory    what a rank holds more than before the model was wrapped, minus the same of the compute-only pair, as a share
              of the gradients' bytes

torch's DistributedDataParallel runs over Gloo, with gradient_as_bucket_view=True, which is the default here.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.ddp_worker import ALONE, TORCH
from benchmarks.options import count
from ferrorpc.cli.bench.rank_processes import LOCAL, Host, rank_variables
from ferrorpc.cli.ports import held_ports
from ferrorpc.cli.table import table

RANKS: Final = 2
END_SECONDS: Final = 10.0
SHARED_MEMORY, GRPC = "shared_memory", "grpc"


@dataclass(frozen=True, slots=True)
class Target:
    """An upper bound on a figure of one system, as a multiple of torch's figure (for memory: of the gradients' bytes)."""

    system: str
    figure: str
    must: float
    aim: float


TARGETS: Final = (
    Target(SHARED_MEMORY, "exposed", 0.5, 0.25),
    Target(SHARED_MEMORY, "step", 1.0, 1.0),
    Target(SHARED_MEMORY, "cpu", 0.5, 0.5),
    Target(SHARED_MEMORY, "memory", 1.1, 1.1),
    Target(GRPC, "exposed", 4.0, 2.0),
)


class Pair:
    """The two rank processes of one system; a context manager.

    Args:
        rows: of a rank's batch; None for the model's default.
        bucket_mb: how many MiB a bucket may hold.
        bare: whether steps compute nothing, and only give every parameter a gradient.
        device_ms: how long a bare step waits, to simulate a device that computes.
        hosts: where the ranks run.
    """

    def __init__(
        self,
        system: str,
        model: str,
        *,
        rows: int | None = None,
        bucket_mb: float = 25,
        bare: bool = False,
        device_ms: float = 0.0,
        hosts: Sequence[Host] = (LOCAL, LOCAL),
    ) -> None:
        self.system = system
        self._held = ExitStack()
        """The ranks' ports, until they have ended."""
        ports = self._held.enter_context(held_ports(0, 0))
        transport = {"FERRORPC_TRANSPORT": system} if system in (SHARED_MEMORY, GRPC) else {}
        options = (
            ["--bucket-mb", str(bucket_mb)]
            + ["--bare", "--device-ms", str(device_ms)] * bare
            + ([] if rows is None else ["--rows", str(rows)])
        )
        self._processes = [
            subprocess.Popen(
                [*host.prefix, sys.executable, "-m", "benchmarks.ddp_worker", system, model, *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | transport | rank_variables(rank, hosts, ports),
            )
            for rank, host in enumerate(hosts)
        ]
        try:
            self.gradient_bytes = int(self._replies()[0]["gradient_bytes"])
        except BaseException:
            self._end(0.0)
            raise

    def turn(self, steps: int) -> list[dict[str, Any]]:
        """Makes both ranks take so many steps. Returns their reports, in rank order."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # then it has ended, which its missing reply tells
                process.stdin.write(f"{steps}\n")
                process.stdin.flush()
        return self._replies()

    def _replies(self) -> list[dict[str, Any]]:
        waiting = {process.stdout: rank for rank, process in enumerate(self._processes) if process.stdout is not None}
        lines: dict[int, str] = {}
        while waiting:
            for stream in select.select(list(waiting), [], [])[0]:
                rank = waiting.pop(stream)
                lines[rank] = stream.readline()
                if not lines[rank]:
                    raise SystemExit(f"rank {rank} of {self.system} ended early")
        return [json.loads(line) for _, line in sorted(lines.items())]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end(END_SECONDS if kind is None else 0.0)

    def _end(self, patience_seconds: float) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(patience_seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._held.close()


@dataclass(slots=True)
class Timings:
    """What the turns of one system took.

    Attributes:
        seconds: of each step, on the slower rank.
        cpu_seconds: of each turn, per step and rank.
        added_bytes: the larger number of the two ranks.
    """

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    added_bytes: int = 0

    def add(self, replies: list[dict[str, Any]], steps: int) -> None:
        """Adds the reports of a turn."""
        self.seconds += map(max, zip(*(reply["seconds"] for reply in replies), strict=True))
        self.cpu_seconds.append(sum(reply["cpu_seconds"] for reply in replies) / (steps * RANKS))
        self.added_bytes = max(self.added_bytes, *(int(reply["added_bytes"]) for reply in replies))


def measure(model: str, systems: Sequence[str], steps: int, turns: int) -> list[dict[str, Any]]:
    """A row for each system, the compute-only pair first."""
    with ExitStack() as stack:
        pairs = [stack.enter_context(Pair(system, model)) for system in (ALONE, *systems)]
        seen = {pair.system: Timings() for pair in pairs}
        for pair in pairs:
            pair.turn(3)  # warm-up: the first steps build buckets and caches
        for _ in range(turns):
            for pair in pairs:
                seen[pair.system].add(pair.turn(steps), steps)
        gradient_bytes = pairs[0].gradient_bytes
    alone = seen[ALONE]
    compute, compute_cpu = statistics.median(alone.seconds), statistics.median(alone.cpu_seconds)
    return [
        {
            "model": model,
            "system": system,
            "gradient_bytes": gradient_bytes,
            "step": statistics.median(each.seconds),
            "exposed": statistics.median(each.seconds) - compute,
            "cpu": statistics.median(each.cpu_seconds) - compute_cpu,
            "memory": (each.added_bytes - alone.added_bytes) / gradient_bytes,
        }
        for system, each in seen.items()
    ]


def verdicts(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """For each model, each target with the figure that was measured."""
    found = {(row["model"], row["system"]): row for row in rows}
    for model in dict.fromkeys(row["model"] for row in rows):
        for target in TARGETS:
            ours, peer = found.get((model, target.system)), found.get((model, TORCH))
            if ours is None or peer is None:
                continue
            share = ours["memory"] if target.figure == "memory" else ours[target.figure] / peer[target.figure]
            yield {
                "model": model, "system": target.system, "figure": target.figure, "value": share,
                "must": target.must, "aim": target.aim,
                "verdict": "aim" if share <= target.aim else "must" if share <= target.must else "missed",
            }  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the figures and the targets as two tables."""
    cells = [
        [
            row["model"],
            row["system"],
            *(f"{row[name] * 1000:.1f}" for name in ("step", "exposed", "cpu")),
            f"{row['memory']:.2f}",
        ]
        for row in rows
    ]
    header = ["model", "system", "step ms", "exposed ms", "cpu ms", "memory / gradients"]
    print(table(header, cells, right=frozenset(header[2:])))
    header = ["model", "system", "figure", "of torch's", "must", "aim", "verdict"]
    cells = [
        [
            row["model"],
            row["system"],
            row["figure"],
            f"{row['value']:.2f}",
            f"{row['must']:g}",
            f"{row['aim']:g}",
            row["verdict"],
        ]
        for row in verdicts(rows)
    ]
    print()
    print(table(header, cells, right=frozenset(header[3:6])))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares data-parallel training with torch's.")
    parser.add_argument("--models", nargs="+", choices=("transformer", "mlp"), default=["transformer", "mlp"])
    parser.add_argument("--systems", nargs="+", choices=(TORCH, SHARED_MEMORY, GRPC), default=[TORCH, SHARED_MEMORY, GRPC])
    parser.add_argument("--steps", type=count, default=4, help="of one turn")
    parser.add_argument("--turns", type=count, default=5, help="of each system")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    rows = [row for model in arguments.models for row in measure(model, arguments.systems, arguments.steps, arguments.turns)]
    load = os.getloadavg()[0]
    print(f"load {load:.1f} on {len(os.sched_getaffinity(0))} CPUs; {RANKS} ranks; ms a step of the slower rank")
    show(rows)
    if arguments.json:
        text = json.dumps({"load": load, "rows": rows, "targets": list(verdicts(rows))}, indent=2)
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
