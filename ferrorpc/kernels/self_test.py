"""Tests before its first use whether a converter of a half type gives the same bits as the NumPy converter on this processor.

Libraries use the instructions that the processor has, and some of these flush subnormals (bfloat16 on recent x86). The test
covers every case that instructions may treat differently. It widens each half value, narrows float32 values with every upper
half on and next to every boundary between two half values, and reduces each half value with others. It takes about 10 ms.
"""

from __future__ import annotations

import itertools
from typing import Final

import numpy as np

from ferrorpc.kernels.half import BLOCK_ELEMENTS, Array, Converter
from ferrorpc.kernels.thread_state import THREAD_STATE
from ferrorpc.types import DType, ReduceOp

_LOWER_HALVES: Final = (0x0, 0x1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
"""Lower halves of float32. With any upper half, they lie on, just below and just above boundaries between two half values."""

_DISTANCES: Final = (0, 1_025, 32_769)
"""Differences between the bits of the two half values that are reduced."""


def is_exact(candidate: Converter, reference: Converter) -> bool:
    """Whether `candidate` gives the same bits as `reference`, which has the same dtype."""
    return (
        _widens_alike(candidate, reference)
        and all(_narrows_alike(candidate, reference, lower) for lower in _LOWER_HALVES)
        and all(_folds_alike(candidate, reference, distance) for distance in _DISTANCES)
    )


def _every_half(dtype: DType) -> Array:
    """Every value of a half type, repeated to fill whole blocks."""
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
    """Compares `fold_two`. Elements that it leaves to the caller count as equal, so it runs once with NaN and once without."""
    every = _every_half(reference.dtype)
    for (op, ufunc), with_nan in itertools.product(((ReduceOp.SUM, np.add), (ReduceOp.PRODUCT, np.multiply)), (True, False)):
        left, right = np.roll(every, distance), every.copy()
        wide_left, wide_right = _widened(reference, left), _widened(reference, right)
        if with_nan:
            replaced = np.isnan(wide_left) & np.isnan(wide_right)  # either of two NaN may be kept
        else:
            replaced = np.isnan(THREAD_STATE.run(ufunc, wide_left, wide_right))
        wide_left[replaced] = wide_right[replaced] = left[replaced] = right[replaced] = 0
        expected = _narrowed(reference, THREAD_STATE.run(ufunc, wide_left, wide_right))
        found = expected.copy()
        candidate.fold_two(op, left, right, found)
        if found.tobytes() != expected.tobytes():
            return False
    return True
