"""The reference implementation of the CUDA kernels in NumPy. kernels.cu and folds.cu must give the same bits.

As elsewhere in the library, bfloat16 is stored as uint16 and float16 as float16. Conversions are those of kernels/half.py.
Whether a sum or a fold is NaN is defined; which NaN it is, is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, Final

import numpy as np

from ferrorpc.kernels.half import NumpyBFloat16, NumpyFloat16
from ferrorpc.kernels.int8_blocks import BLOCK_VALUES
from ferrorpc.types import DType, dtype_named

Array = np.ndarray[Any, Any]

_SMALLEST_SCALE: Final = np.float32(2.0**-126)
_LARGEST_SCALE: Final = np.uint32(0x7C01_0203).view(np.float32)
_OPERATORS: Final[dict[str, Any]] = {"sum": np.add, "product": np.multiply, "max": np.maximum, "min": np.minimum}


def widened(values: Array, dtype: DType) -> Array:
    """Values of a half type as float32, others as they are."""
    if not dtype.is_half:
        return values
    wide = np.empty(values.shape, np.float32)
    (NumpyBFloat16() if dtype is DType.BFLOAT16 else NumpyFloat16()).widen_all(wide, values)
    return wide


def narrowed(values: Array, dtype: DType) -> Array:
    """float32 values in a half type, rounded to nearest, ties to even; for another dtype as they are."""
    if not dtype.is_half:
        return values
    narrow = np.empty(values.shape, dtype.storage)
    (NumpyBFloat16() if dtype is DType.BFLOAT16 else NumpyFloat16()).narrow_all(narrow, values)
    return narrow


def pack(arrays: Sequence[Array], starts: Sequence[int], bucket: Array, of: DType, to: DType, scale: float) -> None:
    """bucket[start:start + n] = array * scale, for each array of dtype `of`; the bucket is of dtype `to`."""
    for array, start in zip(arrays, starts, strict=True):
        bucket[start : start + array.size] = narrowed(_scaled(widened(array, of), scale), to)


def unpack(arrays: Sequence[Array], starts: Sequence[int], bucket: Array, of: DType, to: DType, scale: float) -> None:
    """array[:] = bucket[start:start + n] * scale, for each array of dtype `to`; the bucket is of dtype `of`."""
    for array, start in zip(arrays, starts, strict=True):
        array[:] = narrowed(_scaled(widened(bucket[start : start + array.size], of), scale), to)


def quantise_int8(values: Array) -> tuple[Array, Array]:
    """Quantises float32 values: one float32 scale for every 256 values, and int8 integers."""
    blocks = -(-values.size // BLOCK_VALUES)
    scales, integers = np.empty(blocks, np.float32), np.zeros(values.size, np.int8)
    with np.errstate(all="ignore"):
        for block in range(blocks):
            cut = slice(block * BLOCK_VALUES, (block + 1) * BLOCK_VALUES)
            peak = (values[cut].view(np.uint32) & 0x7FFF_FFFF).max()
            if peak >= 0x7F80_0000:
                scales[block] = np.nan
                continue
            scale = peak.view(np.float32) / np.float32(127)
            scales[block] = scale = min(max(scale, _SMALLEST_SCALE), _LARGEST_SCALE)
            integers[cut] = np.rint(values[cut] / scale).astype(np.int8)
    return scales, integers


def dequantise_int8(scales: Array, integers: Array) -> Array:
    """Restores float32 values from int8 integers and their scales."""
    with np.errstate(all="ignore"):
        values: Array = integers.astype(np.float32) * np.repeat(scales, BLOCK_VALUES)[: integers.size]
        return values


def sum_peers(peers: Sequence[Array], dtype: DType, divisor: float = 1) -> Array:
    """The left fold of the peers' arrays in float32, divided by `divisor`, rounded once."""
    with np.errstate(all="ignore"):
        total: Array = reduce(np.add, [widened(peer, dtype) for peer in peers])
        return narrowed(total if divisor == 1 else total / np.float32(divisor), dtype)


def residue(values: Array, delivered: Array) -> Array:
    """values - delivered, in float32. If any result is not finite, all of them are zero."""
    with np.errstate(all="ignore"):
        rest = values - delivered
    return rest if np.isfinite(rest).all() else np.zeros_like(rest)


def folded(arrays: Sequence[Array], operator: str, element: str, divisor: float) -> Array:
    """The left fold of arrays of a storage dtype, divided by `divisor` if elements are floats, rounded once."""
    dtype = dtype_named(element)
    with np.errstate(all="ignore"):
        total: Array = reduce(_OPERATORS[operator], [widened(array, dtype) for array in arrays])
        if total.dtype.kind == "f" and divisor != 1:
            total = total / total.dtype.type(divisor)
        return narrowed(total, dtype)


def _scaled(values: Array, scale: float) -> Array:
    """values * scale. A NaN becomes quiet and keeps its other bits."""
    with np.errstate(all="ignore"):
        found = values * np.float32(scale)
    nan = np.isnan(values)
    found[nan] = (values[nan].view(np.uint32) | np.uint32(0x40_0000)).view(np.float32)
    return found
