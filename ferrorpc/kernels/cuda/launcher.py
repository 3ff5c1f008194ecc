"""Launches the CUDA kernels on CuPy arrays, in the current stream.

Arrays are C-contiguous, on the current device and in storage dtypes (bfloat16 as uint16); dtypes are named apart, because
storage does not tell. Nothing waits. The text is compiled once a process and device, which takes CuPy a fraction of a second
and then its cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ferrorpc.kernels.cuda.program import OPTIONS, source
from ferrorpc.kernels.cuda.reference import BLOCK_VALUES, NAMES
from ferrorpc.types import DType

THREADS: Final = 256
ELEMENTS_PER_THREAD: Final = 8
QUANTISE_THREADS: Final = 32
BLOCKS_MAX: Final = 65_535


class DeviceKernels:
    """The kernels of one process.

    Args:
        cupy: the module `cupy`.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._module = cupy.RawModule(code=source(), options=OPTIONS)
        self._functions: dict[str, Any] = {}

    def pack(self, arrays: Sequence[Any], starts: Sequence[int], bucket: Any, of: DType, to: DType, scale: float = 1.0) -> None:
        """bucket[start:start + n] = array * scale, for each array of dtype `of`; the bucket is of dtype `to`."""
        self._move("pack", arrays, starts, bucket, of, to, scale)

    def unpack(
        self, arrays: Sequence[Any], starts: Sequence[int], bucket: Any, of: DType, to: DType, scale: float = 1.0
    ) -> None:
        """array[:] = bucket[start:start + n] * scale, for each array of dtype `to`; the bucket is of dtype `of`."""
        self._move("unpack", arrays, starts, bucket, of, to, scale)

    def quantise_int8(self, values: Any, scales: Any, integers: Any) -> None:
        """float32 values as one scale for every 256 (float32) and integers (int8)."""
        blocks = -(-values.size // BLOCK_VALUES)
        if blocks:
            self._run("quantise_int8", (min(blocks, BLOCKS_MAX),), QUANTISE_THREADS, values, values.size, scales, integers)

    def dequantise_int8(self, scales: Any, integers: Any, values: Any) -> None:
        """float32 values of blocks of int8."""
        if values.size:
            self._run("dequantise_int8", (_blocks(values.size),), THREADS, scales, integers, values.size, values)

    def sum_peers(self, peers: Sequence[Any], out: Any, dtype: DType, divisor: float = 1) -> None:
        """out = (peers[0] + peers[1] + ...) / divisor, in float32, rounded once. `out` may be one of the peers."""
        if out.size:
            table = self._table([peer.data.ptr for peer in peers], np.uint64)
            name = f"sum_peers_{NAMES[dtype]}"
            self._run(name, (_blocks(out.size),), THREADS, table, np.int32(len(peers)), out.size, out, np.float32(divisor))

    def residue(self, values: Any, delivered: Any) -> None:
        """values -= delivered, float32; zeros where any of it is not finite."""
        if values.size:
            damaged = self._table([0], np.uint32)
            self._run("residue", (_blocks(values.size),), THREADS, values, delivered, values.size, damaged)
            self._run("forget", (_blocks(values.size),), THREADS, values, values.size, damaged)

    def _move(
        self,
        name: str,
        arrays: Sequence[Any],
        starts: Sequence[int],
        bucket: Any,
        of: DType,
        to: DType,
        scale: float,
    ) -> None:
        if len(arrays) > BLOCKS_MAX:  # a grid has no more rows
            self._move(name, arrays[BLOCKS_MAX:], starts[BLOCKS_MAX:], bucket, of, to, scale)
            arrays, starts = arrays[:BLOCKS_MAX], starts[:BLOCKS_MAX]
        largest = max((array.size for array in arrays), default=0)
        if not largest:
            return
        addresses = self._table([array.data.ptr for array in arrays], np.uint64)
        places = self._table(starts, np.int64)
        counts = self._table([array.size for array in arrays], np.int64)
        grid = (_blocks(largest), len(arrays))
        pair = f"{name}_{NAMES[of]}_{NAMES[to]}"
        self._run(pair, grid, THREADS, addresses, places, counts, bucket, np.float32(scale))

    def _table(self, values: Sequence[int], dtype: Any) -> Any:
        """A small array on the device. It is freed in the order of the current stream, so after the kernel that reads it."""
        return self._cupy.asarray(np.array(values, dtype))

    def _run(self, name: str, grid: tuple[int, ...], threads: int, *arguments: Any) -> None:
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = self._module.get_function(name)
        function(grid, (threads,), tuple(np.int64(each) if type(each) is int else each for each in arguments))


def _blocks(count: int) -> int:
    return min(-(-count // (THREADS * ELEMENTS_PER_THREAD)), BLOCKS_MAX)
