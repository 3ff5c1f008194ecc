"""Batches, microbatches and the weights of their losses."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.pipeline.batch import join, loss_weights, scaled, split


def test_a_batch_is_cut_as_numpy_does():
    x = np.arange(14).reshape(7, 2)
    for found, expected in zip(split(x, 3, "x"), np.array_split(x, 3), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_tuples_are_cut_together_and_lists_are_microbatches_already():
    parts = split((np.arange(4), np.arange(8).reshape(4, 2)), 2, "x")
    assert [(a.tolist(), b.tolist()) for a, b in parts] == [([0, 1], [[0, 1], [2, 3]]), ([2, 3], [[4, 5], [6, 7]])]
    parts = split((None, np.arange(4)), 2, "x")
    assert [(a, b.tolist()) for a, b in parts] == [(None, [0, 1]), (None, [2, 3])]
    mine = [np.zeros(3), np.zeros(5)]
    assert split(mine, 2, "x") is mine


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "x is None"),
        ([np.zeros(1)], "a list of 1 microbatches, but the schedule has 4"),
        (np.zeros((3, 2)), "3 rows, too few for 4 microbatches"),
        (np.array(1.0), "without rows"),
        (7, "x is a int without rows"),
        ((np.zeros(4), np.zeros(5)), r"\[4, 5\] rows"),
        ((None, None), r"\[\] rows"),
    ],
)
def test_what_is_no_batch_is_refused(value, message: str):
    with pytest.raises(UsageError, match=message):
        split(value, 4, "x")


def test_outputs_are_joined_along_axis_0():
    first, second = np.ones((2, 3), np.float32), np.zeros((1, 3), np.float32)
    whole = join([first, second], "outputs")
    assert whole.dtype == np.float32
    assert whole.tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert [each.shape for each in join([(first, first), (second, second)], "outputs")] == [(3, 3), (3, 3)]
    left, right = join([(first, None), (second, None)], "outputs")
    assert (left.shape, right) == ((3, 3), None)
    with pytest.raises(TensorMismatchError, match="cannot be joined"):
        join([first, np.zeros((1, 4), np.float32)], "outputs")
    one, two = (first,), (first, first)
    others = [two, one], [one, two], [one, first], [first, one], [two, (first, None)], [two, np.stack(two)]
    for parts in ([np.array(1.0)], *others):
        with pytest.raises(TensorMismatchError, match="cannot be joined"):
            join(parts, "outputs")


def test_a_mean_counts_rows_or_what_weight_says_and_a_sum_counts_all_alike():
    targets = [np.zeros(1), np.zeros(3)]
    assert loss_weights(targets, "mean", None) == [0.25, 0.75]
    assert loss_weights(targets, "mean", lambda target: 10 - len(target)) == [9 / 16, 7 / 16]
    assert loss_weights(targets, "sum", None) == [1.0, 1.0]
    assert loss_weights(targets, "mean", lambda _: 0) == [0.0, 0.0]


@pytest.mark.parametrize("weight", [lambda _: "many", lambda _: 10**400, lambda target: len(target) - 2])
def test_shares_that_make_no_sense_are_refused(weight):
    with pytest.raises(UsageError, match="no share of a batch"):
        loss_weights([np.zeros(1), np.zeros(3)], "mean", weight)


def test_scaling_reaches_into_tuples_and_copies_what_counts_whole():
    grad = np.ones(2, np.float32)
    assert not np.shares_memory(scaled(grad, 1.0), grad)
    assert scaled(None, 0.5) is None
    halved, nothing = scaled((grad, None), 0.5)
    assert (halved.tolist(), halved.dtype, nothing) == ([0.5, 0.5], np.float32, None)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64, np.complex64])
def test_scaling_keeps_the_dtype_of_a_gradient(dtype):
    assert scaled(np.ones(2, dtype), 0.5).dtype == dtype
