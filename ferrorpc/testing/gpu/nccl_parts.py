"""One rank's call of the fake NCCL, and what a collective does once all ranks have made theirs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

import numpy as np

from ferrorpc.backends.device.communicator import DataType, Op
from ferrorpc.testing.gpu.machine import Gpu
from ferrorpc.testing.gpu.reference import narrowed, widened
from ferrorpc.types import DType, dtype_named

Array = np.ndarray[Any, Any]

_FOLDS: Final[dict[Op | None, Callable[[Array, Array], Array]]] = {
    Op.SUM: np.add,
    Op.MEAN: np.add,
    Op.PRODUCT: np.multiply,
    Op.MAX: np.fmax,
    Op.MIN: np.fmin,
}
"""As in NCCL, MAX and MIN pass over NaN."""


@dataclass
class Part:
    """One call of one rank. A group may have several."""

    kind: str
    source: int
    target: int
    count: int
    datatype: DataType
    op: Op | None = None
    peer: int = -1
    """The root, or the other rank of a send or recv; -1 if there is none."""
    given: Array | None = None
    """The input of a rank that receives no result, copied so that the rank can complete before the others."""

    @property
    def agreed(self) -> tuple[object, ...]:
        """The parameters that must be equal on every rank."""
        return self.kind, self.count, self.datatype, self.op, self.peer

    @property
    def dtype(self) -> DType:
        """That of its elements."""
        return dtype_named(self.datatype.name.lower())

    @property
    def size_bytes(self) -> int:
        """Of `count` elements."""
        return self.count * self.dtype.itemsize

    def elements(self, gpu: Gpu, address: int, count: int) -> Array:
        """So many elements at an address, as a view of the GPU's memory. Raises GpuFault for an illegal address."""
        return gpu.bytes_at(address, count * self.dtype.itemsize).view(self.dtype.storage)


def perform(gpus: Sequence[Gpu], parts: dict[int, Part]) -> None:
    """Executes a collective that all ranks have reached.

    Args:
        gpus: those of the ranks.
        parts: the ranks' calls.
    """
    first = parts[0]
    size, kind, count = len(parts), first.kind, first.count

    def read(rank: int, elements: int) -> Array:
        given = parts[rank].given
        return first.elements(gpus[rank], parts[rank].source, elements).copy() if given is None else given

    def write(rank: int, values: Array) -> None:
        first.elements(gpus[rank], parts[rank].target, values.size)[:] = values

    if kind == "broadcast":
        values = read(first.peer, count)
        for rank in set(range(size)) - {first.peer}:
            write(rank, values)
    elif kind == "all_gather":
        values = np.concatenate([read(rank, count) for rank in range(size)])
        for rank in range(size):
            write(rank, values)
    elif kind == "reduce_scatter":
        total = _reduced([read(rank, count * size) for rank in range(size)], first)
        for rank in range(size):
            write(rank, total[rank * count : (rank + 1) * count])
    else:
        total = _reduced([read(rank, count) for rank in range(size)], first)
        for rank in range(size) if kind == "all_reduce" else (first.peer,):
            write(rank, total)


def _reduced(arrays: list[Array], part: Part) -> Array:
    """Reduces all ranks' arrays to one. The fold of element i begins at rank i modulo the number of ranks."""
    wide = [widened(array, part.dtype) for array in arrays]
    size = len(wide)
    total = np.empty_like(wide[0])
    with np.errstate(all="ignore"):
        for first in range(min(size, total.size)):
            turn = itertools.islice(itertools.cycle(wide), first, first + size)
            total[first::size] = reduce(_FOLDS[part.op], [array[first::size] for array in turn])
        if part.op is Op.MEAN:
            total = total / total.dtype.type(size)
        return narrowed(total, part.dtype).astype(part.dtype.storage)
