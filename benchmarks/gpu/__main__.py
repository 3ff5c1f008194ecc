"""Runs everything that needs a GPU, and reports what passes.

    python -m benchmarks.gpu [--only NAME ...] [--seconds 300]

It runs the scripts beside this file, the examples on a GPU, and tests/gpu. Needs a GPU and ferrorpc[gpu]; some runs need torch
or pytest. Each runs in a process of its own and is killed after `--seconds`, so that one that hangs does not stop the others.
Exit code 1 if a target was missed or anything failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.options import amount
from ferrorpc.arrays.cupy_device import open_device
from ferrorpc.cli.table import table
from ferrorpc.errors import BackendUnavailableError

_PAIR: Final = ("ferrorpc", "run", "-n", "2")
RUNS: Final[Mapping[str, Sequence[str]]] = {
    "copies": ("benchmarks.gpu.copies",),
    "one_rank": ("benchmarks.gpu.one_rank",),
    "buckets": ("benchmarks.gpu.buckets",),
    "killed_peer": ("benchmarks.gpu.killed_peer",),
    "staged_all_reduce": (*_PAIR, "-m", "benchmarks.gpu.staged_all_reduce"),
    "staged_all_reduce_shared_memory": (*_PAIR, "-m", "benchmarks.gpu.staged_all_reduce", "--transport", "shared_memory"),
    "shared_gpu": (*_PAIR, "-m", "benchmarks.gpu.shared_gpu"),
    "pipeline_messages": (*_PAIR, "-m", "benchmarks.gpu.pipeline_messages"),
    "pipeline_messages_grpc": (*_PAIR, "-m", "benchmarks.gpu.pipeline_messages", "--backend", "grpc"),
    "digits": (*_PAIR, "examples/digits_ddp.py", "--device", "gpu", "--epochs", "3"),
    "characters": (*_PAIR, "examples/characters_torch.py", "--device", "gpu", "--steps", "50"),
    "tests": ("pytest", "-q", "-n", "8", "-p", "no:cacheprovider", "--timeout", "60", "tests/gpu"),
}
"""Name -> the module that Python runs, and its arguments."""


def run(arguments: Sequence[str], seconds: float) -> int | None:
    """The exit code; None if it took too long, and was killed with all processes that it had started."""
    process = subprocess.Popen([sys.executable, "-m", *arguments], start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what was asked for. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Runs everything that needs a GPU.")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS), metavar="NAME", help=", ".join(RUNS))
    parser.add_argument("--seconds", type=amount, default=300.0, help="how long each may take")
    options = parser.parse_args(arguments)
    try:
        open_device()
    except BackendUnavailableError as error:
        raise SystemExit(f"needs a GPU: {error.reason}; try: {error.hint}") from None
    rows = []
    for name in options.only:
        print(f"\n==== {name}", flush=True)
        began = time.perf_counter()
        code = run(RUNS[name], options.seconds)
        verdict = "timed out" if code is None else "passed" if code == 0 else f"exit code {code}"
        rows.append([name, verdict, f"{time.perf_counter() - began:.0f}"])
    print()
    print(table(["what", "verdict", "seconds"], rows, right=frozenset(("seconds",))))
    return int(any(verdict != "passed" for _, verdict, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
