"""Measures all_reduce of two processes' GPU arrays through pinned staging memory, compared with all_reduce of host arrays.

    ferrorpc run -n 2 -m benchmarks.gpu.staged_all_reduce [--mib 64] [--turns 10] [--transport grpc] [--json FILE]

Needs a GPU and ferrorpc[gpu]. Both are measured uncompressed and compressed; compressed GPU arrays are encoded and added on the
GPU. Values are checked against float64 on the host, and bit for bit against those of host arrays. Uncompressed GPU arrays
should reach 0.9 of the speed of host arrays. Rank 0 prints; exit code 1 on ranks where they do not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

import ferrorpc
from benchmarks.gpu.timing import exit_code, group_seconds_of, note
from benchmarks.options import count
from ferrorpc.arrays.devices import open_device
from ferrorpc.cli.table import table

MIB = 1 << 20
SHARE_MIN = 0.9
WIRES = (None, "bf16", "int8")


def compare(cupy: Any, group: Any, size_bytes: int, turns: int, wire: str | None = None) -> tuple[float, float]:
    """Seconds of an all_reduce of host arrays, and of one of GPU arrays. Raises AssertionError if a value is wrong."""
    everyones = [np.random.default_rng(rank).standard_normal(size_bytes // 4).astype(np.float32) for rank in range(group.size)]
    host = everyones[group.rank]
    near = cupy.asarray(host)
    here, there = group.all_reduce(host, wire=wire), cupy.asnumpy(group.all_reduce(near, wire=wire))
    np.testing.assert_array_equal(there.view(np.uint32), here.view(np.uint32), err_msg=f"wire={wire}")
    if wire is None:
        exact = sum(each.astype(np.float64) for each in everyones)
        np.testing.assert_allclose(there, exact, rtol=1e-5, atol=1e-5)

    settle = cupy.cuda.get_current_stream().synchronize
    return (
        group_seconds_of(group, lambda: group.all_reduce(host, wire=wire), settle, turns),
        group_seconds_of(group, lambda: group.all_reduce(near, wire=wire), settle, turns),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="all_reduce of two processes on one GPU, through pinned staging memory.")
    parser.add_argument("--mib", type=count, default=64)
    parser.add_argument("--turns", type=count, default=10)
    parser.add_argument("--transport", default="grpc", choices=("grpc", "shared_memory"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures there, as JSON lines")
    arguments = parser.parse_args()
    cupy = open_device(0).cupy
    with ferrorpc.init_process_group(backend="grpc", transport=arguments.transport, device=0) as group:
        found = {}
        for wire in WIRES:
            found[wire] = compare(cupy, group, arguments.mib * MIB, arguments.turns, wire)
            if group.rank == 0:
                what = f"staged_all_reduce, {arguments.mib} MiB, {arguments.transport}, {wire or 'as it is'}, seconds"
                note(arguments.json, what, dict(zip(("host", "GPU, staged"), found[wire], strict=True)))
        if group.rank == 0:
            rows = [
                [name, wire or "as it is", f"{each * 1e3:.1f}", f"{arguments.mib * MIB / each / 1e9:.2f}"]
                for wire, times in found.items()
                for name, each in zip(("host", "GPU, staged"), times, strict=True)
            ]
            title = f"{arguments.mib} MiB, {arguments.transport}"
            print(table([title, "wire", "ms", "GB/s"], rows, right=frozenset(("ms", "GB/s"))))
    host, staged = found[None]
    sys.exit(exit_code({f"staged arrays reach {SHARE_MIN:g} of the host's speed": host / staged >= SHARE_MIN}))


if __name__ == "__main__":
    main()
