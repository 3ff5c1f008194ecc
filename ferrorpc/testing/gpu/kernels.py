"""`cupy.RawModule` for the library's own kernels on fake GPUs. Each launch is queued and computes the reference in NumPy.

Other tests run the CUDA source as C++ on the host and show that it gives the bits of the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ferrorpc.kernels.cuda.folds import FOLDS
from ferrorpc.kernels.cuda.launcher import PEERS_LAYOUT, ROWS_LAYOUT
from ferrorpc.kernels.cuda.program import KERNELS, NAMES
from ferrorpc.kernels.int8_blocks import BLOCK_VALUES
from ferrorpc.testing.gpu import reference
from ferrorpc.testing.gpu.cuda import CUDADriverError, Driver
from ferrorpc.testing.gpu.machine import Gpu, GpuFault
from ferrorpc.types import DType, dtype_named

ARGUMENTS_BYTES_MAX: Final = 4096
DTYPES: Final = {name: dtype for dtype, name in NAMES.items()}

Array = np.ndarray[Any, Any]


class Kernel:
    """One kernel on one GPU. Its arguments are addresses and numbers, as in the CUDA source.

    What it does is the method with the first word of its name; the other words are its types.
    """

    def __init__(self, gpu: Gpu, name: str) -> None:
        self._gpu = gpu
        verb, *self._words = name.split("_")
        self._run: Callable[..., None] = getattr(self, f"_{verb}")

    def __call__(self, *arguments: Any) -> None:
        self._run(*arguments)

    def _at(self, address: int, count: int, storage: Any) -> Array:
        """A view of `count` elements of the GPU's memory at an address."""
        dtype = np.dtype(storage)
        return self._gpu.bytes_at(int(address), int(count) * dtype.itemsize).view(dtype)

    def _rows(self, rows: Array, size: int) -> Any:
        told = rows.view(ROWS_LAYOUT)[()]
        return zip(*(told[column][:size].tolist() for column in ("arrays", "starts", "counts")), strict=True)

    def _pack(self, rows: Array, size: int, chunks: int, bucket: int, scale: float) -> None:
        of, to = (DTYPES[word] for word in self._words)
        for address, start, count in self._rows(rows, size):
            place = self._at(bucket + start * to.itemsize, count, to.storage)
            reference.pack([self._at(address, count, of.storage)], [0], place, of, to, scale)

    def _unpack(self, rows: Array, size: int, chunks: int, bucket: int, scale: float) -> None:
        of, to = (DTYPES[word] for word in self._words)
        for address, start, count in self._rows(rows, size):
            place = self._at(bucket + start * of.itemsize, count, of.storage)
            reference.unpack([self._at(address, count, to.storage)], [0], place, of, to, scale)

    def _quantise(self, values: int, count: int, scales: int, integers: int) -> None:
        found = reference.quantise_int8(self._at(values, count, np.float32))
        self._at(scales, len(found[0]), np.float32)[:] = found[0]
        self._at(integers, count, np.int8)[:] = found[1]

    def _dequantise(self, scales: int, integers: int, count: int, values: int) -> None:
        blocks = -(-count // BLOCK_VALUES)
        found = reference.dequantise_int8(self._at(scales, blocks, np.float32), self._at(integers, count, np.int8))
        self._at(values, count, np.float32)[:] = found

    def _residue(self, values: int, delivered: int, count: int, damaged: int) -> None:
        place, one = self._at(values, count, np.float32), self._at(delivered, count, np.float32)
        with np.errstate(all="ignore"):
            place -= one
        if not np.isfinite(place).all():
            self._at(damaged, 1, np.uint32)[:] = 1

    def _forget(self, values: int, count: int, damaged: int) -> None:
        if self._at(damaged, 1, np.uint32)[0]:
            self._at(values, count, np.float32)[:] = 0

    def _sum(self, peers: Array, more: int, size: int, count: int, out: int, divisor: float) -> None:
        dtype: DType = DTYPES[self._words[-1]]
        first = peers.view(PEERS_LAYOUT)[()]["arrays"][:size].tolist()
        addresses = first + self._at(more, size - len(first), np.uint64).tolist()
        arrays = [self._at(address, count, dtype.storage) for address in addresses]
        self._at(out, count, dtype.storage)[:] = reference.sum_peers(arrays, dtype, divisor)

    def _fold(self, bases: int, size: int, offset: int, count: int, target: int, divisor: float) -> None:
        operator, element = self._words
        storage = dtype_named(element).storage
        arrays = [self._at(start + offset, count, storage) for start in self._at(bases, size, np.uint64).tolist()]
        self._at(target, count, storage)[:] = reference.folded(arrays, operator, element, divisor)


def _passed(argument: Any) -> Any:
    """The value that a kernel receives for an argument: the address of a GPU array, otherwise the value at launch time."""
    if isinstance(argument, np.ndarray):
        if argument.ndim:
            raise TypeError(f"NumPy arrays without dimensions are passed by value, and none of shape {argument.shape}")
        return argument.copy()
    return argument.item() if isinstance(argument, np.generic) else argument.data.ptr


def raw_module(driver: Driver) -> Callable[..., Any]:
    """`cupy.RawModule` on these GPUs."""

    class RawModule:
        """A module that knows only the library's own kernels, and ignores the source."""

        def __init__(self, code: str, options: tuple[str, ...] = ()) -> None:
            self._gpu = driver.gpu

        def compile(self, log_stream: Any = None) -> None:
            """Does nothing: there is no source."""

        def get_function(self, name: str) -> Callable[..., None]:
            """A kernel by name."""
            if name not in (*KERNELS, *FOLDS):
                raise ValueError(f"no kernel is called {name}")
            kernel = Kernel(self._gpu, name)

            def launch(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
                ready = [_passed(each) for each in arguments]
                size_bytes = sum(each.nbytes if isinstance(each, np.ndarray) else 8 for each in ready)
                if size_bytes > ARGUMENTS_BYTES_MAX:
                    raise GpuFault(f"{size_bytes} bytes of arguments, and CUDA takes at most {ARGUMENTS_BYTES_MAX}")
                if driver.machine.failure:
                    raise CUDADriverError(driver.machine.failure)

                def run() -> bool:
                    kernel(*ready)
                    return True

                driver.stream.enqueue(run)

            return launch

    return RawModule
