"""A minimal module for DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ferrorpc.ddp.parameter import Parameter


class Plain:
    """Parameters by name; forward multiplies."""

    def __init__(self, **arrays) -> None:
        self.named = {name: Parameter(array, name=name) for name, array in arrays.items()}
        self.training = True

    def parameters(self) -> Iterator[Parameter]:
        return iter(self.named.values())

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        return iter(self.named.items())

    def forward(self, x, scale=1):
        return x * scale

    def train(self):
        self.training = True
        return self

    def eval(self):
        self.training = False
        return self

    def __getitem__(self, name: str) -> Parameter:
        return self.named[name]


def gradients(rank: int, shapes: dict[str, tuple[int, ...]], dtype=np.float32) -> dict[str, np.ndarray]:
    """One rank's gradients, with the rank as seed."""
    rng = np.random.default_rng(rank)
    return {name: np.asarray(rng.standard_normal(shape)).astype(dtype) for name, shape in shapes.items()}
