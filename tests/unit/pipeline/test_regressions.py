"""Regression tests for the defects of an earlier design of pipelines."""

from __future__ import annotations

import numpy as np
import pytest

from ferrorpc import schedules
from ferrorpc.pipeline.runtime import Pipeline
from ferrorpc.testing import run_world
from tests.unit.pipeline.stages import Layer, batch, gradients, half_square, half_square_sum, one_process


class Cube:
    """Stages of a model x (n, 2, 3) -> (n, 2) -> (n,), whose values change shape at every border."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.weights = np.arange(1.0, 4.0 - number)
        self.gradient = np.zeros(3 - number)

    def forward(self, x):
        return x @ self.weights, x

    def backward(self, context, grad_y):
        assert grad_y.shape == context.shape[:-1]
        self.gradient += np.tensordot(grad_y, context, grad_y.ndim)
        return grad_y[..., None] * self.weights


def test_1f1b_is_not_gpipe_under_another_name():
    """If all forwards came first, as in GPipe, every rank would hold all contexts."""

    def body(group):
        peaks = {}
        for name in ("gpipe", "1f1b"):
            pipe = Pipeline(Layer(group.rank), group, name, 6)
            pipe.step(*batch(6), half_square)
            peaks[name] = pipe.peak_activations
        return peaks

    assert run_world(3, body) == [{"gpipe": 6, "1f1b": 3}, {"gpipe": 6, "1f1b": 2}, {"gpipe": 6, "1f1b": 1}]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb1p"])
def test_earlier_stages_get_the_gradient_of_their_output_in_its_shape(name: str):
    """Zeros in the shape of the later stage's output were sent upstream, so that only the last stage learned. And shapes of one
    dimension or more could not be received."""
    x = np.random.default_rng(0).standard_normal((5, 2, 3))

    def body(group):
        stage = Cube(group.rank)
        pipe = Pipeline(stage, group, name, 4)
        loss = pipe.step(x, np.zeros(5), lambda y, _: (float(y.sum()), np.ones_like(y)), reduction="sum")
        return loss, stage.gradient

    (nothing, first), (loss, second) = run_world(2, body)
    assert nothing is None
    assert loss == pytest.approx(np.einsum("nij,j,i->", x, [1, 2, 3], [1, 2]))
    np.testing.assert_allclose(first, np.einsum("nij,i->j", x, [1, 2]))
    np.testing.assert_allclose(second, np.einsum("nij,j->i", x, [1, 2, 3]))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb1p"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_fn_may_write_each_gradient_to_the_same_array(name: str, reduction: str):
    """With "sum" a gradient that waited for its backward pass was overwritten by the next microbatch's."""
    loss = half_square if reduction == "mean" else half_square_sum

    def body(group):
        stage, buffer = Layer(group.rank), np.empty((2, 6))

        def loss_fn(y, target):
            value, buffer[:] = loss(y, target)
            return value, buffer

        Pipeline(stage, group, name, 3).step(*batch(6), loss_fn, reduction)
        return gradients([stage])

    alone = [Layer(0), Layer(1)]
    one_process(alone, *batch(6), loss, 3, mean=reduction == "mean")
    first, last = run_world(2, body)
    for found, wanted in zip(first + last, gradients(alone), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", schedules.NAMED)
def test_a_batch_that_counts_nothing_is_a_step_like_any_other(name: str):
    """It was an error on the last rank alone, whose later targets then met the inputs of earlier batches."""
    schedule = schedules.named(name, 2, 4)

    def body(group):
        stages = {number: Layer(number) for number in schedule.pieces(group.rank)}
        pipe, losses, complete = Pipeline(list(stages.values()), group, schedule), [], []
        for step in range(3):
            x, target = batch(8, seed=step)
            found = pipe.step(
                x, target, half_square, weight=lambda rows, counts=step != 1: counts * len(rows), on_gradients=complete.append
            )
            losses.append(found)
        assert sorted(complete) == sorted([*stages] * 3)
        return losses, stages

    results = run_world(2, body)
    alone = [Layer(number) for number in range(schedule.virtual_stages)]
    expected = [one_process(alone, *batch(8, seed=step), half_square, 4) if step != 1 else 0.0 for step in range(3)]
    assert results[schedule.placement[-1]][0] == pytest.approx(expected, rel=1e-12)
    pipelined = dict(sorted((results[0][1] | results[1][1]).items()))
    for found, wanted in zip(gradients(pipelined.values()), gradients(alone), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
