"""Tied weights whose copies are on one rank, and gradients that a caller gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ferrorpc.ddp.parameter import Parameter
from ferrorpc.errors import UsageError
from ferrorpc.pipeline.runtime import Pipeline
from ferrorpc.testing import run_world
from tests.unit.pipeline.test_tied_weights import ONES, InPlace, OwnArray, Times, total

TIED = [("0/weight", "1/weight")]


def ignore(piece: int) -> None:
    """Does nothing with complete gradients."""


def test_a_copy_that_is_replaced_by_another_value_is_an_error():
    def body(group):
        stages = Times(2.0), Times(2.0)
        pipe = Pipeline(stages, group, "zbv", 2, tied=TIED)
        pipe.step(ONES, ONES, total, reduction="sum")
        stages[1].weight = Parameter(np.array([3.0]))
        with pytest.raises(UsageError, match="differ, since one of them was replaced"):
            pipe.step(ONES, ONES, total, reduction="sum")

    run_world(1, body)


def test_a_step_that_cannot_begin_leaves_the_gradients_of_the_last_one():
    def body(group):
        stages = Times(2.0), Times(2.0)
        pipe = Pipeline(stages, group, "zbv", 2, tied=TIED)
        for each in stages:
            each.weight.grad = np.array([5.0])
        pipe.step(ONES, ONES, total, reduction="sum")
        stages[0].named_parameters = lambda: iter([("original", stages[0].weight)])
        with pytest.raises(UsageError, match="is not there any more"):
            pipe.step(ONES, ONES, total, reduction="sum")
        return [each.weight.grad.item() for each in stages]

    assert run_world(1, body) == [[21.0, 21.0]]


class FullMemory(Parameter):
    """A parameter whose gradient cannot be set once, if `is_full`."""

    is_full = False

    def __setattr__(self, name: str, value: object) -> None:
        if name == "grad" and self.is_full:
            self.is_full = False
            raise MemoryError
        super().__setattr__(name, value)


def test_a_failure_while_gradients_are_set_aside_leaves_those_of_the_last_step():
    def body(group):
        stages = Times(2.0), Times(2.0, FullMemory(np.array([2.0])))
        pipe = Pipeline(stages, group, "zbv", 2, tied=TIED)
        pipe.step(ONES, ONES, total, reduction="sum")
        stages[1].weight.is_full = True
        with pytest.raises(MemoryError):
            pipe.step(ONES, ONES, total, reduction="sum")
        return [each.weight.grad.item() for each in stages]

    assert run_world(1, body) == [[16.0, 16.0]]


@pytest.mark.parametrize("make", [Times, InPlace, OwnArray])
def test_a_failure_after_the_sums_leaves_the_gradients_of_the_last_step(make):
    def refuse(piece: int) -> None:
        raise ValueError(f"no room for stage {piece}")

    def body(group):
        stages = make(2.0), make(2.0)
        pipe = Pipeline(stages, group, "zbv", 2, tied=TIED)
        pipe.step(ONES, ONES, total, reduction="sum")
        with pytest.raises(ValueError, match="no room for stage 0"):
            pipe.step(ONES, ONES, total, reduction="sum", on_gradients=refuse)
        return [each.weight.grad.item() for each in stages]

    assert run_world(1, body) == [[16.0, 16.0]]


def test_a_shared_weight_may_be_replaced_for_all_of_its_stages():
    def body(group):
        shared = Parameter(np.array([2.0]))
        stages = Times(2.0, shared), Times(2.0, shared)
        pipe = Pipeline(stages, group, "zbv", 2, tied=TIED)
        pipe.step(ONES, ONES, total, reduction="sum", on_gradients=ignore)
        stages[0].weight = stages[1].weight = Parameter(np.array([2.0]))
        pipe.step(ONES, ONES, total, reduction="sum", on_gradients=ignore)
        return stages[0].weight.grad.item()

    assert run_world(1, body) == [16.0]


def test_a_frozen_weight_that_two_stages_share_needs_no_tie():
    class Frozen(Parameter):
        requires_grad = False

    def body(group):
        shared = Frozen(np.array([2.0]))
        pipe = Pipeline([Times(2.0, shared), Times(2.0, shared)], group, "zbv", 2)
        pipe.step(ONES, ONES, total, reduction="sum", on_gradients=ignore)

    run_world(1, body)


@pytest.mark.parametrize(
    ("gradient", "options", "message"),
    [(np.ones((4, 2)), {}, "grads: has shape"), (np.ones(4), {"on_gradients": 3}, "on_gradients=3 is no function")],
)
def test_a_backward_that_does_not_fit_is_refused_and_the_forward_waits_for_another(
    gradient: np.ndarray, options: dict[str, Any], message: str
):
    def body(group):
        stage = Times(2.0)
        pipe = Pipeline(stage, group, "gpipe", 2)
        outputs = pipe.forward(ONES)
        with pytest.raises(UsageError, match=message):
            pipe.backward(outputs, gradient, **options)
        pipe.backward(outputs, np.ones(4))
        return stage.weight.grad.item()

    assert run_world(1, body) == [4.0]
