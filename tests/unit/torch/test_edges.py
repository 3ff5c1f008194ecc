"""Modules of a model that is not a chain: a neighbour's value may be a tuple, beside those of other neighbours."""

from __future__ import annotations

import pytest

from ferrorpc import schedules
from ferrorpc.errors import UsageError
from ferrorpc.pipeline.runtime import Pipeline
from ferrorpc.testing import run_world

torch = pytest.importorskip("torch")
nn = torch.nn
ferrorpc_torch = pytest.importorskip("ferrorpc.torch")
Stage, with_gradient = ferrorpc_torch.Stage, ferrorpc_torch.with_gradient
WIDTH, MICROBATCHES = 4, 2
EDGES = [(0, 1), (0, 2), (1, 2)]


class Layered(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(WIDTH, WIDTH)


class First(Layered):
    """A tuple for stage 1, with a None in it, and a tensor for stage 2."""

    def forward(self, x):
        y = self.layer(x)
        return (y, None, y.sin()), y


class Middle(Layered):
    """A tuple again, of which stage 2 does not use the last member."""

    def forward(self, a, nothing, b):
        assert nothing is None
        return self.layer(a * b), a + b, b.exp()


class Last(Layered):
    def forward(self, skipped, values):
        return self.layer(skipped + values[0] * values[1])


def loss_of(y, target):
    return nn.functional.mse_loss(y, target)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ["zb1p", "looped_bfs"])
def test_a_value_for_one_of_several_neighbours_may_be_a_tuple(name: str, ranks: int):
    schedule = schedules.named(name, ranks, MICROBATCHES, 3 // ranks)
    x, target = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3)), torch.zeros(4, WIDTH)

    def body(group):
        modules = {number: (First, Middle, Last)[number](number) for number in schedule.pieces(group.rank)}
        pipe = Pipeline([Stage(each) for each in modules.values()], group, schedule, edges=EDGES)
        return pipe.step(x, target, with_gradient(loss_of)), modules

    results = run_world(ranks, body)
    modules = {number: each for _, held in results for number, each in held.items()}
    alone = [First(0), Middle(1), Last(2)]
    for rows, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        values, skipped = alone[0](rows)
        (loss_of(alone[2](skipped, alone[1](*values)), wanted) / MICROBATCHES).backward()
    for number, module in enumerate(alone):
        torch.testing.assert_close(modules[number].layer.weight.grad, module.layer.weight.grad)


def test_a_tuple_in_the_value_for_one_neighbour_cannot_be_sent():
    def body(group):
        module = First(0) if group.rank == 0 else Middle(1)
        Pipeline(Stage(module), group, "gpipe", MICROBATCHES).forward(torch.zeros(4, WIDTH))

    with pytest.raises(UsageError, match="the value of 0SEND_F0"):
        run_world(2, body)
