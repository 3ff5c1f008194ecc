"""bfloat16 by integer arithmetic, against ml_dtypes: every value one way, every rounding case the other."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ferrorpc.kernels.half import BLOCK_ELEMENTS, narrow_bfloat16, widen_bfloat16


def test_every_bfloat16_widens_exactly():
    every = np.arange(65536, dtype=np.uint16)
    wide = np.empty(65536, np.float32)
    widen_bfloat16(wide, every)
    reference = every.view(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(wide, reference, equal_nan=True)
    back = np.empty_like(every)
    narrow_bfloat16(back, wide)
    ordered = ~np.isnan(wide)
    assert np.array_equal(back[ordered], every[ordered])


def test_narrowing_rounds_to_nearest_even_for_every_upper_half():
    upper = np.arange(65536, dtype=np.uint32) << 16
    for lower in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        wide = (upper | lower).view(np.float32)
        narrow = np.empty(65536, np.uint16)
        narrow_bfloat16(narrow, wide)
        with np.errstate(all="ignore"):
            reference = wide.astype(ml_dtypes.bfloat16)
        ordered = ~np.isnan(wide)
        assert np.array_equal(narrow[ordered], reference.view(np.uint16)[ordered])
        assert np.isnan(narrow.view(ml_dtypes.bfloat16).astype(np.float32)[~ordered]).all()


@pytest.mark.parametrize("length", [0, 1, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS + 1])
def test_blocks_join_without_a_seam(length):
    wide = np.linspace(-3, 3, length, dtype=np.float32)
    narrow = np.empty(length, np.uint16)
    narrow_bfloat16(narrow, wide)
    assert np.array_equal(narrow, wide.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_nan_keeps_its_sign_and_stays_nan_even_when_only_low_bits_are_set():
    wide = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    narrow = np.empty(4, np.uint16)
    narrow_bfloat16(narrow, wide)
    assert narrow.tolist() == [0x7FC0, 0xFFC0, 0x7FFF, 0xFFFF]
