"""Everything that wants a GPU, one thing after the other, and which of it holds.

    python -m benchmarks.gpu [--only NAME ...] [--seconds 300]

The scripts beside this file, the examples on a GPU, and tests/gpu. Needs a GPU and ferrorpc[gpu]; some of it torch, or
pytest. Each runs in a process of its own and is given up after `--seconds`, so that what hangs hides nothing of what comes
after it. Exit code 1 where a target was missed, or anything failed.
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

from ferrorpc.arrays.cupy_device import open_device
from ferrorpc.cli.table import table
from ferrorpc.errors import BackendUnavailableError

_PAIR: Final = ("ferrorpc", "run", "-n", "2")
RUNS: Final[Mapping[str, Sequence[str]]] = {
    "copies": ("benchmarks.gpu.copies",),
    "one_rank": ("benchmarks.gpu.one_rank",),
    "buckets": ("benchmarks.gpu.buckets",),
    "killed_peer": ("benchmarks.gpu.killed_peer",),
    "staged_pair": (*_PAIR, "-m", "benchmarks.gpu.staged_pair"),
    "staged_pair_shared_memory": (*_PAIR, "-m", "benchmarks.gpu.staged_pair", "--transport", "shared_memory"),
    "shared_gpu": (*_PAIR, "-m", "benchmarks.gpu.shared_gpu"),
    "stage_pair": (*_PAIR, "-m", "benchmarks.gpu.stage_pair"),
    "stage_pair_grpc": (*_PAIR, "-m", "benchmarks.gpu.stage_pair", "--backend", "grpc"),
    "digits": (*_PAIR, "examples/digits_ddp.py", "--device", "gpu", "--epochs", "3"),
    "characters": (*_PAIR, "examples/characters_torch.py", "--device", "gpu", "--steps", "50"),
    "tests": ("pytest", "-q", "-n", "8", "-p", "no:cacheprovider", "--timeout", "60", "tests/gpu"),
}
"""Name -> what Python runs as a module, with its arguments."""


def run(arguments: Sequence[str], seconds: float) -> int | None:
    """The exit code; None where it was given up, with all that it had started."""
    process = subprocess.Popen([sys.executable, "-m", *arguments], start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what was asked for; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Everything that wants a GPU.")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS), metavar="NAME", help=", ".join(RUNS))
    parser.add_argument("--seconds", type=float, default=300.0, help="how long each may take")
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
        verdict = "given up" if code is None else "holds" if code == 0 else f"exit code {code}"
        rows.append([name, verdict, f"{time.perf_counter() - began:.0f}"])
    print()
    print(table(["what", "verdict", "seconds"], rows, right=frozenset(("seconds",))))
    return int(any(verdict != "holds" for _, verdict, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
