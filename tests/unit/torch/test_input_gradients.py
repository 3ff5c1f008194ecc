"""Backward passes for the input's gradient alone, such as of adversarial examples: no steps, and any rank may make them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ferrorpc.testing import run_world

torch = pytest.importorskip("torch")

from ferrorpc.torch import DistributedDataParallel  # noqa: E402
from tests.unit.torch.models import batch, network  # noqa: E402


class Residual(torch.nn.Sequential):
    """Its input is nearer to its output than its parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


Attack = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


def frozen(ddp: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Freezes the module meanwhile."""
    ddp.requires_grad_(False)
    y = ddp(x).square().sum()
    ddp.requires_grad_(True)
    y.backward()
    return x.grad


def inputs(ddp: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Asks for it by name."""
    ddp(x).square().sum().backward(inputs=[x])
    return x.grad


@pytest.mark.parametrize("attack", [frozen, inputs])
def test_they_are_no_steps(attack: Attack) -> None:
    def body(group, attacks: bool):
        ddp = DistributedDataParallel(Residual(*network(0, (6, 6))), group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            ddp(batch(group.rank, step)).square().mean().backward()
            optimizer.step()
            if attacks and step % 2 == group.rank:  # ranks take turns, so that they agree on the number of passes
                assert attack(ddp, batch(group.rank, step).requires_grad_()).abs().sum() > 0
        return [each.detach().clone() for each in ddp.parameters()]

    expected = run_world(2, lambda group: body(group, False))[0]
    for found in run_world(2, lambda group: body(group, True)):
        assert all(map(torch.equal, found, expected))


def test_a_module_that_is_frozen_in_a_step_sends_nothing() -> None:
    """As the discriminator of a GAN while its generator learns."""

    def body(group):
        first, second = (DistributedDataParallel(network(seed, (6, 6)), group) for seed in (1, 2))
        second.requires_grad_(False)
        for step in range(2):
            second(first(batch(group.rank, step))).square().sum().backward()
        return first._replica.reducer.begun, second._replica.reducer.begun

    assert run_world(2, body) == [(2, 0)] * 2
