"""Tensors that autograd knows: where gradients are off, and where it relies on what a collective writes."""

from __future__ import annotations

import pytest

from ferrorpc.errors import UsageError
from ferrorpc.testing import run_world

torch = pytest.importorskip("torch", reason="torch is not installed")

from ferrorpc.torch import DistributedDataParallel, ZeroOptimizer  # noqa: E402
from tests.unit.torch.models import network  # noqa: E402


def test_without_gradients_parameters_are_tensors_as_others_are() -> None:
    def body(group):
        module = network(seed=group.rank)
        with torch.no_grad():
            for parameter in module.parameters():
                assert group.broadcast(parameter, out=parameter) is parameter
            weight = module[0].weight
            total = group.all_reduce(weight)
            group.all_gather(weight, out=[torch.nn.Parameter(torch.zeros_like(weight)) for _ in range(group.size)])
            if group.rank == 0:
                group.send(weight, 1)
            elif group.rank == 1:
                assert torch.equal(group.recv(0, out=torch.nn.Parameter(torch.zeros_like(weight))), weight)
        assert weight.requires_grad
        assert not total.requires_grad
        assert torch.equal(total, network()[0].weight.detach() * group.size)
        with pytest.raises(UsageError, match=r"requires a gradient(.|\n)*no_grad"):
            group.all_reduce(weight)
        return module.state_dict()

    expected = network().state_dict()
    for state in run_world(2, body):
        assert all(torch.equal(state[name], wanted) for name, wanted in expected.items())


def test_an_autograd_function_may_use_collectives() -> None:
    """As tensor-parallel layers do."""

    def body(group):
        class Sum(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return group.all_reduce(x)

            @staticmethod
            def backward(ctx, grad):
                return grad

        x = torch.full((3,), 1.0 + group.rank, requires_grad=True)
        y = Sum.apply(x * 2)
        y.square().sum().backward()
        return y.detach(), x.grad

    for y, gradient in run_world(2, body):
        assert torch.equal(y, torch.full((3,), 6.0))
        assert torch.equal(gradient, torch.full((3,), 24.0))


@pytest.mark.parametrize("how", ["all_reduce", "all_gather", "list", "recv"])
def test_what_a_backward_pass_needs_is_not_silently_replaced(how: str) -> None:
    def body(group):
        x = torch.ones(4)
        weight = torch.ones(4, requires_grad=True)
        loss = (weight * x).sum()  # its gradient is x
        if how == "all_reduce":
            group.all_reduce(x, out=x)
        elif how == "all_gather":
            group.all_gather(torch.zeros(2), out=x)
        elif how == "list":
            group.all_gather(torch.zeros(2), out=[x[:2], x[2:]])
        elif group.rank == 0:
            group.send(torch.zeros(4), 1)
            group.recv(1, out=x)
        else:
            group.send(torch.zeros(4), 0)
            group.recv(0, out=x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return True

    assert run_world(2, body) == [True, True]


def test_inference_tensors_are_written_as_others_are() -> None:
    def body(group):
        plain = torch.ones(4)
        with torch.inference_mode():
            x = torch.ones(4)
            group.all_reduce(x, out=x)
            group.all_reduce(plain, out=plain)
        return x.tolist() + plain.tolist()

    assert run_world(2, body) == [[2.0] * 8] * 2


def test_a_module_that_was_wrapped_in_inference_mode_can_be_trained() -> None:
    def body(group):
        module = torch.nn.Linear(2, 1, bias=False)
        with torch.inference_mode():
            ddp = DistributedDataParallel(module, group)
        ddp(torch.ones(1, 2) * (1 + group.rank)).sum().backward()
        return module.weight.grad.tolist()

    assert run_world(2, body) == [[[1.5, 1.5]]] * 2


def test_an_optimizer_that_was_made_in_inference_mode_updates_outside_of_it() -> None:
    def body(group):
        weight = torch.nn.Parameter(torch.zeros(3))
        with torch.inference_mode():
            optimizer = ZeroOptimizer([weight], torch.optim.SGD, group, lr=1.0)
        weight.grad = torch.ones(3) * (1 + group.rank)
        optimizer.step()
        return weight.tolist()

    assert run_world(2, body) == [[-1.5] * 3] * 2
