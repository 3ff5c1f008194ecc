"""Kernels compared with references: NumPy's arithmetic, Python integers and fractions, and ml_dtypes for bfloat16."""

from __future__ import annotations

import itertools
import warnings
from fractions import Fraction
from functools import reduce

import ml_dtypes
import numpy as np
import pytest

from ferrorpc.errors import TensorMismatchError
from ferrorpc.kernels.half import BLOCK_ELEMENTS
from ferrorpc.kernels.reduction import kernel
from ferrorpc.testing.reference import divided
from ferrorpc.types import DType, ReduceOp
from tests.unit.kernels.values import ALLOWED, REFUSED, fold_of, logical, ranks

LENGTHS = (0, 1, 7, 1000, BLOCK_ELEMENTS + 3)

NUMPY = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


def expected_of(op: ReduceOp, dtype: DType, arrays: list[np.ndarray]) -> np.ndarray:
    """The reduction in NumPy: half types are widened by ml_dtypes or NumPy, folded in float32 and rounded once."""
    wide = [a.view(logical(dtype)).astype(np.float32) if dtype.is_half else a for a in arrays]
    total = reduce(NUMPY[op], wide)
    if op is ReduceOp.MEAN:
        total = divided(total, len(arrays))
    return total.astype(logical(dtype)).view(dtype.storage)


@pytest.mark.parametrize(("op", "dtype"), ALLOWED, ids=lambda value: value.name.lower())
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_fold_in_rank_order_has_the_bits_of_numpy(op, dtype, count):
    for length in LENGTHS:
        arrays = ranks(dtype, count, length)
        assert fold_of(op, dtype, arrays).tobytes() == expected_of(op, dtype, arrays).tobytes()


@pytest.mark.parametrize(("op", "dtype"), ALLOWED, ids=lambda value: value.name.lower())
def test_bits_do_not_depend_on_where_an_array_is_cut(op, dtype):
    """Algorithms and transports split arrays differently, so each element must have the same bits in any slice."""
    arrays = ranks(dtype, 4, 67)
    whole = fold_of(op, dtype, arrays)
    for start, stop in itertools.chain(zip(range(67), range(1, 68), strict=True), [(0, 5), (5, 38), (38, 67)]):
        part = fold_of(op, dtype, [array[start:stop] for array in arrays])
        assert part.tobytes() == whole[start:stop].tobytes()


@pytest.mark.parametrize(("op", "dtype"), REFUSED, ids=lambda value: value.name.lower())
def test_operator_without_meaning_is_refused_with_the_reason(op, dtype):
    with pytest.raises(TensorMismatchError, match=dtype.label):
        kernel(op, dtype, 2)


@pytest.mark.parametrize(("op", "dtype"), ALLOWED, ids=lambda value: value.name.lower())
def test_a_fold_under_is_one_with_the_operands_exchanged(op, dtype):
    low, high = ranks(dtype, 2, 1000)
    chosen = kernel(op, dtype, 2)
    forward, backward = np.empty(1000, chosen.work), np.empty(1000, chosen.work)
    chosen.load(forward, low)
    chosen.fold(forward, high)
    chosen.load(backward, high)
    chosen.fold(backward, low, under=True)
    assert forward.tobytes() == backward.tobytes()
    wide_low, wide_high = np.empty(1000, chosen.work), np.empty(1000, chosen.work)
    chosen.load(wide_low, low)
    chosen.load(wide_high, high)
    upper = np.empty(1000, chosen.work)
    chosen.load(upper, wide_high)
    chosen.fold(upper, wide_low, under=True)
    chosen.fold(wide_low, wide_high)
    assert wide_low.tobytes() == upper.tobytes() == forward.tobytes()


def test_a_fold_under_keeps_the_zero_of_the_left_operand():
    chosen = kernel(ReduceOp.MIN, DType.FLOAT32, 2)
    plus, minus = np.zeros(100, np.float32), np.full(100, -0.0, np.float32)
    first, second = plus.copy(), minus.copy()
    chosen.fold(first, minus)
    chosen.fold(second, plus, under=True)
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("dtype", [d for d in DType if d.is_integer], ids=lambda d: d.label)
def test_integers_wrap_without_a_warning(dtype):
    info = np.iinfo(dtype.storage)
    arrays = [np.array([info.max, info.min, 3], dtype.storage)] * 3
    bits = info.bits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        total = fold_of(ReduceOp.SUM, dtype, arrays)
        product = fold_of(ReduceOp.PRODUCT, dtype, arrays)
    for value, got_sum, got_product in zip(arrays[0].tolist(), total.tolist(), product.tolist(), strict=True):
        assert (got_sum - 3 * value) % 2**bits == 0
        assert (got_product - value**3) % 2**bits == 0


