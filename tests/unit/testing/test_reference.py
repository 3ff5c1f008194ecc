"""Comparisons with reference results: bit for bit, or up to rounding."""

from __future__ import annotations

import numpy as np
import pytest

from ferrorpc.testing.reference import check_list, check_near, check_same, values
from ferrorpc.types import DType

ONES = np.ones(3, np.float32)


@pytest.mark.parametrize("check", [check_same, check_near])
@pytest.mark.parametrize("found", [[1.0] * 3, np.ones(3), np.ones((3, 1), np.float32), ONES * 1.1, ONES.view(np.int32), None])
def test_what_is_another_array_fails(check, found):
    with pytest.raises(AssertionError):
        check(found, ONES)


def test_bits_decide_and_rounding_does_not_count_where_values_do():
    nan = np.array([np.nan], np.float32)
    check_same(nan, nan.copy())
    check_near(nan, nan.copy())
    rounded = np.nextafter(ONES, np.float32(2))
    check_near(rounded, ONES)
    for found, expected in ((rounded, ONES), (np.array([-0.0]), np.array([0.0]))):
        with pytest.raises(AssertionError, match="elements differ"):
            check_same(found, expected)


def test_a_list_is_as_long_as_expected_and_says_which_item_differs():
    check_list([ONES, ONES], [ONES, ONES])
    for wrong in ((ONES, ONES), [ONES], [ONES] * 3):
        with pytest.raises(AssertionError, match="is no list of 2 arrays"):
            check_list(wrong, [ONES, ONES])
    with pytest.raises(AssertionError, match="item 1"):
        check_list([ONES, ONES + 1], [ONES, ONES])


@pytest.mark.parametrize("count", [3, 10_000])
def test_arrays_are_the_callers_own_and_the_same_whenever_asked_for(count: int) -> None:
    first = values(DType.FLOAT32, count, rank=1)
    as_drawn = first.copy()
    first[...] = 0
    check_same(values(DType.FLOAT32, count, rank=1), as_drawn)
    assert as_drawn.tobytes() != values(DType.FLOAT32, count, rank=2).tobytes()
