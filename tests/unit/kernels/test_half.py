"""Every available converter between half types and float32, compared with NumPy's casts and ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ferrorpc.kernels.half import BLOCK_ELEMENTS, Converter, NumpyBFloat16, NumpyFloat16
from ferrorpc.types import DType, ReduceOp

HALVES = (DType.FLOAT16, DType.BFLOAT16)
EVERY_HALF = np.arange(1 << 16, dtype=np.uint16)
LOWER_HALVES = [top << 13 | low for top in range(8) for low in (0x0, 0x1, 0x0FFF, 0x1000, 0x1001, 0x1FFF)]
"""With every upper half, these give each boundary between two half values and its neighbours, for every exponent."""


def makers():
    """The names and factories of all converters that this environment can make."""
    found = [("numpy", NumpyFloat16), ("numpy", NumpyBFloat16), ("ml_dtypes", lambda: NumpyBFloat16(ml_dtypes))]
    try:
        import torch
    except ImportError:
        return found
    from ferrorpc.kernels.half_torch import TorchBFloat16, TorchFloat16

    found += [("torch", lambda: TorchFloat16(torch)), ("torch", lambda: TorchBFloat16(torch))]
    return [*found, ("torch+ml_dtypes", lambda: TorchBFloat16(torch, ml_dtypes))]


every_converter = pytest.mark.parametrize(
    "make", [pytest.param(make, id=f"{name}-{make().dtype.label}") for name, make in makers()]
)


def logical(converter: Converter) -> np.dtype:
    return np.dtype(np.float16 if converter.dtype is DType.FLOAT16 else ml_dtypes.bfloat16)


def reference_of(converter: Converter, wide: np.ndarray) -> np.ndarray:
    """The bits that `wide` rounds to: the cast of NumPy or ml_dtypes, and for NaN its upper bits, made quiet."""
    with np.errstate(all="ignore"):
        expected = wide.astype(logical(converter)).view(np.uint16)
    bits = wide.view(np.uint32)
    quiet = {
        DType.FLOAT16: (bits >> 16 & 0x8000) | 0x7E00 | (bits >> 13 & 0x01FF),
        DType.BFLOAT16: (bits >> 16) | 0x0040,
    }[converter.dtype]
    return np.where(np.isnan(wide), quiet, expected).astype(np.uint16)


# Some processors (arm64) report the conversion of a signalling NaN.
silent = pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")


@silent
@every_converter
def test_every_half_widens_exactly_and_comes_back(make):
    converter = make()
    wide = np.empty(1 << 16, np.float32)
    converter.widen_all(wide, EVERY_HALF.view(converter.dtype.storage))
    ordered = ~np.isnan(wide)
    reference = EVERY_HALF.view(logical(converter)).astype(np.float32)
    assert np.array_equal(wide[ordered].view(np.uint32), reference[ordered].view(np.uint32))
    assert np.array_equal(np.isnan(reference), ~ordered)
    back = np.empty(1 << 16, converter.dtype.storage)
    converter.narrow_all(back, wide)
    quiet = 0x0200 if converter.dtype is DType.FLOAT16 else 0x0040
    assert np.array_equal(back.view(np.uint16), np.where(ordered, EVERY_HALF, EVERY_HALF | quiet))


@silent
@every_converter
def test_blocks_of_finite_values_alone_widen_exactly(make):
    converter = make()
    values = EVERY_HALF.view(logical(converter))
    finite = EVERY_HALF[np.isfinite(values.astype(np.float32))]
    wide = np.empty(finite.shape, np.float32)
    converter.widen_all(wide, finite.view(converter.dtype.storage))
    assert np.array_equal(wide.view(np.uint32), finite.view(values.dtype).astype(np.float32).view(np.uint32))


def test_subnormals_widen_where_the_processor_flushes_them_to_zero():
    torch = pytest.importorskip("torch")
    subnormal = np.arange(1, 1024, dtype=np.uint16)
    expected = subnormal.view(np.float16).astype(np.float32)
    wide = np.empty(subnormal.shape, np.float32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals to zero")
    try:
        NumpyFloat16().widen_all(wide, subnormal.view(np.float16))
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(wide.view(np.uint32), expected.view(np.uint32))


@every_converter
def test_narrowing_rounds_to_nearest_even_at_every_boundary(make):
    converter = make()
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    narrow = np.empty(1 << 16, converter.dtype.storage)
    for lower in LOWER_HALVES:
        wide = (upper | lower).view(np.float32)
        converter.narrow_all(narrow, wide)
        assert np.array_equal(narrow.view(np.uint16), reference_of(converter, wide)), hex(lower)


@every_converter
@pytest.mark.parametrize("length", [0, 1, 5, 1_025, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS + 3])
def test_blocks_join_without_a_seam(make, length):
    converter = make()
    wide = np.linspace(-3, 3, length, dtype=np.float32)
    wide[length // 2 :: 7] = np.nan
    narrow = np.zeros(length, converter.dtype.storage)
    narrow.flags.writeable = True
    converter.narrow_all(narrow, wide)
    assert np.array_equal(narrow.view(np.uint16), reference_of(converter, wide))
    narrow.flags.writeable = False
    back = np.empty(length, np.float32)
    converter.widen_all(back, narrow)
    assert np.array_equal(back, narrow.view(logical(converter)).astype(np.float32), equal_nan=True)


@every_converter
def test_arrays_may_lie_at_odd_addresses(make):
    converter = make()
    wide = np.linspace(-9, 9, BLOCK_ELEMENTS + 5, dtype=np.float32)
    narrow = np.empty(2 * wide.size + 1, np.uint8)[1:].view(converter.dtype.storage)
    assert not narrow.flags.aligned
    converter.narrow_all(narrow, wide)
    assert np.array_equal(narrow.view(np.uint16), reference_of(converter, wide))
    back = np.empty_like(wide)
    converter.widen_all(back, narrow)
    assert np.array_equal(back, narrow.view(logical(converter)).astype(np.float32))
    assert converter.fold_two(ReduceOp.SUM, narrow, narrow, narrow) == 0


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PRODUCT])
@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.label)
def test_fold_two_rounds_once_and_returns_how_many_elements_are_done(dtype, op, threads):
    torch = pytest.importorskip("torch")
    from ferrorpc.kernels.half_torch import TorchBFloat16, TorchFloat16

    converter = TorchFloat16(torch) if dtype is DType.FLOAT16 else TorchBFloat16(torch)
    length = 9 * BLOCK_ELEMENTS + 64 + 7
    rng = np.random.default_rng(3)
    left, right = (np.empty(length, dtype.storage) for _ in range(2))
    for narrow in (left, right):
        converter.narrow_all(narrow, rng.standard_normal(length).astype(np.float32))
    if dtype is DType.FLOAT16:
        left.view(np.uint16)[-71:-7] = 0x7C01  # signalling NaN, which PyTorch's scalar code turns into different NaN
    wide = [array.view(logical(converter)).astype(np.float32) for array in (left, right)]
    with np.errstate(all="ignore"):
        expected = reference_of(converter, (np.add if op is ReduceOp.SUM else np.multiply)(*wide))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        own = left.copy()
        for other, out in ((left, np.empty_like(left)), (own, own)):
            untouched = out[-7:].copy()
            assert converter.fold_two(op, other, right, out) == length - 7
            assert np.array_equal(out.view(np.uint16)[:-7], expected[:-7])
            assert out[-7:].tobytes() == untouched.tobytes()
    finally:
        torch.set_num_threads(before)
    assert converter.fold_two(ReduceOp.MAX, left, right, left) == 0
    assert converter.fold_two(op, left[:100], right[:100], left[:100]) == 0


def test_a_stretch_of_bfloat16_with_nan_is_left_unchanged():
    torch = pytest.importorskip("torch")
    from ferrorpc.kernels.half_torch import TorchBFloat16

    converter = TorchBFloat16(torch)
    for nan in (0x7FC1, 0xFFC1):
        ones = np.full(20 * BLOCK_ELEMENTS, 0x3F80, np.uint16)
        left = ones.copy()
        left[-1] = nan
        done = converter.fold_two(ReduceOp.SUM, left, ones, left)
        assert 0 < done < left.size
        assert set(left[:done].tolist()) == {0x4000}
        assert np.array_equal(left[done:-1], ones[done:-1])
        assert left[-1] == nan
