"""What is trained with torch on GPUs, in several processes and in one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ferrorpc.arrays.kinds import gpu_of
from ferrorpc.group import ProcessGroup

torch = pytest.importorskip("torch")
DistributedDataParallel = pytest.importorskip("ferrorpc.torch").DistributedDataParallel

STEPS = 5


class Observer(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Has buffers: how many batches it has seen, and the sum of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(1))

    def forward(self, x: Any) -> Any:
        self.batches += 1
        self.total = x.detach().sum().reshape(1)
        return x


def model() -> Any:
    """The same on every rank and in one process."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), Observer(), torch.nn.Tanh(), torch.nn.Linear(16, 8), torch.nn.Linear(8, 2)
    )


def optimizer(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def batches(rank: int) -> Iterator[tuple[Any, Any]]:
    """One rank's, on the host."""
    for step in range(STEPS):
        chance = np.random.default_rng([rank, step])
        drawn = chance.standard_normal((7, 8)).astype(np.float32)
        yield torch.from_numpy(drawn[:, :6].copy()), torch.from_numpy(drawn[:, 6:].copy())


def loss_of(y: Any, target: Any) -> Any:
    return torch.nn.functional.mse_loss(y, target)


def wrapped(group: ProcessGroup, device: str) -> Any:
    """The model on a GPU, with several buckets."""
    return DistributedDataParallel(model().to(device), group, bucket_cap_mb=4e-4)


def train(ddp: Any, rank: int, device: str) -> None:
    """All steps of one rank."""
    rule = optimizer(ddp)
    for x, target in batches(rank):
        rule.zero_grad()
        loss_of(ddp(x.to(device)), target.to(device)).backward()
        assert all(gpu_of(each.grad) is not None for each in ddp.module.parameters())
        rule.step()


def one_process(size: int, device: str) -> dict[str, np.ndarray[Any, Any]]:
    """The weights where each rank's gradients are added in rank order, by name."""
    module = model().to(device)
    rule = optimizer(module)
    for step in zip(*[batches(rank) for rank in range(size)], strict=True):
        sums = [torch.zeros_like(each) for each in module.parameters()]
        for x, target in step:
            grads = torch.autograd.grad(loss_of(module(x.to(device)), target.to(device)), list(module.parameters()))
            sums = [total + grad for total, grad in zip(sums, grads, strict=True)]
        for each, total in zip(module.parameters(), sums, strict=True):
            each.grad = total / size
        rule.step()
    return {name: each.detach().cpu().numpy() for name, each in module.named_parameters()}
