"""Stages in PyTorch, without any adapter."""

from __future__ import annotations

import pytest

from ferrorpc import schedules
from ferrorpc.pipeline.runtime import Pipeline
from ferrorpc.testing import run_world

torch = pytest.importorskip("torch")
WIDTH = 6


class Layer:
    """tanh(linear(x)); autograd does the backward."""

    def __init__(self, number: int, dtype) -> None:
        seed = torch.Generator().manual_seed(number)
        self.linear = torch.nn.Linear(WIDTH, WIDTH).to(dtype)
        with torch.no_grad():
            self.linear.weight.copy_(torch.randn(WIDTH, WIDTH, generator=seed) / 2)
            self.linear.bias.zero_()

    def parameters(self):
        return self.linear.parameters()

    def forward(self, x):
        x = x.detach().requires_grad_()
        y = torch.tanh(self.linear(x))
        return y.detach(), (x, y)

    def backward(self, context, grad_y):
        x, y = context
        y.backward(grad_y)
        return x.grad


def mean_square(y, target):
    y = y.detach().requires_grad_()
    loss = ((y - target) ** 2).mean()
    loss.backward()
    return loss.detach(), y.grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_gradients_are_those_of_the_whole_batch_in_tensors(name: str, dtype, tolerance: float):
    x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(9)).to(dtype)
    target = torch.zeros(12, WIDTH, dtype=dtype)
    schedule = schedules.named(name, 2, 4)

    def body(group):
        stages = {number: Layer(number, dtype) for number in schedule.pieces(group.rank)}
        Pipeline(list(stages.values()), group, schedule).step(x, target, mean_square)
        return stages

    pipelined = {number: stage for stages in run_world(2, body) for number, stage in stages.items()}
    alone = [Layer(number, dtype) for number in range(schedule.virtual_stages)]
    y = x
    for stage in alone:
        y = torch.tanh(stage.linear(y))
    ((y - target) ** 2).mean().backward()
    for number, stage in enumerate(alone):
        found, wanted = (each.linear.weight.grad.double() for each in (pipelined[number], stage))
        assert (found - wanted).norm() <= tolerance * wanted.norm()
