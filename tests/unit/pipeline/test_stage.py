"""Stages, and the kind of arrays they compute with."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ferrorpc.pipeline.runtime import Pipeline
from ferrorpc.testing import run_world


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
