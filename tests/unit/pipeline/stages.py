"""Stages in NumPy, and their training in one process, which pipelines are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ferrorpc.ddp.parameter import Parameter
from ferrorpc.pipeline.batch import split

WIDTH = 6


class Layer:
    """y = tanh(x @ weight + bias), with a whole and a split backward."""

    def __init__(self, number: int, dtype=np.float64) -> None:
        rng = np.random.default_rng(number)
        self.weight = Parameter(rng.standard_normal((WIDTH, WIDTH)).astype(dtype) / 2)
        self.bias = Parameter(rng.standard_normal(WIDTH).astype(dtype) / 2)

    def parameters(self) -> Iterator[Parameter]:
        return iter((self.weight, self.bias))

    def forward(self, x):
        y = np.tanh(x @ self.weight.data + self.bias.data)
        return y, (x, y)

    def backward(self, context, grad_y):
        grad_x = self.backward_input(context, grad_y)
        self.backward_weight(context, grad_y)
        return grad_x

    def backward_input(self, context, grad_y):
        _, y = context
        return (grad_y * (1 - y * y)) @ self.weight.data.T

    def backward_weight(self, context, grad_y):
        x, y = context
        inner = grad_y * (1 - y * y)
        add(self.weight, x.T @ inner)
        add(self.bias, inner.sum(axis=0))


class WholeLayer:
    """The same with only a whole backward."""

    def __init__(self, number: int) -> None:
        self._layer = Layer(number)
        self.parameters = self._layer.parameters
        self.forward = self._layer.forward
        self.backward = self._layer.backward


def add(parameter: Parameter, grad: np.ndarray) -> None:
    parameter.grad = grad if parameter.grad is None else parameter.grad + grad


def half_square(y, target):
    """The mean of |y - target|^2 / 2 over rows, and its gradient."""
    return float(0.5 * ((y - target) ** 2).sum() / len(y)), (y - target) / len(y)


def half_square_sum(y, target):
    """The same as a sum."""
    return float(0.5 * ((y - target) ** 2).sum()), y - target


def batch(rows: int, seed: int = 0, dtype=np.float64) -> tuple[np.ndarray, np.ndarray]:
    """x and target."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, WIDTH)).astype(dtype), rng.standard_normal((rows, WIDTH)).astype(dtype)


def one_process(stages: Sequence[Any], x, target, loss_fn: Callable, microbatches: int, mean: bool = True) -> float:
    """Runs microbatches one after the other, backward right after forward. Gradients are in the stages."""
    total = 0.0
    for part, wanted in zip(split(x, microbatches, "x"), split(target, microbatches, "target"), strict=True):
        y, contexts = part, []
        for stage in stages:
            y, context = stage.forward(y)
            contexts.append(context)
        loss, grad = loss_fn(y, wanted)
        share = len(wanted) / len(target) if mean else 1.0
        total += loss * share
        grad = grad * share if share != 1.0 else grad
        for stage, context in zip(reversed(stages), reversed(contexts), strict=True):
            grad = stage.backward(context, grad)
    return total


def gradients(stages: Sequence[Any]) -> list[np.ndarray]:
    return [parameter.grad for stage in stages for parameter in stage.parameters()]


def descend(stages: Sequence[Any]) -> None:
    """Takes a step of gradient descent, and clears the gradients."""
    for parameter in (parameter for stage in stages for parameter in stage.parameters()):
        parameter.data -= 0.1 * parameter.grad
        parameter.grad = None
