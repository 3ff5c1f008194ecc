"""`Kernel.reduce` gives the bits of folding one array at a time, wherever the result is written."""

from __future__ import annotations

import threading
import tracemalloc
import warnings

import numpy as np
import pytest

from ferrorpc.kernels.half import BLOCK_ELEMENTS
from ferrorpc.kernels.reduction import HalfKernel, kernel
from ferrorpc.kernels.registry import available
from ferrorpc.kernels.thread_state import BLOCK_BYTES
from ferrorpc.types import DType, ReduceOp
from tests.unit.kernels.values import ALLOWED, fold_of, hard_ranks, ranks


def block_of(dtype: DType) -> int:
    """The number of elements in a block."""
    return BLOCK_BYTES // (4 if dtype.is_half else dtype.itemsize)


def reduce_of(op: ReduceOp, dtype: DType, arrays: list[np.ndarray]) -> np.ndarray:
    out = np.empty(arrays[0].shape, dtype.storage)
    kernel(op, dtype, len(arrays)).reduce(arrays, out)
    return out


@pytest.mark.parametrize(("op", "dtype"), ALLOWED, ids=lambda value: value.name.lower())
def test_reduce_has_the_bits_of_load_fold_and_finish(op, dtype):
    for count, length in [(1, 100), (2, 0), (2, 1), (2, 1000), (3, 1), (4, 1000), (8, 67), (3, 2 * block_of(dtype) + 1)]:
        arrays = hard_ranks(dtype, count, length)
        assert reduce_of(op, dtype, arrays).tobytes() == fold_of(op, dtype, arrays).tobytes(), (count, length)


@pytest.mark.parametrize(("op", "dtype"), ALLOWED, ids=lambda value: value.name.lower())
def test_result_may_be_the_memory_of_any_source(op, dtype):
    for count, length in [(1, 9), (2, 9), (2, 1), (3, 1), (4, 500), (3, block_of(dtype) + 1)]:
        given = hard_ranks(dtype, count, length)
        expected = fold_of(op, dtype, given).tobytes()
        for own in range(count):
            arrays = [array.copy() for array in given]
            for other in range(count):
                arrays[other].flags.writeable = other == own
            kernel(op, dtype, count).reduce(arrays, arrays[own])
            assert arrays[own].tobytes() == expected, (count, length, own)
            for other in set(range(count)) - {own}:
                assert arrays[other].tobytes() == given[other].tobytes()


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.COMPLEX64, DType.FLOAT16, DType.BFLOAT16], ids=lambda d: d.label)
def test_arithmetic_is_silent_whatever_error_state_the_caller_has_set(dtype):
    arrays = hard_ranks(dtype, 3, 2000)
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        for op in (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PRODUCT):
            for count in (1, 2, 3):
                reduce_of(op, dtype, arrays[:count])
        assert set(np.geterr().values()) == {"raise"}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PRODUCT, ReduceOp.MAX])
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16], ids=lambda d: d.label)
def test_halves_have_the_same_bits_whatever_converts_them(op, dtype, count):
    chosen = kernel(op, dtype, count)
    assert isinstance(chosen, HalfKernel)
    for length in (5, 3_000, 9 * BLOCK_ELEMENTS + 1):
        arrays = hard_ranks(dtype, count, length)
        found = set()
        for make in available(dtype).values():
            out = np.empty_like(arrays[0])
            chosen.reduce_with(make(), arrays, out)
            found.add(out.tobytes())
        assert found == {fold_of(op, dtype, arrays).tobytes()}


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN])
@pytest.mark.parametrize(
    "dtype", [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.COMPLEX64, DType.FLOAT64], ids=lambda d: d.label
)
def test_nothing_is_allocated_once_warm(op, dtype):
    arrays = ranks(dtype, 4, 200_000)
    out = np.empty_like(arrays[0])
    chosen = kernel(op, dtype, 4)
    chosen.reduce(arrays, out)
    tracemalloc.start()
    try:
        chosen.reduce(arrays, out)
        assert tracemalloc.get_traced_memory()[1] < 16_384
    finally:
        tracemalloc.stop()


def test_threads_do_not_share_scratch():
    arrays = hard_ranks(DType.BFLOAT16, 3, 100_000)
    reversed_arrays = arrays[::-1]
    expected = [reduce_of(ReduceOp.PRODUCT, DType.BFLOAT16, given).tobytes() for given in (arrays, reversed_arrays)]
    found: list[list[bytes]] = [[], []]
    start = threading.Barrier(2)

    def work(which: int, given: list[np.ndarray]) -> None:
        start.wait(10)
        found[which] = [reduce_of(ReduceOp.PRODUCT, DType.BFLOAT16, given).tobytes() for _ in range(20)]

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate((arrays, reversed_arrays))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [set(results) for results in found] == [{expected[0]}, {expected[1]}]
