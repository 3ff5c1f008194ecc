"""Whether a converter of a half type has the bits of NumPy's on this processor, tried before its first use.

Libraries use whatever instructions the processor has, and there are some that flush subnormals (bfloat16 on recent x86). So
everything is tried that instructions may treat in their own way: each half value widened; float32 with every upper half, on and
next to every boundary between two half values, narrowed; each half value combined with others. It takes about 10 ms.
"""

from __future__ import annotations

import itertools
from typing import Final

import numpy as np

from ferrorpc.kernels.half import BLOCK_ELEMENTS, Array, Converter
from ferrorpc.kernels.thread_state import THREAD_STATE
from ferrorpc.types import DType, ReduceOp

_LOWER_HALVES: Final = (0x0, 0x1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
"""Under every upper half of a float32 these lie on, just below and just above the boundaries between two half values."""

_DISTANCES: Final = (0, 1_025, 32_769)
"""Between the bits of two half values that are combined."""


def is_exact(candidate: Converter, reference: Converter) -> bool:
    """Whether `candidate` gives the bits of `reference`, which is of the same dtype."""
    return (
        _widens_alike(candidate, reference)
        and all(_narrows_alike(candidate, reference, lower) for lower in _LOWER_HALVES)
        and all(_folds_alike(candidate, reference, distance) for distance in _DISTANCES)
    )


def _every_half(dtype: DType) -> Array:
    """Every value, in whole blocks."""
    return np.resize(np.arange(1 << 16, dtype=np.uint16), 3 * BLOCK_ELEMENTS).view(dtype.storage)


def _widened(by: Converter, narrow: Array) -> Array:
    wide = np.empty(narrow.shape, np.float32)
    by.widen_all(wide, narrow)
    return wide


def _narrowed(by: Converter, wide: Array) -> Array:
    narrow = np.empty(wide.shape, by.dtype.storage)
    by.narrow_all(narrow, wide)
    return narrow


def _widens_alike(candidate: Converter, reference: Converter) -> bool:
    every = _every_half(reference.dtype)
    return _widened(candidate, every).tobytes() == _widened(reference, every).tobytes()


def _narrows_alike(candidate: Converter, reference: Converter, lower: int) -> bool:
    wide = (np.arange(1 << 16, dtype=np.uint32) << 16 | lower).view(np.float32)
    return _narrowed(candidate, wide).tobytes() == _narrowed(reference, wide).tobytes()


def _folds_alike(candidate: Converter, reference: Converter, distance: int) -> bool:
    """What the candidate leaves to others counts as alike. So all is tried with NaN, then without any."""
    every = _every_half(reference.dtype)
    for (op, ufunc), with_nan in itertools.product(((ReduceOp.SUM, np.add), (ReduceOp.PRODUCT, np.multiply)), (True, False)):
        left, right = np.roll(every, distance), every.copy()
        wide_left, wide_right = _widened(reference, left), _widened(reference, right)
        if with_nan:
            replaced = np.isnan(wide_left) & np.isnan(wide_right)  # which of two NaN is kept is open
        else:
            replaced = np.isnan(THREAD_STATE.run(ufunc, wide_left, wide_right))
        wide_left[replaced] = wide_right[replaced] = left[replaced] = right[replaced] = 0
        expected = _narrowed(reference, THREAD_STATE.run(ufunc, wide_left, wide_right))
        found = expected.copy()
        candidate.fold_two(op, left, right, found)
        if found.tobytes() != expected.tobytes():
            return False
    return True
