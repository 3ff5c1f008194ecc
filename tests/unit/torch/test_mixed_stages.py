"""Stages of NumPy and of torch in one model, neighbours on one rank or on several."""

from __future__ import annotations

import numpy as np
import pytest

from ferrorpc import schedules
from ferrorpc.ddp.parameter import Parameter
from ferrorpc.pipeline.runtime import Pipeline
from ferrorpc.testing import run_world
from tests.unit.pipeline.stages import half_square_sum

torch = pytest.importorskip("torch")
Stage = pytest.importorskip("ferrorpc.torch").Stage
MICROBATCHES = 2


class Scale:
    """y = factor * x, and the same array once more, which its backward looks at again."""

    def __init__(self) -> None:
        self.like = np.full(4, 0.5, np.float32)
        self.gradient = np.zeros(4, np.float32)

    def forward(self, x):
        assert isinstance(x, np.ndarray)
        y = x * self.like
        return y, (x, y, y.copy())

    def backward(self, context, grad_y):
        x, y, same = context
        assert isinstance(grad_y, np.ndarray)
        np.testing.assert_array_equal(y, same)
        self.gradient += (x * grad_y).sum(0)
        return grad_y * self.like


class Rectified(torch.nn.Module):
    """factor * relu(x), whose relu writes to x."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x):
        return self.factor * torch.relu_(x)


def loss_fn(y, target):
    """Of whichever library."""
    loss, grad = half_square_sum(np.asarray(y), np.asarray(target))
    return loss, torch.from_numpy(grad) if isinstance(y, torch.Tensor) else grad


TWO, FOUR = ["nt", "tn"], ["nttn", "nntt", "ttnn", "ntnt", "tntn"]
CASES = [("1f1b", 2, TWO), ("zbv", 1, TWO), ("zbv", 2, FOUR), ("interleaved", 1, FOUR), ("interleaved", 2, FOUR)]


@pytest.mark.parametrize(("name", "ranks", "order"), [(name, ranks, each) for name, ranks, orders in CASES for each in orders])
def test_arrays_arrive_as_the_kind_of_the_stage(name: str, ranks: int, order: str):
    schedule = schedules.named(name, ranks, MICROBATCHES, len(order) // ranks)
    rows = np.arange(-8.0, 8.0, dtype=np.float32).reshape(4, 4)

    def body(group):
        numbers = schedule.pieces(group.rank)
        stages = [Scale() if order[number] == "n" else Stage(Rectified()) for number in numbers]
        x = rows if order[0] == "n" else torch.from_numpy(rows.copy())
        Pipeline(stages, group, schedule).step(x, np.zeros_like(rows), loss_fn, "sum")
        found = [each.gradient if isinstance(each, Scale) else each.module.factor.grad.numpy() for each in stages]
        return dict(zip(numbers, found, strict=True))

    held = {number: grad for of_rank in run_world(ranks, body) for number, grad in of_rank.items()}
    x, weights = torch.from_numpy(rows.copy()), []
    for each in order:
        weights.append(torch.full((4,), 0.5 if each == "n" else 2.0, requires_grad=True))
        x = (x if each == "n" else x.relu()) * weights[-1]
    (x.square() / 2).sum().backward()
    for number, weight in enumerate(weights):
        np.testing.assert_allclose(held[number], weight.grad, rtol=1e-6)


def test_a_module_without_tensors_is_on_the_default_device_unless_a_buffer_says_where():
    module = torch.nn.Sequential(torch.nn.ReLU())
    stage = Stage(module)
    assert stage.like.device.type == "cpu"
    with torch.device("meta"):
        assert stage.like.device.type == "meta"
    module.register_buffer("place", torch.empty(0, device="meta"), persistent=False)
    assert stage.like.device.type == "meta"
    assert not module.state_dict()


class Tied(Scale):
    """With a weight that can be tied."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(np.full(4, 2.0, np.float32))
        self.like = self.weight.data

    def named_parameters(self):
        return iter([("factor", self.weight)])

    def backward(self, context, grad_y):
        before, grad = self.weight.grad, (context[0] * grad_y).sum(0)
        self.weight.grad = grad if before is None else before + grad
        return super().backward(context, grad_y)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("order", TWO)
def test_a_weight_may_be_tied_between_them(order: str, ranks: int):
    schedule = schedules.named("looped_bfs", ranks, MICROBATCHES, 2 // ranks)
    rows = np.arange(1.0, 17.0, dtype=np.float32).reshape(4, 4)

    def body(group):
        stages = [Tied() if order[number] == "n" else Stage(Rectified()) for number in schedule.pieces(group.rank)]
        pipe = Pipeline(stages, group, schedule, tied=[("0/factor", "1/factor")])
        x = rows if order[0] == "n" else torch.from_numpy(rows.copy())
        for _ in range(2):
            pipe.step(x, np.zeros_like(rows), loss_fn, "sum")
        return [each.weight.grad if isinstance(each, Tied) else each.module.factor.grad for each in stages]

    factor = torch.full((4,), 2.0, requires_grad=True)
    (torch.from_numpy(rows) * factor * factor).square().sum().backward()  # half of it, twice
    for found in (each for of_rank in run_world(ranks, body) for each in of_rank):
        np.testing.assert_allclose(np.asarray(found), factor.grad, rtol=1e-6)
    kinds = [type(each) for of_rank in run_world(ranks, body) for each in of_rank]
    assert kinds == [np.ndarray if each == "n" else torch.Tensor for each in order]
