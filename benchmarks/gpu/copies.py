"""Measures copies on one GPU: on the device, to the host and back; and kernels beside them.

    python -m benchmarks.gpu.copies [--mib 64] [--turns 20] [--json FILE]

Needs a GPU and ferrorpc[gpu]. All cases take turns in one run. Speeds are GB/s read and written, also relative to a copy on the
device of the same size. Time is measured "as called", from the call until the stream is done; and for cases on the device also
between two GPU events, which excludes the host's part (except below a few MiB): a program that goes on calling hides it.
Packing should reach 0.7 of the copy's speed on the GPU; exit code 1 if it does not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.timing import exit_code, gpu_seconds_of, note, seconds_of
from benchmarks.options import count
from ferrorpc.arrays.device import Device
from ferrorpc.arrays.devices import open_device
from ferrorpc.cli.table import table
from ferrorpc.types import DType

MIB = 1 << 20
TENSORS = 60
PACK_SHARE_MIN = 0.7
COPY = "copy on the device"
ON_DEVICE = (COPY, "pack", "unpack", "pack to bfloat16", "quantise to int8", "sum of four")
BUSY_COPIES = 20


def cases(cupy: Any, device: Device, size_bytes: int) -> dict[str, tuple[Callable[[], object], int]]:
    """Name -> what is done, and the bytes that it reads and writes on the device (or moves, to or from the host)."""
    count = size_bytes // 4
    x, y = cupy.asarray(np.ones(count, np.float32)), cupy.empty(count, np.float32)
    half = cupy.empty(count, np.uint16)
    stream, kernels, staging = device.current(), device.kernels, device.staging
    parts = np.array_split(np.arange(count), TENSORS)
    tensors = [cupy.asarray(np.ones(len(part), np.float32)) for part in parts]
    starts = [int(part[0]) for part in parts]
    scales, integers = cupy.empty(-(-count // 256), np.float32), cupy.empty(count, np.int8)
    here, pinned = np.ones(count, np.float32), device.pinned(size_bytes).view(np.float32)
    f32, bf16 = DType.FLOAT32, DType.BFLOAT16
    return {
        COPY: (lambda: device.copy(y, x, stream), 2 * size_bytes),
        "pack": (lambda: kernels.pack(tensors, starts, y, f32, f32), 2 * size_bytes),
        "unpack": (lambda: kernels.unpack(tensors, starts, y, f32, f32), 2 * size_bytes),
        "pack to bfloat16": (lambda: kernels.pack(tensors, starts, half, f32, bf16), size_bytes * 3 // 2),
        "quantise to int8": (lambda: kernels.quantise_int8(x, scales, integers), size_bytes * 5 // 4),
        "sum of four": (lambda: kernels.sum_peers([x, x, x, x], y, f32), 5 * size_bytes),
        "down, pinned": (lambda: device.download(pinned, x, stream), size_bytes),
        "up, pinned": (lambda: device.upload(x, pinned, stream), size_bytes),
        "down, staged": (lambda: staging.to_host(x), size_bytes),
        "up, staged": (lambda: staging.to_device(here), size_bytes),
        "down, pageable": (lambda: device.download(here, x, stream), size_bytes),
        "up, pageable": (lambda: device.upload(x, here, stream), size_bytes),
    }


def measure(cupy: Any, device: Device, size_bytes: int, turns: int) -> tuple[dict[str, float], dict[str, float]]:
    """GB/s of each case as called, and of those on the device by GPU events; medians, taken in turns."""
    found = cases(cupy, device, size_bytes)
    calls = {name: call for name, (call, _) in found.items()}

    def busy() -> None:
        for _ in range(BUSY_COPIES):
            calls[COPY]()

    called = seconds_of(cupy, calls, turns)
    by_events = gpu_seconds_of(cupy, {name: calls[name] for name in ON_DEVICE}, turns, busy)
    speeds = [{name: found[name][1] / each / 1e9 for name, each in seconds.items()} for seconds in (called, by_events)]
    return speeds[0], speeds[1]


def _shown(speeds: dict[str, float], name: str) -> list[str]:
    return [f"{speeds[name]:.1f}", f"{speeds[name] / speeds[COPY]:.2f}"] if name in speeds else ["", ""]


def main() -> None:
    parser = argparse.ArgumentParser(description="Copies and kernels on one GPU.")
    parser.add_argument("--mib", type=count, default=64)
    parser.add_argument("--turns", type=count, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures there, as JSON lines")
    arguments = parser.parse_args()
    device = open_device()
    device.make_current()
    called, by_events = measure(device.cupy, device, arguments.mib * MIB, arguments.turns)
    columns = ["GB/s as called", "of a copy", "GB/s of the GPU", "of its copy"]
    rows = [[name, *_shown(called, name), *_shown(by_events, name)] for name in called]
    print(table([f"{arguments.mib} MiB", *columns], rows, right=frozenset(columns)))
    note(arguments.json, f"copies, {arguments.mib} MiB, GB/s", {"as called": called, "of the GPU": by_events})
    shares = {name: by_events[name] / by_events[COPY] for name in ("pack", "unpack")}
    sys.exit(
        exit_code(
            {f"{name} reaches {PACK_SHARE_MIN:g} of a copy on the GPU": each >= PACK_SHARE_MIN for name, each in shares.items()}
        )
    )


if __name__ == "__main__":
    main()
