"""The element arithmetic of the fake NCCL."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import reduce as fold
from typing import Any, Final

import numpy as np

from ferrorpc.backends.device.communicator import DataType, Op
from ferrorpc.testing.gpu.machine import Gpu

Array = np.ndarray[Any, Any]

_FOLDS: Final[dict[Op, Callable[[Array, Array], Array]]] = {
    Op.SUM: np.add,
    Op.MEAN: np.add,
    Op.PRODUCT: np.multiply,
    Op.MAX: np.fmax,
    Op.MIN: np.fmin,
}


def reduced(arrays: list[Array], op: Op, datatype: DataType) -> Array:
    """Reduces all ranks' arrays to one. The fold of element i begins at rank i modulo the number of ranks.

    As in NCCL, MAX and MIN pass over NaN.
    """
    wide = [_wide(array, datatype) for array in arrays]
    size = len(wide)
    total = np.empty_like(wide[0])
    with np.errstate(all="ignore"):
        for first in range(min(size, total.size)):
            turn = itertools.islice(itertools.cycle(wide), first, first + size)
            total[first::size] = fold(_FOLDS[op], [array[first::size] for array in turn])
        if op is Op.MEAN:
            total = total / total.dtype.type(size)
        return _narrow(total, datatype)


def storage_of(datatype: DataType) -> np.dtype[Any]:
    """The NumPy dtype of the same name; uint16 for bfloat16."""
    return np.dtype("uint16" if datatype is DataType.BFLOAT16 else datatype.name.lower())


def elements_at(gpu: Gpu, address: int, count: int, datatype: DataType) -> Array:
    """`count` elements at an address, as a view of the GPU's memory. Raises GpuFault for an illegal address."""
    storage = storage_of(datatype)
    return gpu.bytes_at(address, count * storage.itemsize).view(storage)


def _wide(values: Array, datatype: DataType) -> Array:
    if datatype is DataType.BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32) if datatype is DataType.FLOAT16 else values


def _narrow(values: Array, datatype: DataType) -> Array:
    if datatype is DataType.BFLOAT16:
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return values.astype(storage_of(datatype))
