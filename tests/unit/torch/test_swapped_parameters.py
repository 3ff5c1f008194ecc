"""Parameters that `torch.utils.swap_tensors` has given another tensor, as torch does in `load_state_dict` if it is told to."""

from __future__ import annotations

import pytest

from ferrorpc.testing import run_world

torch = pytest.importorskip("torch")

from ferrorpc.torch import DistributedDataParallel  # noqa: E402


@pytest.fixture
def swaps():
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


def step(ddp, group, scale: float) -> list[float]:
    """The gradient of a step, whose mean is 1.5 * scale on two ranks."""
    ddp(torch.full((1, 2), scale * (1 + group.rank))).sum().backward()
    return ddp.module.weight.grad.flatten().tolist()


def clamp(parameter: torch.Tensor) -> None:
    parameter.grad.clamp_(max=1.5)


def load(ddp, times: int = 1) -> None:
    for _ in range(times):
        ddp.load_state_dict({name: value.clone() for name, value in ddp.state_dict().items()})


@pytest.mark.usefixtures("swaps")
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("views", [True, False])
def test_a_state_that_torch_loads_by_swapping_is_trained_on(views: bool, times: int) -> None:
    def body(group):
        torch.manual_seed(0)
        net = torch.nn.Linear(2, 1, bias=False)
        ddp, optimizer = DistributedDataParallel(net, group, gradient_as_bucket_view=views), None
        found = []
        for scale in (1.0, 2.0, 3.0, 4.0):
            if scale in (1.0, 3.0):
                load(ddp, times)
                optimizer = optimizer or torch.optim.SGD(net.parameters(), 0.5)
            optimizer.zero_grad()
            found.append(step(ddp, group, scale))
            optimizer.step()
        return found, net.weight.flatten().tolist()

    (found, weights), other = run_world(2, body)
    assert found == [[1.5 * scale] * 2 for scale in (1.0, 2.0, 3.0, 4.0)]
    assert other == (found, weights)


def test_a_parameter_that_was_swapped_back_is_averaged() -> None:
    def body(group):
        net = torch.nn.Linear(2, 1, bias=False)
        ddp, other = DistributedDataParallel(net, group), torch.nn.Parameter(torch.zeros(1, 2))
        found = []
        for scale in (1.0, 2.0, 3.0):
            ddp.zero_grad()
            found.append(step(ddp, group, scale))
            torch.utils.swap_tensors(net.weight, other)
        return found

    assert run_world(2, body) == [[[1.5, 1.5], [3.0, 3.0], [4.5, 4.5]]] * 2


def test_a_module_whose_parameters_were_swapped_may_be_wrapped_again() -> None:
    def body(group):
        net = torch.nn.Linear(2, 1, bias=False)
        first = DistributedDataParallel(net, group)
        torch.utils.swap_tensors(net.weight, torch.nn.Parameter(torch.zeros(1, 2)))
        second = DistributedDataParallel(net, group)
        del first
        return step(second, group, 1.0)

    assert run_world(2, body) == [[1.5, 1.5]] * 2


def test_a_users_hook_is_called_before_the_gradient_is_averaged_after_a_swap_too() -> None:
    def body(group):
        net = torch.nn.Linear(2, 1, bias=False)
        ddp = DistributedDataParallel(net, group)
        net.weight.register_post_accumulate_grad_hook(clamp)
        found = []
        for _ in range(3):
            ddp.zero_grad()
            found.append(step(ddp, group, 1.0))
            torch.utils.swap_tensors(net.weight, torch.nn.Parameter(torch.zeros(1, 2)))
        return found

    assert run_world(2, body) == [[[1.25, 1.25]] * 3] * 2
