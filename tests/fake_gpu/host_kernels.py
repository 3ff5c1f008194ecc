"""The CUDA kernels compiled as C++ for the host: each thread of a block is a thread of its own, with a real barrier.

So what they compute, their indices and their barriers are tried without a GPU; how fast, and what a GPU's own arithmetic does,
is not.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ferrorpc.kernels.cuda.launcher import rows_of
from ferrorpc.kernels.cuda.program import source

_BEFORE = r"""
#include <barrier>
#include <cmath>
#include <memory>
#include <thread>
#include <vector>
struct Index { unsigned x, y, z; };
static thread_local Index threadIdx, blockIdx;
static Index blockDim, gridDim;
static std::unique_ptr<std::barrier<>> together;
#define __device__
#define __global__
#define __grid_constant__
#define __shared__ static
#define __syncthreads() together->arrive_and_wait()
"""
_AFTER = r"""
#include <utility>
template <typename... P, std::size_t... I>
static void spread(void (*kernel)(P...), void **args, std::index_sequence<I...>) { kernel(*(P *)args[I]...); }
template <typename... P>
static void run(void (*kernel)(P...), void **args, unsigned grid_x, unsigned grid_y, unsigned threads) {
  gridDim = {grid_x, grid_y, 1};
  blockDim = {threads, 1, 1};
  for (unsigned y = 0; y < grid_y; ++y)
    for (unsigned x = 0; x < grid_x; ++x) {
      together = std::make_unique<std::barrier<>>(threads);
      std::vector<std::thread> pool;
      for (unsigned t = 0; t < threads; ++t)
        pool.emplace_back([=] {
          threadIdx = {t, 0, 0};
          blockIdx = {x, y, 0};
          spread(kernel, args, std::make_index_sequence<sizeof...(P)>{});
        });
      for (auto &thread : pool) thread.join();
    }
}
"""


class HostKernels:
    """The compiled kernels. `run(name, grid, threads, *args)` is a launch that has ended when it returns."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    def run(self, name: str, grid: tuple[int, int], threads: int, *args: Any) -> None:
        values = [_argument(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in values))
        getattr(self._library, f"run_{name}")(pointers, *grid, threads)


def _argument(arg: Any) -> Any:
    if isinstance(arg, np.ndarray) and arg.dtype.kind == "V":
        return (ctypes.c_char * arg.nbytes).from_buffer_copy(arg.tobytes())
    if isinstance(arg, np.ndarray):
        return ctypes.c_void_p(arg.ctypes.data)
    return ctypes.c_float(arg) if isinstance(arg, float) else ctypes.c_int64(arg)


def addresses(arrays: Sequence[np.ndarray]) -> list[int]:
    """Where arrays begin."""
    return [array.ctypes.data for array in arrays]


def rows(arrays: Sequence[np.ndarray], starts: Sequence[int]) -> tuple[Any, int, int]:
    """What kernels take to know where arrays and their places in a bucket are, and how many chunks there are."""
    full = [(array.ctypes.data, start, array.size) for array, start in zip(arrays, starts, strict=True) if array.size]
    told, chunks = rows_of(*zip(*full, strict=True))
    return told, len(full), chunks


def build(folder: Path, names: Sequence[str], program: str | None = None) -> HostKernels | None:
    """Compiles the library's kernels, or those of another text; None where there is no C++20 compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    entries = "\n".join(
        f'extern "C" void run_{name}(void **args, unsigned x, unsigned y, unsigned n) {{ run({name}, args, x, y, n); }}'
        for name in names
    )
    text, library = folder / "kernels.cpp", folder / "kernels.so"
    text.write_text("\n".join((_BEFORE, source() if program is None else program, _AFTER, entries)))
    options = ["-std=c++20", "-O1", "-ffp-contract=off", "-fno-fast-math", "-shared", "-fPIC", "-pthread"]
    done = subprocess.run([compiler, *options, str(text), "-o", str(library)], capture_output=True, text=True, check=False)
    if "barrier: No such file" in done.stderr:
        return None
    assert done.returncode == 0, done.stderr
    return HostKernels(library)