@pytest.mark.parametrize("dtype", [d for d in DType if d.is_float or d.is_complex], ids=lambda d: d.label)
def test_overflow_and_infinities_are_silent_and_leave_no_state(dtype):
    kind = logical(dtype)
    largest = float(ml_dtypes.finfo(kind).max)
    arrays = [
        np.array([largest, np.inf, 1.0], kind).view(dtype.storage),
        np.array([largest, -np.inf, 1.0], kind).view(dtype.storage),
    ]
    before = np.geterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        total = fold_of(ReduceOp.SUM, dtype, arrays).view(kind)
        fold_of(ReduceOp.PRODUCT, dtype, arrays)
        fold_of(ReduceOp.MEAN, dtype, arrays)
    assert np.geterr() == before
    assert np.isinf(np.real(total[0]).astype(np.float64))
    assert np.isnan(np.real(total[1]).astype(np.float64))


@pytest.mark.parametrize("dtype", [d for d in DType if d.is_complex], ids=lambda d: d.label)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_mean_of_complex_numbers_has_the_quotients_of_their_parts(count, dtype):
    arrays = [np.array([complex(np.inf, 1), complex(5, -0.0), complex(0.1, -np.inf)], dtype.storage) for _ in range(count)]
    found, total = (fold_of(op, dtype, arrays).view(f"f{dtype.itemsize // 2}") for op in (ReduceOp.MEAN, ReduceOp.SUM))
    assert found.tobytes() == (total / total.dtype.type(count)).tobytes()
    assert not np.isnan(found).any()


@pytest.mark.parametrize("dtype", [d for d in DType if d.is_float], ids=lambda d: d.label)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX])
def test_nan_of_any_rank_propagates(op, dtype):
    kind = logical(dtype)
    for where in range(3):
        arrays = [np.ones(5, kind) for _ in range(3)]
        arrays[where][2] = np.nan
        result = fold_of(op, dtype, [a.view(dtype.storage) for a in arrays]).view(kind).astype(np.float64)
        assert np.isnan(result).tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16], ids=lambda d: d.label)
def test_halves_are_rounded_once(dtype):
    """1 plus 8 small values: with rounding after each addition the sum would stay 1; the float32 sum is exact."""
    kind = logical(dtype)
    tiny = float(ml_dtypes.finfo(kind).eps) / 4
    arrays = [np.array([1.0], kind)] + [np.array([tiny], kind)] * 8
    exact = Fraction(1) + 8 * Fraction(tiny)
    total = fold_of(ReduceOp.SUM, dtype, [a.view(dtype.storage) for a in arrays]).view(kind)
    assert Fraction(float(total[0])) == exact


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16], ids=lambda d: d.label)
def test_mean_of_halves_divides_before_rounding(dtype):
    """The sum of the two values overflows the half type; their mean does not."""
    kind = logical(dtype)
    largest = np.array([float(ml_dtypes.finfo(kind).max) * (0.5 if dtype is DType.BFLOAT16 else 1.0)], kind)
    mean = fold_of(ReduceOp.MEAN, dtype, [largest.view(dtype.storage)] * 2)
    assert mean.view(kind)[0] == largest[0]


@pytest.mark.parametrize(
    ("op", "table"),
    [
        (ReduceOp.SUM, [False, True, True, True]),
        (ReduceOp.PRODUCT, [False, False, False, True]),
        (ReduceOp.MIN, [False, False, False, True]),
        (ReduceOp.MAX, [False, True, True, True]),
        (ReduceOp.BAND, [False, False, False, True]),
        (ReduceOp.BOR, [False, True, True, True]),
        (ReduceOp.BXOR, [False, True, True, False]),
    ],
)
def test_bool_follows_the_truth_table(op, table):
    left = np.array([False, False, True, True])
    right = np.array([False, True, False, True])
    assert fold_of(op, DType.BOOL, [left, right]).tolist() == table


def test_finish_in_place_of_work_divides_once():
    chosen = kernel(ReduceOp.MEAN, DType.FLOAT64, 4)
    work = np.array([4.0, 8.0])
    chosen.finish(work, work)
    assert work.tolist() == [1.0, 2.0]
    total = kernel(ReduceOp.SUM, DType.FLOAT64, 4)
    total.finish(work, work)
    assert work.tolist() == [1.0, 2.0]


def test_subnormals_are_not_flushed():
    smallest = np.array([5e-324])
    assert fold_of(ReduceOp.SUM, DType.FLOAT64, [smallest, smallest]).tolist() == [1e-323]
    half = np.array([2.0**-24], np.float16)
    assert fold_of(ReduceOp.SUM, DType.FLOAT16, [half, half]).tolist() == [2.0**-23]


def test_unaligned_messages_are_accepted():
    raw = np.frombuffer(b"\0" + np.arange(5, dtype=np.float64).tobytes(), np.uint8)[1:].view(np.float64)
    assert not raw.flags.aligned
    assert fold_of(ReduceOp.SUM, DType.FLOAT64, [raw, raw]).tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
