"""Runs everything that needs a GPU, and reports what passes.

    python -m benchmarks.gpu [--only NAME ...] [--seconds 570] [--json gpu.jsonl]

It runs the scripts beside this file, the examples on a GPU, and tests/gpu. Needs a GPU and ferrorpc[gpu]; some runs need torch
or pytest. Each runs in a process of its own and is killed after its time, so that one that hangs or fails does not stop the
others. The most important come first. All of it ends within `--seconds`; the command for what is left is printed. Figures and
verdicts are appended to a file of JSON lines as they come. Exit code 1 if a target was missed, or anything failed or was left.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.gpu.timing import note
from benchmarks.options import amount
from ferrorpc.arrays.devices import open_device
from ferrorpc.cli.table import table
from ferrorpc.errors import BackendUnavailableError

LEAST_SECONDS: Final = 30.0
"""With less time than this left, a run is left for later."""
_PAIR: Final = ("ferrorpc", "run", "-n", "2")
_PYTEST: Final = ("pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "--timeout", "60")
RUNS: Final[Mapping[str, tuple[float, Sequence[str]]]] = {
    "overhead": (60, ("benchmarks.gpu.one_rank", "--only", "overhead")),
    "absent_peer": (60, ("benchmarks.gpu.one_rank", "--only", "absent_peer")),
    "shared_gpu": (150, (*_PAIR, "-m", "benchmarks.gpu.shared_gpu")),
    "shared_gpu_mps": (90, ("benchmarks.gpu.with_mps", *_PAIR, "-m", "benchmarks.gpu.shared_gpu")),
    "copies": (60, ("benchmarks.gpu.copies",)),
    "staged_all_reduce": (90, (*_PAIR, "-m", "benchmarks.gpu.staged_all_reduce")),
    "killed_peer": (150, ("benchmarks.gpu.killed_peer",)),
    "values": (60, ("benchmarks.gpu.one_rank", "--only", "values")),
    "tests": (240, (*_PYTEST, "-n", "4", "tests/gpu")),
    "memory_tests": (90, (*_PYTEST, "-n", "0", "tests/gpu/test_process_memory.py")),
    "buckets": (60, ("benchmarks.gpu.buckets",)),
    "staged_all_reduce_shared_memory": (
        90,
        (*_PAIR, "-m", "benchmarks.gpu.staged_all_reduce", "--transport", "shared_memory"),
    ),
    "pipeline_messages": (60, (*_PAIR, "-m", "benchmarks.gpu.pipeline_messages")),
    "pipeline_messages_grpc": (60, (*_PAIR, "-m", "benchmarks.gpu.pipeline_messages", "--backend", "grpc")),
    "characters": (90, (*_PAIR, "examples/characters_torch.py", "--device", "gpu", "--steps", "50")),
    "digits": (90, (*_PAIR, "examples/digits_ddp.py", "--device", "gpu", "--epochs", "3")),
    "torch": (60, ("benchmarks.gpu.one_rank", "--only", "torch")),
}
"""Name -> how many seconds it may take, the module that Python runs, and its arguments; the most important first."""


def run(arguments: Sequence[str], seconds: float) -> int | None:
    """The exit code; None if it took too long, and was killed with all processes that it had started."""
    process = subprocess.Popen([sys.executable, "-m", *arguments], start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:  # also where this is interrupted
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def command_of(command: Sequence[str], path: Path) -> list[str]:
    """The command of a run, which appends its figures to a file if it is one of the scripts beside this one."""
    figures = ["--json", str(path)] if any(each.startswith("benchmarks.") for each in command) else []
    return [*command, *figures]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what was asked for. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Runs everything that needs a GPU.")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS), metavar="NAME", help=", ".join(RUNS))
    parser.add_argument("--seconds", type=amount, default=570.0, help="how long all of it may take")
    parser.add_argument("--json", type=Path, default=Path("gpu.jsonl"), metavar="FILE", help="where figures are appended")
    options = parser.parse_args(arguments)
    try:
        open_device()
    except BackendUnavailableError as error:
        raise SystemExit(f"needs a GPU: {error.reason}; try: {error.hint}") from None
    rows, until, left = [], time.perf_counter() + options.seconds, []
    for name in options.only:
        began = time.perf_counter()
        if until - began < min(LEAST_SECONDS, RUNS[name][0]):
            left.append(name)
            continue
        print(f"\n==== {name}", flush=True)
        most, command = RUNS[name]
        code = run(command_of(command, options.json), min(most, until - began))
        verdict = "timed out" if code is None else "passed" if code == 0 else f"exit code {code}"
        rows.append([name, verdict, f"{time.perf_counter() - began:.0f}"])
        note(options.json, name, {"verdict": verdict, "seconds": time.perf_counter() - began})
    print()
    print(table(["what", "verdict", "seconds"], rows, right=frozenset(("seconds",))))
    if left:
        print(f"no time was left for the rest: python -m benchmarks.gpu --only {' '.join(left)}")
    return int(bool(left) or any(verdict != "passed" for _, verdict, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
