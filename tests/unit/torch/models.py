"""Small torch networks with seeded weights, and reference results of one process."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import nn

WIDTHS = (6, 16, 12, 3)
SMALL_MB = 2e-4
"""A bucket for about every layer."""


def network(seed: int = 0, widths=WIDTHS) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    module = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    return module


def batch(rank: int, step: int = 0, rows: int = 5, width: int = WIDTHS[0]) -> torch.Tensor:
    return torch.rand(rows, width, generator=torch.Generator().manual_seed(1000 * step + rank)) - 0.5


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def reference(size: int, local: Callable[[nn.Module, int], None], make=network) -> dict[str, torch.Tensor | None]:
    """One process: each rank's gradients by itself, added in rank order, then divided."""
    per_rank = []
    for rank in range(size):
        module = make()
        local(module, rank)
        per_rank.append(gradients(module))
    means = {}
    for name in per_rank[0]:
        used = [each[name] for each in per_rank if each[name] is not None]
        means[name] = sum(used[1:], used[0]) / np.float32(size) if used else None
    return means


def check_close(found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]) -> None:
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        got = found[name]
        if wanted is None or got is None:
            assert got is wanted, name
        else:
            assert torch.linalg.vector_norm(got - wanted) <= 1e-6 * torch.linalg.vector_norm(wanted), name


def check_same(results: list[dict[str, torch.Tensor | None]]) -> None:
    """The same bits on every rank."""
    for other in results[1:]:
        for name, tensor in results[0].items():
            assert (tensor is None and other[name] is None) or torch.equal(tensor, other[name]), name
