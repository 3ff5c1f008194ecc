"""Launches the CUDA kernels on CuPy arrays, in the current stream.

Arrays are C-contiguous, on the current device and in storage dtypes (bfloat16 as uint16). Dtypes are separate arguments,
because the storage dtype does not determine them. No call waits for the GPU. The source is compiled when a `DeviceKernels` is
made, which takes a few seconds of a processor; CuPy keeps the result in its cache on disk (CUPY_CACHE_DIR) for later processes.

The addresses of many arrays are passed to a kernel by value, because copying them to the device would take longer than the
kernel. CuPy passes a NumPy array of shape () by value, and its element may be a structure.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final

import numpy as np

from ferrorpc.kernels.cuda.program import NAMES, compiled
from ferrorpc.kernels.int8_blocks import BLOCK_VALUES
from ferrorpc.kernels.thread_state import THREAD_STATE
from ferrorpc.types import DType

THREADS: Final = 256
QUANTISE_THREADS: Final = 32
BLOCKS_MAX: Final = (1 << 31) - 1
CHUNK: Final = 2048
"""Elements that a thread block processes at a time, as in kernels.cu."""
ROWS: Final = 120
"""Most arrays in one launch. CUDA limits the arguments of a kernel to 4 KiB."""
PEERS: Final = 64
"""How many addresses of peers' arrays are passed by value. Further ones are passed in device memory."""
ROWS_LAYOUT: Final = np.dtype([(name, np.uint64, ROWS) for name in ("arrays", "starts", "counts", "chunks")])
PEERS_LAYOUT: Final = np.dtype([("arrays", np.uint64, PEERS)])

Structure = np.ndarray[Any, Any]
"""An array of shape () whose element is raw bytes. With a structured dtype, CuPy would have NumPy format it at each launch."""


def rows_of(addresses: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> tuple[Structure, int]:
    """`struct Rows` for at most ROWS nonempty arrays, and their number of chunks."""
    places, chunks = _places_of(tuple(starts), tuple(counts))
    room = bytearray(places)
    struct.pack_into(f"{len(addresses)}Q", room, 0, *addresses)
    return _structure(room), chunks


@lru_cache(maxsize=256)
def _places_of(starts: tuple[int, ...], counts: tuple[int, ...]) -> tuple[bytes, int]:
    """As `rows_of`, without the addresses. Kept, because in each step a bucket has the same gradients at other addresses."""
    chunks = [0, *accumulate([-(-count // CHUNK) for count in counts])]
    room = bytearray(ROWS_LAYOUT.itemsize)
    for column, values in enumerate((starts, counts, chunks[:-1]), 1):
        struct.pack_into(f"{len(values)}Q", room, column * ROWS * 8, *values)
    return bytes(room), chunks[-1]


def peers_of(addresses: Sequence[int]) -> Structure:
    """`struct Peers` for the arrays of the first PEERS peers."""
    room = bytearray(PEERS_LAYOUT.itemsize)
    struct.pack_into(f"{min(len(addresses), PEERS)}Q", room, 0, *addresses[:PEERS])
    return _structure(room)


class DeviceKernels:
    """The kernels of one process. Dtypes `of` and `to` are those of one of the PAIRS in program.py.

    Args:
        cupy: the module `cupy`.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._kernel = compiled(cupy)

    def pack(self, arrays: Sequence[Any], starts: Sequence[int], bucket: Any, of: DType, to: DType, scale: float = 1.0) -> None:
        """bucket[start:start + n] = array * scale, for each array of dtype `of`; the bucket is of dtype `to`."""
        self._move("pack", arrays, starts, bucket, of, to, scale)

    def unpack(
        self, arrays: Sequence[Any], starts: Sequence[int], bucket: Any, of: DType, to: DType, scale: float = 1.0
    ) -> None:
        """array[:] = bucket[start:start + n] * scale, for each array of dtype `to`; the bucket is of dtype `of`."""
        self._move("unpack", arrays, starts, bucket, of, to, scale)

    def quantise_int8(self, values: Any, scales: Any, integers: Any) -> None:
        """Quantises float32 values to int8 integers and one float32 scale for every 256 values."""
        blocks = -(-values.size // BLOCK_VALUES)
        if blocks:
            self._run("quantise_int8", blocks, QUANTISE_THREADS, values, values.size, scales, integers)

    def dequantise_int8(self, scales: Any, integers: Any, values: Any) -> None:
        """Restores float32 values from int8 integers and their scales."""
        if values.size:
            self._run("dequantise_int8", _chunks(values.size), THREADS, scales, integers, values.size, values)

    def sum_peers(self, peers: Sequence[Any], out: Any, dtype: DType, divisor: float = 1) -> None:
        """out = (peers[0] + peers[1] + ...) / divisor, in float32, rounded once. `out` may be one of the peers."""
        if out.size:
            addresses = [peer.data.ptr for peer in peers]
            # CuPy frees this in stream order, so after the kernel that reads it.
            more = self._cupy.asarray(np.array(addresses[PEERS:], np.uint64)) if len(addresses) > PEERS else 0
            told = (peers_of(addresses), more, np.int32(len(addresses)))
            single = THREAD_STATE.run(np.float32, divisor)
            self._run(f"sum_peers_{NAMES[dtype]}", _chunks(out.size), THREADS, *told, out.size, out, single)

    def residue(self, values: Any, delivered: Any) -> None:
        """values -= delivered, in float32. If any result is not finite, all of them become zero."""
        if values.size:
            damaged = self._cupy.zeros(1, np.uint32)
            self._run("residue", _chunks(values.size), THREADS, values, delivered, values.size, damaged)
            self._run("forget", _chunks(values.size), THREADS, values, values.size, damaged)

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
        full = [(array.data.ptr, start, array.size) for array, start in zip(arrays, starts, strict=True) if array.size]
        single = THREAD_STATE.run(np.float32, scale)
        for first in range(0, len(full), ROWS):
            some = full[first : first + ROWS]
            rows, chunks = rows_of(*zip(*some, strict=True))
            pair = f"{name}_{NAMES[of]}_{NAMES[to]}"
            self._run(pair, chunks, THREADS, rows, np.int32(len(some)), chunks, bucket, single)

    def _run(self, name: str, blocks: int, threads: int, *arguments: Any) -> None:
        ready = tuple([np.int64(each) if type(each) is int else each for each in arguments])
        self._kernel(name)((min(blocks, BLOCKS_MAX),), (threads,), ready)


def _structure(room: bytearray) -> Structure:
    return np.ndarray((), f"V{len(room)}", room)


def _chunks(count: int) -> int:
    return -(-count // CHUNK)
