"""Buffers that a backward pass changes."""

from __future__ import annotations

import copy

import pytest

from ferrorpc import UsageError
from ferrorpc.testing import run_world

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from ferrorpc.torch import DistributedDataParallel  # noqa: E402


class Observed(nn.Module):
    """Notes the largest gradient of its output in a buffer, as quantisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        self.register_buffer("largest", torch.zeros(()))
        self.register_full_backward_hook(self.note)

    def note(self, module, grad_input, grad_output) -> None:
        self.largest.copy_(torch.maximum(self.largest, grad_output[0].abs().max()))

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("mode", ["broadcast", "mean", "local"])
def test_what_a_backward_pass_writes_to_a_buffer_is_exchanged_with_it(mode, size):
    def body(group):
        module = Observed()
        ddp = DistributedDataParallel(module, group, buffers=mode)
        found = []
        for step in range(1, 3):
            (ddp(torch.ones(1, 2, requires_grad=True)) * step * (1 + group.rank)).sum().backward()
            found.append(module.largest.item())
        return found

    expected = {"broadcast": [[1, 2]] * 2, "mean": [[1.5, 3]] * 2, "local": [[1, 2], [2, 4]]}[mode]
    assert run_world(size, body) == (expected if size == 2 else [[1, 2]])


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(lambda: torch.eye(2).to_sparse(), id="sparse"),
        pytest.param(lambda: torch.zeros(2).to(torch.float8_e4m3fn), id="float8"),
        pytest.param(lambda: torch.zeros(1).expand(2), id="expanded"),
    ],
)
def test_buffers_that_cannot_be_sent_stay_on_their_rank_where_each_keeps_its_own(odd):
    def body(group):
        module = nn.BatchNorm1d(2)
        module.running_mean.fill_(group.rank)
        module.register_buffer("odd", odd())
        for mode in ("broadcast", "mean"):
            with pytest.raises(UsageError, match=r"buffer 'odd': .*(\n|.)*buffers=\"local\""):
                DistributedDataParallel(module, group, buffers=mode)
        ddp = DistributedDataParallel(module, group, buffers="local")
        assert module.running_mean.tolist() == [0, 0]  # rank 0's
        ddp(torch.ones(2, 2)).sum().backward()
        ddp.broadcast_parameters()
        return True

    assert run_world(2, body) == [True, True]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_batch_norm_within_a_checkpoint_has_the_statistics_of_the_bare_module(use_reentrant):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            return checkpoint(self.norm, self.layer(x), use_reentrant=use_reentrant)

    torch.manual_seed(0)
    module = Net()

    def body(group):
        mine, bare = copy.deepcopy(module), copy.deepcopy(module)
        ddp = DistributedDataParallel(mine, group)
        for step in range(2):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            ddp(x).square().sum().backward()
            bare(x).square().sum().backward()
        return all(torch.equal(mine.get_buffer(name), each) for name, each in bare.named_buffers())

    assert run_world(2, body) == [True] * 2


@pytest.mark.parametrize("mode", ["broadcast", "mean"])
def test_buffers_of_a_module_that_is_frozen_for_a_while_stay_the_same_on_all_ranks(mode):
    def body(group):
        torch.manual_seed(0)
        low, top = nn.Linear(4, 4), nn.BatchNorm1d(4)
        first, second = (DistributedDataParallel(each, group, buffers=mode) for each in (low, top))
        top.requires_grad_(False)
        for step in range(2):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + group.rank))
            second(first(x)).square().sum().backward()
        return top.running_mean.clone()

    assert torch.equal(*run_world(2, body))


@pytest.mark.parametrize("mode", ["broadcast", "mean"])
def test_ranks_may_go_through_two_modules_in_different_orders(mode):
    """Large buffers and new modules, whose gradients are sent at the end, too."""

    def body(group):
        modules = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
            module.register_buffer("table", torch.zeros(2_000_000))
            modules.append(DistributedDataParallel(module, group, buffers=mode))
        for step in range(2):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + group.rank))
            order = modules if group.rank == 0 else modules[::-1]
            sum(each(x).square().mean() for each in order).backward()
        return torch.cat([each.grad.flatten() for module in modules for each in module.parameters()])

    assert torch.equal(*run_world(2, body, timeout=20))
