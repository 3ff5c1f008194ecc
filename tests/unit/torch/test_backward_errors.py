"""Backward passes that fail, or that a rank never begins."""

from __future__ import annotations

import pytest

from ferrorpc.errors import FerroError, GroupAbortedError, GroupClosedError, PeerLostError, UsageError
from ferrorpc.testing import run_world

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

from ferrorpc.torch import DistributedDataParallel  # noqa: E402
from tests.unit.torch.models import batch, network  # noqa: E402


class Exploding(torch.autograd.Function):
    """An identity whose backward pass fails."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("out of luck")


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = network(1, (6, 4)), network(2, (4, 2))

    def forward(self, x: torch.Tensor, fails: bool) -> torch.Tensor:
        x = self.first(x)
        return self.last(Exploding.apply(x) if fails else x)


def test_a_rank_that_raises_in_backward_is_what_the_others_hear_of() -> None:
    """Not a timeout a minute later."""

    def body(group):
        ddp = DistributedDataParallel(Fragile(), group, bucket_cap_mb=5e-5)
        for step in range(2):
            ddp(batch(group.rank), fails=group.rank == 1 and step == 1).sum().backward()

    outcomes = run_world(3, body, return_exceptions=True)
    assert isinstance(outcomes[1], ValueError)
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome, PeerLostError)
        assert "ValueError: out of luck" in str(outcome)


def test_a_backward_error_that_was_caught_ends_the_generation_at_the_next_step() -> None:
    def body(group):
        ddp = DistributedDataParallel(Fragile(), group, bucket_cap_mb=5e-5)
        ddp(batch(group.rank), fails=False).sum().backward()
        if group.rank == 0:
            loss = ddp(batch(group.rank), fails=True).sum()
            with pytest.raises(ValueError, match="out of luck"):
                loss.backward()
            with pytest.raises(UsageError, match="ended before all gradients"):
                ddp(batch(group.rank), fails=False)
        ddp(batch(group.rank), fails=False).sum().backward()

    for outcome in run_world(2, body, return_exceptions=True):
        assert isinstance(outcome, GroupAbortedError)
        assert "ended before all gradients" in str(outcome)


@pytest.mark.parametrize("steps", [0, 1], ids=["first step", "second step"])
def test_a_backward_error_that_was_caught_ends_the_generation_at_the_next_backward_pass(steps: int) -> None:
    """Which would else leave this rank's own gradients."""

    def body(group):
        ddp = DistributedDataParallel(Fragile(), group, bucket_cap_mb=5e-5)
        for _ in range(steps):
            ddp(batch(group.rank), fails=False).sum().backward()
        loss = ddp(batch(group.rank), fails=False).sum()
        if group.rank == 0:
            with pytest.raises(ValueError, match="out of luck"):
                ddp(batch(group.rank), fails=True).sum().backward()
        loss.backward()

    outcomes = run_world(2, body, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [UsageError, GroupAbortedError]
    assert all("ended before all gradients" in str(outcome) for outcome in outcomes)


def test_a_rank_that_never_comes_is_named_with_the_gradients_it_owes() -> None:
    def body(group):
        ddp = DistributedDataParallel(network(), group)
        if group.rank == 0:
            with pytest.raises(FerroError) as caught:
                ddp(batch(0)).sum().backward()
            assert "rank 1" in str(caught.value)
            assert "raise FERRORPC_TIMEOUT" in str(caught.value)  # backward() takes no timeout=
            assert any("4.bias" in note for note in caught.value.__notes__)
        else:
            group.session.clock.parker().park(group.session.clock.now() + 100)

    run_world(2, body, timeout=5.0)


def test_an_error_of_the_group_comes_again_in_later_steps() -> None:
    def body(group):
        ddp = DistributedDataParallel(network(), group)
        ddp(batch(0)).sum().backward()
        group.close()
        for _ in range(2):
            with pytest.raises(GroupClosedError, match="the group was closed"):
                ddp(batch(0)).sum().backward()

    run_world(1, body)


def test_a_hook_that_returns_something_is_told_so_by_torch() -> None:
    def body(group):
        module = network()
        ddp = DistributedDataParallel(module, group)
        module[0].bias.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(3))
        loss = ddp(batch(group.rank)).square().sum()
        with pytest.raises(RuntimeError, match="hooks should return None"):
            loss.backward()
        return True

    assert run_world(1, body) == [True]
