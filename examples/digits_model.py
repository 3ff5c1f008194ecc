"""A small neural network written in plain NumPy or CuPy, for the other examples to train.

It shows everything that DistributedDataParallel needs of a module:

    parameters()         the parameters, each with .data (the weights) and .grad (their gradient, or None)
    named_parameters()   the same as (name, parameter) pairs, with equal names in equal order on every rank
    forward(x)           called when the wrapped module is called
    train(), eval()      switch between training and evaluation mode; both return the module

The backward pass is not part of that. This file has one written by hand; ferrorpc only looks at the gradients in .grad.

Arguments called `xp` are the array module: numpy or cupy. Random numbers are drawn by NumPy in both cases, so that training
begins with the same weights and drops the same features out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ferrorpc

Array = NDArray[np.float32]


class Linear:
    """y = x @ weight + bias.

    Args:
        inputs, outputs: the number of features.
        random: draws the initial weights (Glorot's uniform distribution, which suits tanh).
    """

    def __init__(self, inputs: int, outputs: int, random: np.random.Generator, xp: Any = np) -> None:
        bound = np.sqrt(6 / (inputs + outputs))
        self.weight = ferrorpc.Parameter(xp.asarray(random.uniform(-bound, bound, (inputs, outputs)).astype(np.float32)))
        self.bias = ferrorpc.Parameter(xp.zeros(outputs, np.float32))
        self._x: Array | None = None

    def forward(self, x: Array) -> Array:
        """(batch, inputs) -> (batch, outputs). Keeps x for `backward`."""
        self._x = x
        y: Array = x @ self.weight.data + self.bias.data
        return y

    def backward(self, grad_y: Array) -> Array:
        """Adds to the gradients of weight and bias. Returns the gradient of x, (batch, inputs)."""
        assert self._x is not None, "backward follows forward"
        accumulate(self.weight, self._x.T @ grad_y)
        accumulate(self.bias, grad_y.sum(axis=0))
        grad_x: Array = grad_y @ self.weight.data.T
        return grad_x


class DigitsNet:
    """A multi-layer perceptron: linear layers with tanh between them, and dropout before the last one during training.

    Args:
        widths: the features of each layer, beginning with the input: (64, 48, 10).
        seed: for the initial weights and dropout. DistributedDataParallel broadcasts rank 0's weights, so it may differ
            between ranks.
        dropout: the share of hidden features that are set to zero during training.
        xp: the array module.
    """

    def __init__(self, widths: Sequence[int], seed: int, dropout: float = 0.1, xp: Any = np) -> None:
        self._xp = xp
        self._random = np.random.default_rng(seed)
        self.layers = [Linear(inputs, outputs, self._random, xp) for inputs, outputs in pairwise(widths)]
        self.dropout = dropout
        self.training = True
        self._hidden: list[Array] = []
        self._kept: Array | None = None

    def named_parameters(self) -> Iterator[tuple[str, ferrorpc.Parameter]]:
        """("layers.0.weight", parameter) and so on, from the input to the output."""
        for index, layer in enumerate(self.layers):
            yield f"layers.{index}.weight", layer.weight
            yield f"layers.{index}.bias", layer.bias

    def parameters(self) -> Iterator[ferrorpc.Parameter]:
        """The parameters alone, in the same order."""
        return (parameter for _, parameter in self.named_parameters())

    def train(self, mode: bool = True) -> DigitsNet:
        """Switches to training (dropout on)."""
        self.training = mode
        return self

    def eval(self) -> DigitsNet:
        """Switches to evaluation (dropout off)."""
        return self.train(False)

    def forward(self, x: Array) -> Array:
        """(batch, widths[0]) -> logits, (batch, widths[-1])."""
        self._hidden = []
        for layer in self.layers[:-1]:
            x = self._xp.tanh(layer.forward(x))
            self._hidden.append(x)
        self._kept = None
        if self.training and self.dropout > 0:
            kept = (self._random.random(x.shape) >= self.dropout).astype(np.float32) / np.float32(1 - self.dropout)
            self._kept = self._xp.asarray(kept)
            x = x * self._kept
        return self.layers[-1].forward(x)

    def backward(self, grad_logits: Array) -> None:
        """Adds to every parameter's .grad, given the gradient of the logits."""
        grad = self.layers[-1].backward(grad_logits)
        if self._kept is not None:
            grad = grad * self._kept
        for layer, hidden in zip(reversed(self.layers[:-1]), reversed(self._hidden), strict=True):
            grad = layer.backward(grad * (1 - hidden * hidden))  # the derivative of tanh


def accumulate(parameter: ferrorpc.Parameter, grad: Array) -> None:
    """Adds to a parameter's gradient, so that several backward passes can precede one optimizer step."""
    parameter.grad = grad if parameter.grad is None else parameter.grad + grad


def softmax_cross_entropy(logits: Array, labels: NDArray[np.integer[Any]], xp: Any = np) -> tuple[float, Array]:
    """The mean cross entropy of a batch.

    Args:
        logits: (batch, classes).
        labels: (batch,), the correct class of each row.
        xp: the array module of both.

    Returns:
        The loss, and the gradient of the logits, (batch, classes).
    """
    rows = xp.arange(len(labels))
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probabilities = shifted - xp.log(xp.exp(shifted).sum(axis=1, keepdims=True))
    grad = xp.exp(log_probabilities)
    grad[rows, labels] -= 1
    return float(-log_probabilities[rows, labels].mean()), grad / np.float32(len(labels))


class Momentum:
    """Stochastic gradient descent with momentum: velocity = momentum * velocity + grad; data -= rate * velocity."""

    def __init__(self, parameters: Iterator[ferrorpc.Parameter], rate: float, momentum: float = 0.9, xp: Any = np) -> None:
        self._parameters = list(parameters)
        self.velocities = [xp.zeros_like(parameter.data) for parameter in self._parameters]
        self._rate = np.float32(rate)
        self._momentum = np.float32(momentum)

    def step(self) -> None:
        """Applies the gradients, and clears them."""
        for parameter, velocity in zip(self._parameters, self.velocities, strict=True):
            velocity *= self._momentum
            velocity += parameter.grad
            parameter.data -= self._rate * velocity
            parameter.grad = None
