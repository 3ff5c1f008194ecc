"""Batch normalisation over uneven batches, compared with one process that has all rows."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ferrorpc import batch_norm, batch_norm_gradient
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.testing import run_world

ROWS = [4, 0, 1, 7]


def rows_of(rank: int, dtype=np.float64) -> np.ndarray:
    """(rows, 3 channels, 2), far from zero, where sums of squares would cancel."""
    return (np.random.default_rng(rank).standard_normal((ROWS[rank], 3, 2)) + 1e4).astype(dtype)


def test_statistics_of_uneven_batches_are_those_of_one_process_and_the_same_bits_on_all_ranks():
    everything = np.concatenate([rows_of(rank) for rank in range(4)])

    def body(group):
        found = batch_norm(rows_of(group.rank), group)
        assert found.y.shape == rows_of(group.rank).shape
        return found

    results = run_world(4, body)
    for found in results:
        assert found.moments.values == 12 * 2
        assert found.moments.mean.tobytes() == results[0].moments.mean.tobytes()
        assert found.moments.variance.tobytes() == results[0].moments.variance.tobytes()
    np.testing.assert_allclose(results[0].moments.mean, everything.mean(axis=(0, 2)), rtol=1e-14)
    np.testing.assert_allclose(results[0].moments.variance, everything.var(axis=(0, 2)), rtol=1e-10)
    y = np.concatenate([found.y for found in results])
    np.testing.assert_allclose(y.mean(axis=(0, 2)), 0, atol=1e-9)
    np.testing.assert_allclose(y.var(axis=(0, 2)), 1, rtol=1e-4)


def test_the_gradient_is_that_of_finite_differences_across_ranks():
    """The loss of all ranks, sum(c * y), as a function of one value on one rank."""
    factors = [np.random.default_rng(50 + rank).standard_normal((ROWS[rank], 3, 2)) for rank in range(4)]

    def loss(values):
        everything = np.concatenate(values)
        mean, variance = everything.mean(axis=(0, 2), keepdims=True), everything.var(axis=(0, 2), keepdims=True)
        return float((np.concatenate(factors) * (everything - mean) / np.sqrt(variance + 1e-5)).sum())

    def body(group):
        forward = batch_norm(rows_of(group.rank) - 1e4, group)
        return batch_norm_gradient(factors[group.rank], forward, group)

    results = run_world(4, body)
    values = [rows_of(rank) - 1e4 for rank in range(4)]
    for rank, index in [(0, (1, 2, 0)), (2, (0, 0, 1)), (3, (6, 1, 1))]:
        step, shifted = 1e-5, [[array.copy() for array in values] for _ in range(2)]
        shifted[0][rank][index] += step
        shifted[1][rank][index] -= step
        slope = (loss(shifted[0]) - loss(shifted[1])) / (2 * step)
        np.testing.assert_allclose(results[rank][index], slope, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_channels_last_in_other_dtypes(dtype):
    def body(group):
        x = np.arange(12, dtype=np.float32).reshape(4, 3).astype(dtype) * (group.rank + 1)
        forward = batch_norm(x, group, axis=-1)
        gradient = batch_norm_gradient(np.ones((4, 3), dtype), forward, group)
        assert forward.y.dtype == gradient.dtype == dtype
        assert forward.y.shape == gradient.shape == (4, 3)
        assert np.abs(gradient.astype(np.float32)).max() < 1e-6, "a shift of all values changes nothing"
        return forward.y.astype(np.float64)

    y = np.concatenate(run_world(2, body))
    np.testing.assert_allclose(y.mean(axis=0), 0, atol=1e-2)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda group: batch_norm(np.ones((1, 3)), None), "is no ProcessGroup"),
        (lambda group: batch_norm(group, np.ones((1, 3))), "is no ProcessGroup"),
        (lambda group: batch_norm(np.ones((1, 3)), group, axis="channels"), "axis='channels' is no whole number"),
        (lambda group: batch_norm(np.ones((1, 3)), group, epsilon=-1), "epsilon=-1 is no number of 0 or more"),
        (lambda group: batch_norm(np.ones((1, 3)), group, epsilon="small"), "epsilon='small'"),
        (lambda group: batch_norm([[1.0]], group), "list is no array"),
        (lambda group: batch_norm_gradient(np.ones((1, 3)), np.ones((1, 3)), group), r"ndarray\ntry: .*not its y alone"),
        (lambda group: batch_norm_gradient(np.ones((1, 3)), batch_norm(np.ones((1, 3)), group), 3), "is no ProcessGroup"),
    ],
)
def test_wrong_arguments_say_what_to_pass(call, said):
    def body(group):
        with pytest.raises(UsageError, match=said):
            call(group)

    run_world(1, body)


def test_what_cannot_be_normalised_is_refused():
    def body(group):
        with pytest.raises(TensorMismatchError, match="axis 1"):
            batch_norm(np.zeros(3), group)
        with pytest.raises(TensorMismatchError, match="no channels of real floats"):
            batch_norm(np.zeros((3, 3), np.int64), group)
        with pytest.raises(TensorMismatchError, match="channels: 2, 3"):
            batch_norm(np.zeros((1, 2 + group.rank)), group)
        with pytest.raises(UsageError, match="no rank"):
            batch_norm(np.zeros((0, 3)), group)
        forward = batch_norm(np.ones((1, 3)), group)
        with pytest.raises(TensorMismatchError, match="y was"):
            batch_norm_gradient(np.ones((2, 3)), forward, group)

    run_world(2, body)


def test_values_without_statistics_become_nan_without_a_warning():
    def body(group):
        forward = batch_norm(np.array([[np.inf, 1.0], [2.0, 1.0]]), group, epsilon=0)
        gradient = batch_norm_gradient(np.ones((2, 2)), forward, group)
        return np.isnan(forward.y).all() and np.isnan(gradient).all()

    assert run_world(2, body) == [True, True]
