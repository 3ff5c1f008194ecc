"""Measures gradient buckets on one GPU with one rank: packed on the GPU and reduced by NCCL, compared with buckets on the host.

    python -m benchmarks.gpu.buckets [--mib 64] [--turns 20] [--json FILE]

Needs a GPU and ferrorpc[gpu]. Means are checked: a single rank gets back what it gave. All cases take turns in one run. A step
with buckets on the GPU should take at most half as long as one with buckets on the host; exit code 1 if it does not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ferrorpc
from benchmarks.gpu.one_rank import backend_of_one
from benchmarks.gpu.timing import exit_code, note, seconds_of
from benchmarks.options import count
from ferrorpc.arrays.devices import open_device
from ferrorpc.arrays.kinds import spec_of
from ferrorpc.backends.nccl.choose import open_nccl
from ferrorpc.cli.table import table
from ferrorpc.group import ProcessGroup

MIB = 1 << 20
TENSORS = 60
SHARE_MAX = 0.5


def cases(cupy: Any, group: ProcessGroup, size_bytes: int) -> dict[str, Callable[[], object]]:
    """Name -> what is timed. Raises AssertionError if a mean is wrong."""
    parts = np.array_split(np.random.default_rng(0).standard_normal(size_bytes // 4).astype(np.float32), TENSORS)
    grads = {f"p{number}": cupy.asarray(part) for number, part in enumerate(parts)}
    specs = {name: spec_of(grad) for name, grad in grads.items()}
    near, far = (ferrorpc.GradientSynchronizer(like, group) for like in (grads, specs))
    for sync in (near, far):
        for name, mean in sync(grads).items():
            np.testing.assert_array_equal(cupy.asnumpy(mean), cupy.asnumpy(grads[name]))

    def streaming() -> None:
        with near.step() as step:
            for name in reversed(grads):
                step.ready(name, grads[name])

    return {
        "copies on the GPU": lambda: [grad.copy() for grad in grads.values()],
        "a step, buckets on the GPU": lambda: near(grads),
        "the same, gradient by gradient": streaming,
        "a step, buckets on the host": lambda: far(grads),
    }


def measure(cupy: Any, group: ProcessGroup, size_bytes: int, turns: int) -> dict[str, float]:
    """The median seconds of each case, taken in turns."""
    return seconds_of(cupy, cases(cupy, group, size_bytes), turns)


def main() -> None:
    parser = argparse.ArgumentParser(description="Buckets of gradients on one GPU.")
    parser.add_argument("--mib", type=count, default=64)
    parser.add_argument("--turns", type=count, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures there, as JSON lines")
    arguments = parser.parse_args()
    device = open_device()
    device.make_current()
    with ProcessGroup(backend_of_one(device, open_nccl())) as group:
        seconds = measure(device.cupy, group, arguments.mib * MIB, arguments.turns)
    rows = [[name, f"{each * 1e3:.2f}"] for name, each in seconds.items()]
    print(table([f"{arguments.mib} MiB in {TENSORS} gradients", "ms"], rows, right=frozenset(("ms",))))
    note(arguments.json, f"buckets, {arguments.mib} MiB", seconds)
    share = seconds["a step, buckets on the GPU"] / seconds["a step, buckets on the host"]
    sys.exit(exit_code({f"buckets on the GPU take at most {SHARE_MAX:g} of those on the host": share <= SHARE_MAX}))


if __name__ == "__main__":
    main()
