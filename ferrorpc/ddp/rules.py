"""Update rules of optimizers, as functions of flat arrays that work element by element and in place.

Every operation is one correctly rounded NumPy function, so an element has the same bits however the arrays are divided.
SGD with momentum is Polyak's, as torch has it; Adam is that of Kingma and Ba, "Adam: A Method for Stochastic Optimization",
2015, with the decoupled weight decay of Loshchilov and Hutter, 2019. Memory: `slots` arrays like the weights,
and two more while an update runs.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeAlias

import numpy as np

from ferrorpc.errors import UsageError

__all__ = ["SGD", "Adam", "Rule"]

Array: TypeAlias = np.ndarray[Any, Any]


class Rule(Protocol):
    """Updates weights. Its repr must be the same on all ranks, apart from addresses.

    Attributes:
        slots: how many state arrays it needs for each array of weights. They begin as zeros.
    """

    @property
    def slots(self) -> int: ...

    def __call__(self, weights: Array, gradient: Array, memory: Sequence[Array], step: int, /) -> None:
        """Updates weights in place.

        Args:
            weights: float32 or float64 of shape (n,).
            gradient: the same; not modified.
            memory: `slots` state arrays of the same dtype and shape, updated in place.
            step: the number of this step, from 1.
        """


@dataclass(frozen=True, slots=True)
class SGD:
    """velocity = momentum * velocity + gradient; weights -= rate * velocity.

    Attributes:
        decay: the factor of the weights that are added to the gradient.
    """

    rate: float
    momentum: float = 0.9
    decay: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self)

    @property
    def slots(self) -> int:
        """See `Rule`: one, the velocity."""
        return 1

    def __call__(self, weights: Array, gradient: Array, memory: Sequence[Array], step: int) -> None:
        """See `Rule`."""
        (velocity,), real = memory, weights.dtype.type
        velocity *= real(self.momentum)
        velocity += gradient
        if self.decay:
            velocity += real(self.decay) * weights
        weights -= real(self.rate) * velocity


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam, with decoupled weight decay (AdamW) if `decay` is not 0."""

    rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    decay: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)!r} is no share", hint="pass a number from 0 to below 1")

    @property
    def slots(self) -> int:
        """See `Rule`: two, the means of the gradient and of its square."""
        return 2

    def __call__(self, weights: Array, gradient: Array, memory: Sequence[Array], step: int) -> None:
        """See `Rule`."""
        (first, second), real = memory, weights.dtype.type
        if self.decay:
            weights *= real(1 - self.rate * self.decay)
        first *= real(self.beta1)
        first += real(1 - self.beta1) * gradient
        second *= real(self.beta2)
        scratch = np.multiply(gradient, gradient)
        scratch *= real(1 - self.beta2)
        second += scratch
        np.sqrt(second, out=scratch)
        scratch /= real((1 - self.beta2**step) ** 0.5)
        scratch += real(self.epsilon)
        np.divide(first, scratch, out=scratch)
        scratch *= real(self.rate / (1 - self.beta1**step))
        weights -= scratch


def _check_numbers(rule: SGD | Adam) -> None:
    for each in fields(rule):
        value = getattr(rule, each.name)
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise UsageError(f"{each.name}={value!r} is no number", hint="pass a number, such as rate=1e-3")
