"""Cutting a sequence of modules."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from ferrorpc.errors import UsageError
from ferrorpc.testing import run_world

torch = pytest.importorskip("torch")
nn = torch.nn
from ferrorpc.torch.cut import balanced, cut  # noqa: E402


@pytest.mark.parametrize("seed", range(20))
def test_the_heaviest_piece_is_as_light_as_can_be(seed: int):
    generator = torch.Generator().manual_seed(seed)
    costs = torch.randint(0, 9, (8,), generator=generator).tolist()
    for pieces in range(1, 9):
        bounds = balanced(costs, pieces)
        weights = [sum(costs[start:stop]) for start, stop in pairwise(bounds)]
        assert len(weights) == pieces
        assert all(start < stop for start, stop in pairwise(bounds))
        best = min(
            max(sum(costs[start:stop]) for start, stop in pairwise((0, *inner, 8)))
            for inner in combinations(range(1, 8), pieces - 1)
        )
        assert max(weights) == best


def test_among_equals_pieces_are_most_alike():
    assert balanced([4, 1, 1, 1, 1], 3) == [0, 1, 3, 5]


def test_by_parameters_names_and_modules_stay():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    first, second = cut(model, 2)
    assert [name for name, _ in first.named_parameters()] == ["0.weight", "0.bias"]
    assert [name for name, _ in second.named_parameters()] == ["2.weight", "2.bias", "4.weight", "4.bias"]
    assert second[-1] is model[4]
    x = torch.randn(3, 8)
    assert torch.equal(second(first(x)), model(x))


class Busy(nn.Module):
    """Takes long, and has no parameters."""

    def forward(self, x):
        for _ in range(40):
            x = x @ torch.eye(x.shape[1])
        return x


def test_by_time_work_counts_and_the_model_is_left_as_it_was():
    model = nn.Sequential(Busy(), nn.BatchNorm1d(200), nn.Linear(200, 200), nn.Identity(), nn.Identity())
    state, random = {name: each.clone() for name, each in model.state_dict().items()}, torch.get_rng_state()
    sample = torch.randn(64, 200, generator=torch.Generator())
    assert [len(piece) for piece in cut(model, 2)] == [2, 3], "by parameters the first module weighs nothing"
    assert [len(piece) for piece in cut(model, 2, by="time", sample=sample)] == [1, 4]
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())
    assert torch.equal(random, torch.get_rng_state())


def test_all_ranks_cut_as_the_first_one_measured():
    model = nn.Sequential(*(nn.Linear(50, 50) for _ in range(9)))

    def body(group):
        return [len(piece) for piece in cut(model, 3, by="time", sample=torch.zeros(4, 50), group=group)]

    first, *others = run_world(4, body)
    assert others == [first] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((3,), "2 modules cannot be cut into 3"), ((2, "weight"), "cut by 'weight'"), ((2, "time"), "on a sample only")],
)
def test_what_cannot_be_cut_is_refused(arguments, message: str):
    with pytest.raises(UsageError, match=message):
        cut(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), *arguments)
