"""A module whose parameters are CuPy arrays, over the fakes: it trains as in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ferrorpc
from ferrorpc.backends.hybrid import HybridBackend
from ferrorpc.backends.nccl.backend import NcclBackend
from ferrorpc.group import ProcessGroup
from ferrorpc.testing import run_groups
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.fake_gpu.worlds import host_lanes, nccl_backends

RANKS = 2
STEPS = 3


class Parameter:
    """A CuPy array with its gradient."""

    def __init__(self, data: Any) -> None:
        self.data, self.grad = data, None


class Linear:
    """y = x * weight + bias, element by element, with gradients by hand: all of it on the GPU."""

    def __init__(self, cupy: StandIn) -> None:
        self.weight = Parameter(cupy.asarray(np.linspace(-1, 1, 40, dtype=np.float32)))
        self.bias = Parameter(cupy.asarray(np.zeros(40, np.float32)))

    def parameters(self) -> list[Parameter]:
        return [self.weight, self.bias]

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        return [("weight", self.weight), ("bias", self.bias)]

    def forward(self, x: Any) -> Any:
        return x * self.weight.data + self.bias.data

    def __call__(self, x: Any) -> Any:
        return self.forward(x)

    def backward(self, x: Any, grad_y: Any) -> None:
        self.weight.grad, self.bias.grad = x * grad_y, grad_y * 1.0

    def step(self, rate: float) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data - parameter.grad * rate


def batch(step: int, rank: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([step, rank]).integers(-4, 4, 40).astype(np.float32)


def in_one_process() -> np.ndarray[Any, Any]:
    """The same training with the mean of all ranks' gradients."""
    weight, bias = np.linspace(-1, 1, 40, dtype=np.float32), np.zeros(40, np.float32)
    for step in range(STEPS):
        xs = [batch(step, rank) for rank in range(RANKS)]
        grads = [(x * (x * weight + bias), x * weight + bias) for x in xs]
        weight = weight - np.float32(0.1) * sum(grad for grad, _ in grads) / RANKS
        bias = bias - np.float32(0.1) * sum(grad for _, grad in grads) / RANKS
    return np.concatenate([weight, bias])


def groups_of(cupy: StandIn, name: str) -> list[ProcessGroup]:
    if name == "simulated":
        return [ProcessGroup(lanes) for lanes in host_lanes(RANKS)]
    kind = {"nccl": NcclBackend, "hybrid": HybridBackend}[name]
    return [ProcessGroup(backend) for backend in nccl_backends(cupy, RANKS, kind=kind)]


@pytest.mark.parametrize("name", ["simulated", "nccl", "hybrid"])
def test_a_module_of_cupy_parameters_trains_as_in_one_process(cupy: StandIn, name: str) -> None:
    def body(group: ProcessGroup) -> np.ndarray[Any, Any]:
        with cupy.cuda.Device(group.rank):
            module = Linear(cupy)
            if group.rank:
                module.weight.data = cupy.asarray(np.zeros(40, np.float32))  # the root's are broadcast
            ddp = ferrorpc.DistributedDataParallel(module, group)
            for step in range(STEPS):
                x = cupy.asarray(batch(step, group.rank))
                module.backward(x, ddp(x))
                ddp.sync_gradients()
                assert all(type(parameter.grad) is cupy.ndarray for parameter in module.parameters())
                module.step(0.1)
            return np.concatenate([cupy.asnumpy(parameter.data) for parameter in module.parameters()])

    found = run_groups(groups_of(cupy, name), body)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_allclose(found[0], in_one_process(), rtol=1e-5, atol=1e-6)
