"""A program of a user with torch tensors, as mypy --strict and pyright see it; see arrays.py."""

from __future__ import annotations

from typing import Any, assert_type

import torch
from numpy.typing import NDArray
from torch import nn

import ferrorpc
from ferrorpc.torch import DistributedDataParallel, Stage, ZeroOptimizer, cut, with_gradient


def collectives(group: ferrorpc.ProcessGroup, x: torch.Tensor, tokens: torch.Tensor | None) -> None:
    """Tensors come back as tensors, where there is one to tell from."""
    assert_type(group.all_reduce(x, "mean"), torch.Tensor)
    assert_type(group.all_reduce(x, out=x, async_op=True), ferrorpc.Work[torch.Tensor])
    assert_type(group.all_gather(x), list[torch.Tensor])
    assert_type(torch.cat(group.all_gather(x)), torch.Tensor)
    assert_type(group.reduce(x), torch.Tensor | None)
    assert_type(group.reduce_scatter([x, x]), torch.Tensor)
    assert_type(group.broadcast(x), torch.Tensor)
    assert_type(group.broadcast(tokens), torch.Tensor | NDArray[Any])
    assert_type(group.scatter([x, x]), torch.Tensor)
    assert_type(group.all_to_all([x, x]), list[torch.Tensor])
    assert_type(group.recv(0, out=x), torch.Tensor)
    assert_type(ferrorpc.batch_norm(x, group).y, torch.Tensor)
    group.send(x, 0)
    group.all_reduce(x.sum().item())


class Net(nn.Module):
    """Any module."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.line(x)
        return y


def train(group: ferrorpc.ProcessGroup, x: torch.Tensor, y: torch.Tensor) -> None:
    """A loop as for torch's own wrapper."""
    ddp = DistributedDataParallel(Net(), group)
    assert_type(ddp.module, Net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.no_sync():
        nn.functional.cross_entropy(ddp(x), y).backward()  # type: ignore[no-untyped-call]
    for _ in ddp.accumulate(2):
        nn.functional.cross_entropy(ddp(x), y).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    optimizer.step()
    state: dict[str, Any] = ddp.state_dict()
    ddp.load_state_dict(state)
    zero = ZeroOptimizer(Net().parameters(), torch.optim.AdamW, group, lr=1e-3)
    zero.zero_grad()
    zero.step()
    untold: DistributedDataParallel = ddp
    assert_type(untold.module.training, bool)
    ddp.no_synk()  # type: ignore[operator]


def tree(group: ferrorpc.ProcessGroup, grads: dict[str, torch.Tensor]) -> None:
    """Trees of tensors."""
    sync = ferrorpc.GradientSynchronizer(grads, group)
    assert_type(sync(grads), dict[str, torch.Tensor])
    with sync.step() as step:
        for name, grad in grads.items():
            step.ready(name, grad)
    assert_type(step.grads, dict[str, torch.Tensor])


def pipeline(group: ferrorpc.ProcessGroup, x: torch.Tensor, y: torch.Tensor) -> None:
    """Modules as stages."""
    pieces = cut(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), 2)
    pipe = ferrorpc.Pipeline(Stage(pieces[group.rank]), group, "1f1b", num_microbatches=4)
    loss = pipe.step(x, y, with_gradient(nn.functional.cross_entropy))
    if loss is not None:
        assert float(loss) >= 0
