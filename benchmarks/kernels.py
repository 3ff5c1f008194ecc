"""Measures reduction kernels and codecs on one core, and the same sums in PyTorch where it is installed.

    python -m benchmarks.kernels [--mib 16] [--sources 2] [--op sum] [--rounds 7] [--json]

Rates of reductions are bytes of the result per second, those of codecs bytes of float32 per second. Implementations take turns,
each in one thread; medians are shown. PyTorch adds with `torch.add` and `add_` in the arrays' own dtype, so with more than two
sources of a half type it rounds after each addition.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.options import amount, count
from ferrorpc.kernels.reduction import HalfKernel, Kernel, kernel
from ferrorpc.kernels.registry import available
from ferrorpc.types import DType, ReduceOp, refusal
from ferrorpc.wire.codecs import CODEC_NAMES, codec

SHOWN = (DType.INT8, DType.INT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64)

Ways = dict[str, Callable[[], Any]]


def loaded_torch() -> Any:
    """PyTorch with one thread, or None where it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)
    return torch


def sources_of(dtype: DType, size_bytes: int, count: int) -> list[np.ndarray]:
    """Arrays of small integers, which every dtype can represent, and their sums, too."""
    rng = np.random.default_rng(0)
    arrays = [rng.integers(1, 3, size_bytes // dtype.itemsize) for _ in range(count)]
    if dtype is DType.BFLOAT16:
        return [(array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for array in arrays]
    return [array.astype(dtype.storage) for array in arrays]


def ways_to_reduce(chosen: Kernel, sources: list[np.ndarray], out: np.ndarray, torch: Any) -> Ways:
    """Every implementation of a kernel, and PyTorch's for sums."""
    if isinstance(chosen, HalfKernel):
        ways: Ways = {
            name: partial(chosen.reduce_with, make(), sources, out) for name, make in reversed(available(chosen.dtype).items())
        }
    else:
        ways = {"numpy": partial(chosen.reduce, sources, out)}
    if torch is not None and chosen.op is ReduceOp.SUM and len(sources) > 1:
        tensors = [tensor_of(torch, chosen.dtype, array) for array in (*sources, out)]
        ways["torch.add_"] = partial(add_with_torch, torch, tensors[:-1], tensors[-1])
    return ways


def tensor_of(torch: Any, dtype: DType, array: np.ndarray) -> Any:
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if dtype is DType.BFLOAT16 else torch.from_numpy(array)


def add_with_torch(torch: Any, tensors: list[Any], out: Any) -> None:
    torch.add(tensors[0], tensors[1], out=out)
    for tensor in tensors[2:]:
        out.add_(tensor)


def ways_to_code(name: str, values: np.ndarray) -> Ways:
    chosen = codec(name)
    return {"encode": partial(chosen.encode, values), "decode": partial(chosen.decode, chosen.encode(values), values.size)}


def rates(ways: Ways, size_bytes: int, rounds: int) -> dict[str, float]:
    """Bytes per nanosecond of each implementation, the median of alternating rounds, in which small arrays are repeated."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    repetitions = max(1, (1 << 22) // size_bytes)
    for turn in range(rounds + 1):
        for name, way in ways.items():
            start = time.thread_time()
            for _ in range(repetitions):
                way()
            if turn:
                times[name].append((time.thread_time() - start) / repetitions)
    return {name: size_bytes / statistics.median(found) / 1e9 for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mib", type=amount, default=16, help="MiB of each array")
    parser.add_argument("--sources", type=count, default=2)
    parser.add_argument("--op", choices=[op.value for op in ReduceOp], default="sum")
    parser.add_argument("--rounds", type=count, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    size_bytes, op = int(arguments.mib * (1 << 20)), ReduceOp(arguments.op)
    torch = loaded_torch()
    rows = []
    for dtype in SHOWN:
        if refusal(op, dtype) is None:
            sources = sources_of(dtype, size_bytes, arguments.sources)
            ways = ways_to_reduce(kernel(op, dtype, arguments.sources), sources, np.empty_like(sources[0]), torch)
            rows.append({"what": f"{op.value} {dtype.label}", **rates(ways, size_bytes, arguments.rounds)})
    values = np.random.default_rng(0).standard_normal(size_bytes // 4).astype(np.float32)
    for name in CODEC_NAMES:
        rows.append({"what": f"codec {name}", **rates(ways_to_code(name, values), size_bytes, arguments.rounds)})
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    version = "no torch" if torch is None else f"torch {torch.__version__}"
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs, NumPy {np.__version__}, {version}; GB/s")
    for row in rows:
        found = "  ".join(f"{name} {value:6.2f}" for name, value in row.items() if name != "what")
        print(f"{row['what']:>20}  {found}")


if __name__ == "__main__":
    sys.exit(main())
