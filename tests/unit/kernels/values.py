"""Input arrays for tests of reductions, and the left fold that defines the result."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np

from ferrorpc.kernels.reduction import kernel
from ferrorpc.types import DType, ReduceOp, refusal

ALLOWED = [(op, dtype) for op, dtype in itertools.product(ReduceOp, DType) if refusal(op, dtype) is None]
REFUSED = [(op, dtype) for op, dtype in itertools.product(ReduceOp, DType) if refusal(op, dtype) is not None]


def logical(dtype: DType) -> np.dtype:
    """The dtype of the values: ml_dtypes' bfloat16 for bfloat16, which is stored as uint16, otherwise the storage dtype."""
    return np.dtype(ml_dtypes.bfloat16) if dtype is DType.BFLOAT16 else dtype.storage


def ranks(dtype: DType, count: int, length: int) -> list[np.ndarray]:
    """One random array per rank, in the storage dtype, with values of both signs if the dtype is signed."""
    rng = np.random.default_rng(length * 31 + count)
    kind = logical(dtype)
    if dtype is DType.BOOL:
        return [rng.integers(0, 2, length).astype(bool) for _ in range(count)]
    if dtype.is_integer:
        info = np.iinfo(kind)
        return [rng.integers(info.min, info.max, length, dtype=kind, endpoint=True) for _ in range(count)]
    values = [rng.standard_normal(length) for _ in range(count)]
    if dtype.is_complex:
        values = [value + 1j * rng.standard_normal(length) for value in values]
    return [value.astype(kind).view(dtype.storage) for value in values]


def hard_ranks(dtype: DType, count: int, length: int) -> list[np.ndarray]:
    """As `ranks`, with special values: both zeros, infinities, the largest and smallest normal values, subnormals and NaN.

    Only one rank has a NaN at any index, because an operator may keep either of two NaN.
    """
    arrays = ranks(dtype, count, length)
    if not (dtype.is_float or dtype.is_complex):
        return arrays
    kind = logical(dtype)
    info = ml_dtypes.finfo(kind)
    largest, normal, subnormal = float(info.max), float(info.tiny), float(info.smallest_subnormal)
    special = [0.0, -0.0, np.inf, -np.inf, largest, -largest, normal, -normal, subnormal, -subnormal, 3 * subnormal]
    for rank, array in enumerate(arrays):
        values = np.resize(np.roll(np.repeat(special, rank + 1), rank), array[::3].size)
        filled = values.astype(np.complex128 if dtype.is_complex else kind)
        if dtype.is_complex:
            filled.imag = values[::-1]
        array[::3] = filled.astype(kind).view(dtype.storage)
        nan = np.array([-np.nan if rank % 2 else np.nan], kind).view(dtype.storage)
        array[1 + 3 * rank :: 3 * count] = nan
    return arrays


def fold_of(op: ReduceOp, dtype: DType, arrays: list[np.ndarray]) -> np.ndarray:
    """The kernel's left fold in rank order, with `load`, `fold` and `finish`."""
    chosen = kernel(op, dtype, len(arrays))
    work = np.empty(arrays[0].shape, chosen.work)
    chosen.load(work, arrays[0])
    for array in arrays[1:]:
        chosen.fold(work, array)
    result = np.empty(arrays[0].shape, dtype.storage)
    chosen.finish(result, work)
    return result
