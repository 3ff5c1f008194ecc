"""Kills one of two processes that share a GPU during an all_reduce, and measures how long it takes until the other one knows.

    python -m benchmarks.gpu.killed_peer [--backends grpc cuda_ipc] [--mib 16] [--host] [--json FILE]

Needs a GPU and CuPy; with --host it uses NumPy arrays and needs neither (only over grpc). The processes are started without
`ferrorpc run`, so no launcher reports the death: the coordinator sees the stream end, and waits for the grace period. The time
is from SIGKILL to PeerLostError in the survivor, which then uses its GPU again. Exit code 1 if that took 5 s or more, or if the
survivor ended in another way. On cuda_ipc it may end with code 75 instead, where its GPU waits for something that the killed
process's GPU had not reached.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.timing import exit_code, note
from benchmarks.options import amount
from ferrorpc.arrays.devices import open_device
from ferrorpc.cli.ports import held_ports
from ferrorpc.cli.table import table
from ferrorpc.exit_codes import EXIT_RETRY

SECONDS_MAX = 5.0
RUN_SECONDS_MAX = 60.0
"""How long a run may take, including the start of two processes with CUDA."""
KILLED_AFTER_SECONDS = 1.0
"""Many all_reduces have run by then."""


def survive(backend: str, size_bytes: int, on_host: bool, folder: Path) -> None:
    """Runs both ranks. Rank 1 is killed; rank 0 writes a file with its error and the time."""
    import ferrorpc

    device = None if on_host else 0
    with ferrorpc.init_process_group(backend=backend, device=device) as group:
        x, settle = arrays(size_bytes, on_host)
        killed_at = folder / "killed_at"
        group.all_reduce(x, out=x)
        settle()
        if group.rank == 1:
            threading.Timer(KILLED_AFTER_SECONDS, kill_this_process, (killed_at,)).start()
        try:
            while True:
                group.all_reduce(x, op="mean", out=x)
                settle()
        except ferrorpc.FerroError as error:
            told_at = time.time()
            found = {"error": type(error).__name__, "seconds": told_at - float(killed_at.read_text())}
    y, settle = arrays(size_bytes, on_host)
    y += 1
    settle()
    (folder / "found").write_text(json.dumps(found))


def arrays(size_bytes: int, on_host: bool) -> tuple[Any, Any]:
    """An array of so many bytes, and a function that waits for the GPU."""
    zeros = np.zeros(size_bytes // 4, np.float32)
    if on_host:
        return zeros, lambda: None
    cupy = open_device(0).cupy
    return cupy.asarray(zeros), cupy.cuda.get_current_stream().synchronize


def kill_this_process(killed_at: Path) -> None:
    """Writes the time into a file, and kills this process."""
    killed_at.write_text(repr(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def measure(backend: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the survivor wrote: "error" and "seconds". Without "seconds" if it wrote nothing."""
    with tempfile.TemporaryDirectory() as folder, held_ports(0, 0) as ports:
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0]), "FERRORPC_PORT": str(ports[1])}
        command = [sys.executable, "-m", "benchmarks.gpu.killed_peer", "--backends", backend, "--mib", f"{arguments.mib:g}"]
        command += ["--folder", folder, *["--host"] * arguments.host]
        ranks = [
            subprocess.Popen(command, env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(2)
        ]
        try:
            ranks[0].wait(RUN_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            return {"error": f"nothing in {RUN_SECONDS_MAX:g} s"}
        finally:
            for each in ranks:
                each.kill()
                each.wait()
        found = Path(folder, "found")
        if not found.exists():
            return {"error": f"the survivor ended with {ranks[0].returncode}", "code": ranks[0].returncode}
        outcome: dict[str, Any] = json.loads(found.read_text())
        return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures how long a survivor takes to notice a killed peer.")
    parser.add_argument("--backends", nargs="+", default=["grpc", "cuda_ipc"])
    parser.add_argument("--mib", type=amount, default=16)
    parser.add_argument("--host", action="store_true", help="use NumPy arrays and no GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures there, as JSON lines")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        survive(arguments.backends[0], int(arguments.mib * (1 << 20)), arguments.host, arguments.folder)
        return
    found = {}
    for backend in arguments.backends:
        found[backend] = measure(backend, arguments)
        note(arguments.json, f"killed_peer, {backend}", found[backend])
    rows = [[backend, each["error"], f"{each['seconds']:.2f}" if "seconds" in each else "-"] for backend, each in found.items()]
    print(table(["a peer killed", "the survivor's error", "s"], rows, right=frozenset("s")))
    targets = {
        f"the survivor on {backend} has PeerLostError within {SECONDS_MAX:g} s": each.get("seconds", SECONDS_MAX) < SECONDS_MAX
        if each["error"] == "PeerLostError"
        else backend == "cuda_ipc" and each.get("code") == EXIT_RETRY
        for backend, each in found.items()
    }
    sys.exit(exit_code(targets))


if __name__ == "__main__":
    main()
