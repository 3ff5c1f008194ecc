"""Parameters: weights with their gradient."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard

import numpy as np


class HasGradient(Protocol):
    """What a module's parameters must have. `Parameter` and torch's parameters have it."""

    data: Any
    """The weights, an array that is updated in place."""
    grad: Any
    """Their gradient, an array of the same dtype and shape; None if there is none."""


def is_parameter(given: Any) -> TypeGuard[HasGradient]:
    """Whether it has `grad` and `data`. Bare arrays have no `grad`; `data` of a NumPy array of bfloat16 would raise."""
    return hasattr(given, "grad") and hasattr(given, "data")


class Parameter:
    """Weights and their gradient.

    Args:
        data: the weights, an array of any kind; numbers and lists become NumPy arrays.
        grad: their gradient, or None.
        name: for display; DistributedDataParallel uses the module's names.
    """

    __slots__ = ("data", "grad", "name")

    def __init__(self, data: Any, grad: Any = None, name: str = "") -> None:
        self.data = np.asarray(data) if isinstance(data, int | float | complex | list | tuple | np.generic) else data
        self.grad = grad
        self.name = name

    def __repr__(self) -> str:
        state = "no gradient" if self.grad is None else "with gradient"
        label = f"{self.name}: " if self.name else ""
        return f"<Parameter {label}{getattr(self.data, 'dtype', '?')}{list(getattr(self.data, 'shape', ()))}, {state}>"
