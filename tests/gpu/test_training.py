"""Data parallelism and pipelines on GPU arrays, over the fakes: the same numbers as in one process."""

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
from tests.gpu.worlds import host_lanes, nccl_backends

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


@pytest.mark.parametrize("name", ["nccl", "hybrid"])
def test_gradients_as_a_pytree_of_cupy_arrays_are_averaged(cupy: StandIn, name: str) -> None:
    def body(group: ProcessGroup) -> Any:
        with cupy.cuda.Device(group.rank):
            like = {"a": cupy.asarray(np.zeros(7, np.float32)), "b": [cupy.asarray(np.zeros((2, 3)))]}
            sync = ferrorpc.GradientSynchronizer(like, group)
            mine = {
                "a": cupy.asarray(np.full(7, group.rank + 1.0, np.float32)),
                "b": [cupy.asarray(np.full((2, 3), 2.0 * group.rank))],
            }
            grads = sync(mine)
            assert type(grads["a"]) is cupy.ndarray
            return cupy.asnumpy(grads["a"]).tolist(), cupy.asnumpy(grads["b"][0]).tolist()

    assert run_groups(groups_of(cupy, name), body) == [([1.5] * 7, [[1.0] * 3] * 2)] * 2


class Scale:
    """A stage on the GPU: y = x * weight, element by element."""

    def __init__(self, cupy: StandIn, number: int) -> None:
        self.weight = Parameter(cupy.asarray(np.full((2, 5), number + 2.0, np.float32)))

    def parameters(self) -> list[Parameter]:
        return [self.weight]

    def forward(self, x: Any) -> tuple[Any, Any]:
        return x * self.weight.data, x

    def backward(self, x: Any, grad_y: Any) -> Any:
        grad = x * grad_y
        self.weight.grad = grad if self.weight.grad is None else self.weight.grad + grad
        return grad_y * self.weight.data


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", ["simulated", "hybrid"])
def test_a_pipeline_of_stages_on_gpus_has_the_gradients_of_one_process(cupy: StandIn, name: str, schedule: str) -> None:
    x, target = (np.random.default_rng(salt).integers(-3, 3, (8, 5)).astype(np.float32) for salt in (1, 2))

    def half_square(y: Any, wanted: Any) -> tuple[float, Any]:
        difference = y - wanted
        return float((cupy.asnumpy(difference) ** 2).sum() / 2), difference

    def body(group: ProcessGroup) -> Any:
        with cupy.cuda.Device(group.rank):
            stage = Scale(cupy, group.rank)
            pipe = ferrorpc.Pipeline(stage, group, schedule=schedule, num_microbatches=4)
            loss = pipe.step(cupy.asarray(x), cupy.asarray(target), half_square)
            assert type(stage.weight.grad) is cupy.ndarray
            return loss, cupy.asnumpy(stage.weight.grad)

    (nothing, first), (loss, second) = run_groups(groups_of(cupy, name), body)
    errors = [2 * 3 * part - wanted for part, wanted in zip(np.split(x, 4), np.split(target, 4), strict=True)]
    assert nothing is None
    assert loss == pytest.approx(sum(float((error**2).sum()) / 2 for error in errors) / 4)
    parts = np.split(x, 4)
    np.testing.assert_allclose(second, sum(2 * part * error for part, error in zip(parts, errors, strict=True)) / 4, rtol=1e-6)
    np.testing.assert_allclose(first, sum(3 * part * error for part, error in zip(parts, errors, strict=True)) / 4, rtol=1e-6)
