"""Measures the messages between two stages of a pipeline on one GPU.

    ferrorpc run -n 2 -m benchmarks.gpu.pipeline_messages [--backend cuda_ipc] [--mib 16] [--turns 10] [--json FILE]

Needs a GPU and CuPy. With `--backend grpc` messages go through pinned memory and the host. The stages only copy their input, so
a step is almost only messages: one for each microbatch, and one back for its gradient. Gradients are checked. Rank 0 prints.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import ferrorpc
from benchmarks.gpu.timing import group_seconds_of, note
from benchmarks.options import amount, count
from ferrorpc.arrays.devices import open_device
from ferrorpc.cli.table import table

MIB = 1 << 20


class CopyStage:
    """A stage whose output is a copy of its input.

    Args:
        like: an array of the kind that it computes with.
    """

    def __init__(self, like: Any) -> None:
        self.like = like

    def forward(self, x: Any) -> tuple[Any, None]:
        return x.copy(), None

    def backward(self, context: None, grad_y: Any) -> Any:
        return grad_y.copy()


class FirstStage(CopyStage):
    """The first stage, which keeps the gradients that come back."""

    def __init__(self, like: Any) -> None:
        super().__init__(like)
        self.grads: list[Any] = []

    def backward(self, context: None, grad_y: Any) -> Any:
        self.grads.append(grad_y)
        return grad_y


def loss(y: Any, target: Any) -> tuple[Any, Any]:
    """Half the sum of squares, whose gradient is the output."""
    return (y[:1, :1] * 0).sum(), y


def measure(cupy: Any, group: Any, size_bytes: int, microbatches: int, turns: int) -> float:
    """The median seconds of a step. Raises AssertionError if a gradient is wrong."""
    host = np.random.default_rng(7).standard_normal((microbatches, size_bytes // 4)).astype(np.float32)
    x, target = cupy.asarray(host), cupy.asarray(host[:, :1])
    stage = FirstStage(x) if group.rank == 0 else CopyStage(x)
    pipe = ferrorpc.Pipeline(stage, group, "1f1b", microbatches)

    def step() -> None:
        if isinstance(stage, FirstStage):
            stage.grads.clear()
        pipe.step(x, target, loss, "sum")

    seconds = group_seconds_of(group, step, cupy.cuda.get_current_stream().synchronize, turns)
    if isinstance(stage, FirstStage):
        np.testing.assert_array_equal(np.concatenate([cupy.asnumpy(each) for each in stage.grads]), host)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Messages between two pipeline stages on one GPU.")
    parser.add_argument("--backend", default="cuda_ipc", choices=("cuda_ipc", "grpc"))
    parser.add_argument("--mib", type=amount, nargs="+", default=[0.25, 1, 16, 64])
    parser.add_argument("--microbatches", type=count, default=8)
    parser.add_argument("--turns", type=count, default=10)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures there, as JSON lines")
    arguments = parser.parse_args()
    cupy = open_device(0).cupy
    with ferrorpc.init_process_group(backend=arguments.backend, device=0) as group:
        rows = []
        for mib in arguments.mib:
            size_bytes = int(mib * MIB) // 4 * 4
            seconds = measure(cupy, group, size_bytes, arguments.microbatches, arguments.turns)
            if group.rank == 0:
                note(arguments.json, f"pipeline_messages, {mib:g} MiB, {arguments.backend}", {"seconds a step": seconds})
            sent_bytes = 2 * arguments.microbatches * size_bytes
            rows.append([f"{mib:g}", f"{seconds * 1e3:.2f}", f"{sent_bytes / seconds / 1e9:.2f}"])
        if group.rank == 0:
            columns = [f"MiB a message, {arguments.backend}", f"ms a step of {arguments.microbatches}", "GB/s, both ways"]
            print(table(columns, rows, right=frozenset(columns)))


if __name__ == "__main__":
    main()
