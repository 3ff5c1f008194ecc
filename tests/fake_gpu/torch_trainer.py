"""One rank of a job whose torch module is on a fake GPU: `python -m tests.fake_gpu.torch_trainer FILE` under the launcher.

Ranks are processes, as torch's autograd has one thread for each GPU of a process, and each has a machine with one GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import ferrorpc.torch
from ferrorpc.arrays.kinds import gpu_of
from ferrorpc.testing.gpu.machine import Machine
from ferrorpc.testing.gpu.stand_in import stand_in
from tests.fake_gpu.torch_gpu import DEVICE, TorchGpus, torch, torch_on

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


def train(group: ferrorpc.ProcessGroup, gpus: TorchGpus) -> dict[str, Any]:
    """Weights and buffers at the end, by name, and how often the host has waited for values meanwhile."""
    module = model().to(f"{DEVICE}:0")
    ddp = ferrorpc.torch.DistributedDataParallel(module, group, bucket_cap_mb=4e-4)
    rule = optimizer(ddp)
    gpus.waits.clear()
    for x, target in batches(group.rank):
        rule.zero_grad()
        loss_of(ddp(x.to(f"{DEVICE}:0")), target.to(f"{DEVICE}:0")).backward()
        assert all(gpu_of(each.grad) is not None for each in module.parameters())
        rule.step()
    waits = np.array(len(gpus.waits))
    return {"waits": waits, **{name: each.cpu().numpy() for name, each in module.state_dict().items()}}


def main() -> None:
    with stand_in(Machine(1)) as cupy, torch_on(cupy) as gpus, ferrorpc.init_process_group(backend="grpc") as group:
        found = train(group, gpus)
        np.savez(f"{sys.argv[1]}.{group.rank}.npz", **found)


if __name__ == "__main__":
    main()
