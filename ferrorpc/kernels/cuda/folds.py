"""Launches the kernels that reduce the parts of all ranks in shared GPU memory, in the current stream.

They are a separate program, because only processes that share GPU memory need to compile it: when a `Folds` is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ferrorpc.kernels.cuda.program import compiled

OPERATORS: Final = ("sum", "product", "max", "min")
ELEMENTS: Final = (
    "int8",
    "uint8",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
)
FOLDS: Final = tuple(f"fold_{operator}_{element}" for element in ELEMENTS for operator in OPERATORS)
THREADS: Final = 256
BYTES_PER_THREAD: Final = 32
BLOCKS_MAX: Final = 4096


class Folds:
    """The fold kernels of one process.

    Args:
        cupy: the module `cupy`.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._kernel = compiled(cupy, "folds.cu")

    def table(self, bases: Sequence[int]) -> Any:
        """A device array of the addresses of every rank's memory, in rank order, for `fold`."""
        return self._cupy.asarray(np.array(bases, np.uint64))

    def fold(
        self, name: str, table: Any, offset_bytes: int, count: int, size_bytes: int, target: int, divisor: float = 1.0
    ) -> None:
        """target[:count] = the fold of every rank's elements, `offset_bytes` after its base, divided by `divisor`.

        Args:
            name: one of FOLDS.
            table: from `table`.
            size_bytes: the size of the `count` elements.
            target: an address on the current device.
        """
        blocks = min(max(1, -(-size_bytes // (THREADS * BYTES_PER_THREAD))), BLOCKS_MAX)
        arguments = (
            table,
            np.int32(len(table)),
            np.int64(offset_bytes),
            np.int64(count),
            np.uint64(target),
            np.float64(divisor),
        )
        self._kernel(name)((blocks,), (THREADS,), arguments)
