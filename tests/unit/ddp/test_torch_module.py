"""torch modules in the DistributedDataParallel for any module."""

from __future__ import annotations

import numpy as np
import pytest

from ferrorpc.ddp.module import DistributedDataParallel
from ferrorpc.ddp.synchroniser import GradientSynchronizer
from ferrorpc.errors import UsageError
from tests.unit.ddp.world import run_world

torch = pytest.importorskip("torch", reason="torch is not installed")


def network(seed: int):
    generator = torch.Generator().manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    return module


def test_gradients_of_autograd_become_the_mean_and_an_optimizer_steps_on_them():
    inputs = [torch.rand(6, 4, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]

    def body(group):
        module = network(seed=group.rank)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        ddp = DistributedDataParallel(module, group)
        ddp(inputs[group.rank]).square().mean().backward()
        own = [parameter.grad.clone() for parameter in module.parameters()]
        ddp.sync_gradients()
        averaged = [parameter.grad.clone() for parameter in module.parameters()]
        optimizer.step()
        return own, averaged, [parameter.detach().numpy().copy() for parameter in module.parameters()]

    results = run_world(3, body)
    for place in range(len(results[0][0])):
        expected = (results[0][0][place] + results[1][0][place] + results[2][0][place]) / np.float32(3)
        for _, averaged, weights in results:
            assert torch.equal(averaged[place], expected)
            assert np.array_equal(weights[place], results[0][2][place])


def test_weights_and_buffers_start_as_rank_zeros_also_in_bfloat16():
    def body(group):
        module = network(seed=group.rank).to(torch.bfloat16)
        module[1].running_mean.fill_(group.rank)
        DistributedDataParallel(module, group)
        return [tensor.float().tolist() for tensor in module.state_dict().values()]

    results = run_world(2, body)
    assert results[0] == results[1]
    assert results[0] == [tensor.float().tolist() for name, tensor in network(seed=0).to(torch.bfloat16).state_dict().items()]


def test_trees_of_tensors_come_back_as_tensors():
    def body(group):
        like = {"w": torch.zeros(2, 3, dtype=torch.bfloat16)}
        return GradientSynchronizer(like, group)({"w": torch.full((2, 3), group.rank, dtype=torch.bfloat16)}, weight=1)["w"]

    for result in run_world(2, body):
        assert result.dtype is torch.bfloat16
        assert result.float().tolist() == [[0.5] * 3] * 2


def test_a_modules_parameters_show_a_synchroniser_what_their_gradients_will_be():
    def body(group):
        module = network(seed=0)
        sync = GradientSynchronizer(dict(module.named_parameters()), group)
        means = sync({name: torch.full_like(each, float(group.rank)) for name, each in module.named_parameters()})
        assert all(parameter.grad is None for parameter in module.parameters())
        return {name: (mean.shape, mean.unique().tolist()) for name, mean in means.items()}

    shapes = {name: parameter.shape for name, parameter in network(seed=0).named_parameters()}
    assert run_world(2, body) == [{name: (shape, [0.5]) for name, shape in shapes.items()}] * 2


def test_lazy_parameters_and_buffers_are_refused():
    parts = torch.nn.LazyLinear(2), torch.nn.LazyInstanceNorm1d(affine=False, track_running_stats=True)
    lazy = dict(zip(("parameter '0.weight'", "buffer '0.running_mean'"), parts, strict=True))

    def body(group):
        for name, part in lazy.items():
            with pytest.raises(UsageError, match=f"{name} is lazy"):
                DistributedDataParallel(torch.nn.Sequential(part), group)

    run_world(1, body)
