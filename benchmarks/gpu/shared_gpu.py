"""Measures collectives of processes that share one GPU and read each other's GPU memory, and compares them with a lower bound.

    ferrorpc run -n 2 -m benchmarks.gpu.shared_gpu [--mib 1 16 64 256] [--turns 20] [--json FILE]

Needs a GPU and CuPy. Without NVIDIA's MPS the processes take turns: `python -m benchmarks.gpu.with_mps ferrorpc run ...`
starts it. Values are checked against float64 on the host. The lower bound ("floor") is the time of the copies that no algorithm
avoids: every rank reads a slice of all arrays, writes its sum, and reads and writes the other slices. They are counted at
the speed of a copy on the device, which is measured in the same run while the other ranks wait. "In a row" means ten calls at
once, each of which waits for the one before only on the GPU. Rank 0 prints. Exit code 1 if all_reduce of 64 MiB or more takes
longer than the floor / 0.4.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import ferrorpc
from benchmarks.gpu.timing import exit_code, group_seconds_of, note
from benchmarks.options import amount, count
from ferrorpc.arrays.devices import open_device
from ferrorpc.cli.table import table

MIB = 1 << 20
SHARE_MIN = 0.4
JUDGED_MIB = 64
IN_A_ROW = 10


def floor_bytes(size: int, size_bytes: int) -> float:
    """Bytes of GPU memory that all ranks together must read and write."""
    return size * size_bytes * (1 + 1 / size + 2 * (size - 1) / size)


def copy_speed(cupy: Any, group: Any, size_bytes: int, turns: int) -> float:
    """Bytes per second that a copy on the device reads and writes; by rank 0, while the others wait."""
    source = cupy.asarray(np.ones(size_bytes, np.uint8))
    target, settle = cupy.empty(size_bytes, np.uint8), cupy.cuda.get_current_stream().synchronize

    def copy() -> None:
        if group.rank == 0:
            target[...] = source

    return float(group.broadcast(2 * size_bytes / group_seconds_of(group, copy, settle, turns)))


def measure(cupy: Any, group: Any, size_bytes: int, turns: int) -> dict[str, float]:
    """Operation -> seconds. Raises AssertionError if a value is wrong."""
    everyones = [np.random.default_rng(rank).standard_normal(size_bytes // 4).astype(np.float32) for rank in range(group.size)]
    near = cupy.asarray(everyones[group.rank])
    out, share = cupy.empty(near.shape, near.dtype), near.size // group.size
    parts = [near[rank * share : (rank + 1) * share] for rank in range(group.size)]
    found = cupy.asnumpy(group.all_reduce(near, out=out))
    np.testing.assert_allclose(found, sum(each.astype(np.float64) for each in everyones), rtol=1e-5, atol=1e-5)
    settle = cupy.cuda.get_current_stream().synchronize

    def in_a_row() -> None:
        for work in [group.all_reduce(near, out=out, async_op=True) for _ in range(IN_A_ROW)]:
            work.wait()

    return {
        "all_reduce": group_seconds_of(group, lambda: group.all_reduce(near, out=out), settle, turns),
        "in a row": group_seconds_of(group, in_a_row, settle, max(turns // 4, 3)) / IN_A_ROW,
        "all_gather": group_seconds_of(group, lambda: group.all_gather(near), settle, turns),
        "reduce_scatter": group_seconds_of(group, lambda: group.reduce_scatter(parts), settle, turns),
        "broadcast": group_seconds_of(group, lambda: group.broadcast(near, out=out), settle, turns),
        "all_to_all": group_seconds_of(group, lambda: group.all_to_all(parts), settle, turns),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Collectives of processes that share one GPU.")
    parser.add_argument("--mib", type=amount, nargs="+", default=[0.004, 1, 16, 64, 256])
    parser.add_argument("--turns", type=count, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures there, as JSON lines")
    arguments = parser.parse_args()
    cupy = open_device(0).cupy
    with ferrorpc.init_process_group(backend="cuda_ipc", device=0) as group:
        speed = copy_speed(cupy, group, 256 * MIB, arguments.turns)
        found = {}
        for mib in arguments.mib:
            size_bytes = int(mib * MIB) // (8 * group.size) * 8 * group.size
            found[mib] = measure(cupy, group, size_bytes, arguments.turns)
            found[mib]["floor"] = floor_bytes(group.size, size_bytes) / speed
            if group.rank == 0:
                note(arguments.json, f"shared_gpu, {mib:g} MiB, seconds", {**found[mib], "copied bytes a second": speed})
        if group.rank == 0:
            print(f"{group.size} ranks on one GPU, whose own copies read and write {speed / 1e9:.0f} GB/s; milliseconds:")
            names = list(next(iter(found.values())))
            rows = [
                [f"{mib:g}", *(f"{times[name] * 1e3:.3f}" for name in names), f"{times['floor'] / times['all_reduce']:.2f}"]
                for mib, times in found.items()
            ]
            columns = ["MiB", *names, "of the floor"]
            print(table(columns, rows, right=frozenset(columns)))
    targets = {
        f"all_reduce of {mib:g} MiB reaches {SHARE_MIN:g} of the floor": times["floor"] / times["all_reduce"] >= SHARE_MIN
        for mib, times in found.items()
        if mib >= JUDGED_MIB
    }
    raise SystemExit(exit_code(targets))


if __name__ == "__main__":
    main()
