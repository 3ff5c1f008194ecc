"""Stages, and the kind of arrays they compute with."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from ferrorpc.errors import GroupAbortedError, UsageError
from ferrorpc.pipeline.runtime import Pipeline
from ferrorpc.testing import run_world
from tests.unit.pipeline.stages import Layer, WholeLayer, batch, half_square


class Doubled:
    """y = 2 x. `like` and parameters() tell the kind of its arrays."""

    def __init__(self, like, parameters) -> None:
        self.like = like
        self.parameters = lambda: parameters

    def forward(self, x):
        return x * x.dtype.type(2), None

    def backward(self, context, grad_y):
        return grad_y


@pytest.mark.parametrize("arrays", [(np.zeros(1, ml_dtypes.bfloat16), []), (None, [np.zeros(1, ml_dtypes.bfloat16)])])
def test_a_stage_may_hold_plain_arrays_of_any_dtype(arrays):
    """The `data` of a NumPy array of bfloat16 raises, as Python has no buffers of it."""
    _, y = run_world(2, lambda group: Pipeline(Doubled(*arrays), group, "gpipe", 2).forward(np.ones(3, ml_dtypes.bfloat16)))
    assert y.dtype == ml_dtypes.bfloat16
    assert y.tolist() == [4.0] * 3


@pytest.mark.parametrize("last", [Layer, WholeLayer])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda grad: grad.mean(axis=0), r"stage 1's gradient of x: has shape \(6,\), but x has \(2, 6\)"),
        (lambda grad: grad[:1], r"stage 1's gradient of x: has shape \(1, 6\), but x has \(2, 6\)"),
        (lambda grad: (grad, grad), "stage 1's gradient of x: gave a tuple of gradients, but x is one array"),
    ],
)
def test_a_gradient_that_only_fits_by_broadcasting_is_refused_where_it_was_computed(last, ranks: int, wrong, message: str):
    """Whether the stage before is on this rank or on another one."""
    stages = [Layer(0), last(1)]
    name = "backward_input" if last is Layer else "backward"
    right = getattr(stages[1], name)
    setattr(stages[1], name, lambda context, grad: wrong(right(context, grad)))

    def body(group):
        mine = stages if ranks == 1 else [stages[group.rank]]
        with pytest.raises((UsageError, GroupAbortedError)) as caught:
            Pipeline(mine, group, "zb1p", 2).step(*batch(4), half_square)
        return caught.value

    *others, error = run_world(ranks, body)
    assert isinstance(error, UsageError)
    assert re.search(message, str(error))
    assert all(isinstance(other, GroupAbortedError) and re.search(message, other.cause) for other in others)


def test_a_stage_may_have_no_gradient_of_a_part_of_x():
    class Pair:
        def forward(self, x):
            return (x, x[:, :1]), None

        def backward(self, context, grad_y):
            return grad_y[0]

    class Sum(Layer):
        def forward(self, x):
            return super().forward(x[0])

        def backward_input(self, context, grad_y):
            return super().backward_input(context, grad_y), None

    class PartlyWrong(Sum):
        def backward_input(self, context, grad_y):
            grad_x, _ = super().backward_input(context, grad_y)
            return grad_x, grad_x

    run_world(1, lambda group: Pipeline([Pair(), Sum(1)], group, "zb1p", 2).step(*batch(4), half_square))
    with pytest.raises(UsageError, match=r"stage 1's gradient of x: has shape \(2, 6\), but x has \(2, 1\)"):
        run_world(1, lambda group: Pipeline([Pair(), PartlyWrong(1)], group, "zb1p", 2).step(*batch(4), half_square))


def test_a_stage_may_be_in_several_pipelines_at_several_places():
    """Each tells it anew whether the gradient of x is needed."""

    class Told(Layer):
        needs_grad_x = True

        def forward(self, x):
            y, context = super().forward(x)
            return y, (context, self.needs_grad_x)

        def backward_input(self, context, grad_y):
            told.append((context[1], self.needs_grad_x))
            return super().backward_input(context[0], grad_y)

        def backward_weight(self, context, grad_y):
            super().backward_weight(context[0], grad_y)

        def backward(self, context, grad_y):
            grad_x = self.backward_input(context, grad_y)
            self.backward_weight(context, grad_y)
            return grad_x

    told: list[tuple[bool, bool]] = []

    def body(group):
        first, last = Layer(0), Told(1)
        both = Pipeline([first, last], group, "interleaved", 1)
        alone = Pipeline(last, group, "zb1p", 1)
        for pipe in (both, alone, both):
            pipe.step(*batch(4), half_square)

    run_world(1, body)
    assert told == [(True, True), (False, False), (True, True)]
