"""A model that is not a chain: an edge skips to the last stage, which has two inputs and a weight tied to the first one's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import mul
from typing import Any

import numpy as np

from ferrorpc.pipeline.batch import scaled, split
from tests.unit.pipeline.stages import Layer


class Joint(Layer):
    """A layer that multiplies several inputs, and returns its output for several stages."""

    def __init__(self, number: int, inputs: int, outputs: int, dtype: Any = np.float64) -> None:
        super().__init__(number, dtype)
        self._inputs, self._outputs = inputs, outputs

    def named_parameters(self):
        return iter((("weight", self.weight), ("bias", self.bias)))

    def forward(self, x):
        factors = x if self._inputs > 1 else (x,)
        y, context = super().forward(reduce(mul, factors))
        return ((y,) * self._outputs if self._outputs > 1 else y), (factors, context)

    def backward_input(self, context, grad_y):
        factors, inner = context
        grad = super().backward_input(inner, self._added(grad_y))
        return tuple(grad * other for other in reversed(factors)) if self._inputs > 1 else grad

    def backward_weight(self, context, grad_y):
        super().backward_weight(context[1], self._added(grad_y))

    def _added(self, grad_y):
        return sum(grad_y[1:], start=grad_y[0]) if self._outputs > 1 else grad_y


def edges_of(pieces: int) -> list[tuple[int, int]]:
    """The edges of a chain, and one from the first piece to the last."""
    return sorted({(0, pieces - 1), *((piece, piece + 1) for piece in range(pieces - 1))})


def ties_of(pieces: int) -> list[tuple[str, str]]:
    """Ties the weight of the first piece to that of the last."""
    return [("0/weight", f"{pieces - 1}/weight")]


def stage_of(number: int, pieces: int, dtype: Any = np.float64) -> Joint:
    """One piece of the model."""
    edges = edges_of(pieces)
    inputs, outputs = (sum(1 for edge in edges if edge[end] == number) for end in (1, 0))
    return Joint(number, max(inputs, 1), max(outputs, 1), dtype)


def whole_model(pieces: int, dtype: Any = np.float64) -> list[Joint]:
    """All pieces; the weight of the last is a copy of that of the first."""
    stages = [stage_of(number, pieces, dtype) for number in range(pieces)]
    stages[-1].weight.data = stages[0].weight.data.copy()
    return stages


def one_process(
    stages: Sequence[Joint],
    x: Any,
    target: Any,
    loss_fn: Callable,
    microbatches: int,
    mean: bool = True,
    skips: bool = True,
    ties: bool = True,
) -> float:
    """Runs microbatches one after the other, backward right after forward. Adds tied gradients in the order of stages."""
    last = len(stages) - 1
    skips = skips and last > 1
    total = 0.0
    for part, wanted in zip(split(x, microbatches, "x"), split(target, microbatches, "target"), strict=True):
        contexts, skipped, value = [], None, part
        for number, stage in enumerate(stages):
            value, context = stage.forward((skipped, value) if skips and number == last else value)
            contexts.append(context)
            if skips and number == 0:
                skipped, value = value
        loss, grad = loss_fn(value, wanted)
        share = len(wanted) / len(target) if mean else 1.0
        total += loss * share
        grad, to_first = scaled(grad, share), None
        for number in range(last, -1, -1):
            grad = stages[number].backward(contexts[number], (grad, to_first) if skips and number == 0 else grad)
            if skips and number == last:
                to_first, grad = grad
    if ties:
        tied = stages[0].weight.grad + stages[-1].weight.grad
        stages[0].weight.grad, stages[-1].weight.grad = tied, tied.copy()
    return total
