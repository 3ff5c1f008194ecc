"""Cutting a sequence of modules."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from ferrorpc.errors import UsageError
from ferrorpc.pipeline.runtime import Pipeline
from ferrorpc.testing import run_world
from ferrorpc.testing.manual_clock import ManualClock

torch = pytest.importorskip("torch")
nn = torch.nn
from ferrorpc.torch.cut import balanced, cut  # noqa: E402
from ferrorpc.torch.stage import Stage, with_gradient  # noqa: E402


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


@pytest.mark.parametrize("by", ["parameters", "time"])
def test_a_module_may_be_in_the_model_twice(by: str):
    layer, activation = nn.Linear(4, 4), nn.Tanh()
    model = nn.Sequential(layer, activation, layer, activation)
    assert sum(len(piece) for piece in cut(model, 4, by, sample=torch.zeros(3, 4))) == 4


def test_one_piece_is_the_whole_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    (whole,) = cut(model, 1)
    assert list(whole) == list(model)
    with pytest.raises(UsageError, match="2 modules cannot be cut into 0 pieces"):
        cut(model, 0)


class Timed(nn.Module):
    """Takes as long as it says, forward and backward, on a clock that it moves itself. It has no parameters.

    Args:
        spend: spend(seconds) moves the clock.
        forward, backward: seconds of each.
    """

    def __init__(self, spend, forward=0.0, backward=0.0):
        super().__init__()
        self._forward, self._backward = forward, backward
        self._spend = lambda seconds: spend(seconds)  # a function is the same one in a copy of the module

    def forward(self, x):
        self._spend(self._forward)
        y = x.clone()
        if y.requires_grad:
            y.register_hook(self._back)
        return y

    def _back(self, grad):
        self._spend(self._backward)


def test_by_time_work_counts_forwards_and_backwards():
    def pieces(*durations):
        clock = ManualClock()
        model = nn.Sequential(*(Timed(clock.advance, *each) for each in durations))
        return [len(piece) for piece in cut(model, 2, by="time", sample=torch.zeros(3, 2), clock=clock)]

    assert pieces((4.0, 0.0), (1.0, 0.0), (1.0, 0.0), (1.0, 0.0)) == [1, 3]
    assert pieces((0.0, 4.0), (0.0, 1.0), (0.0, 1.0), (0.0, 1.0)) == [1, 3], "backwards count as much"
    assert pieces((1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (0.0, 4.0)) == [3, 1]


def test_of_repeated_measurements_the_fastest_counts():
    clock, disturbances = ManualClock(), iter([9.0])
    disturbed = Timed(lambda seconds: clock.advance(seconds + next(disturbances, 0.0)), 1.0)
    model = nn.Sequential(disturbed, Timed(clock.advance, 1.0), Timed(clock.advance, 3.0))
    assert [len(piece) for piece in cut(model, 2, by="time", sample=torch.zeros(3, 2), clock=clock)] == [2, 1]


def test_by_time_the_model_is_left_as_it_was():
    clock = ManualClock()
    model = nn.Sequential(Timed(clock.advance, 9.0), nn.BatchNorm1d(20), nn.Dropout(), nn.Linear(20, 20), nn.Identity())
    state, random = {name: each.clone() for name, each in model.state_dict().items()}, torch.get_rng_state()
    sample = torch.randn(64, 20, generator=torch.Generator())
    assert [len(piece) for piece in cut(model, 2)] == [2, 3], "by parameters the first module weighs nothing"
    assert [len(piece) for piece in cut(model, 2, by="time", sample=sample, clock=clock)] == [1, 4]
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())
    assert torch.equal(random, torch.get_rng_state())


def test_by_time_modules_may_write_to_their_input():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Flatten())
    sample = torch.randn(3, 4)
    before = sample.clone()
    assert len(cut(model, 2, by="time", sample=sample)) == 2
    assert torch.equal(sample, before)


def test_by_time_the_last_module_may_return_several_values():
    class Scores(nn.Module):
        def forward(self, x):
            return x, None, x.argmax(1)

    model = nn.Sequential(nn.Linear(4, 4), Scores())
    assert [len(each) for each in cut(model, 2, by="time", sample=torch.zeros(3, 4))] == [1, 1]


class Pair(nn.Module):
    """Takes and gives two tensors as one tuple, as modules in a Sequential do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, pair):
        x, y = pair
        return self.layer(x), y + 1


class Total(nn.Module):
    def forward(self, pair):
        return pair[0] + pair[1]


@pytest.mark.parametrize("by", ["parameters", "time"])
def test_modules_may_pass_tuples_on(by: str):
    model, (x, y) = nn.Sequential(Pair(), Pair(), Total()), torch.randn(2, 6, 4)
    target, loss_of = torch.randn(6, 4), nn.functional.mse_loss
    loss = loss_of(model((x, y)), target)
    loss.backward()
    wanted = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    pieces = cut(model, 2, by=by, sample=(x, y))

    def body(group):
        pipe = Pipeline(Stage(pieces[group.rank]), group, "zb1p", 2)
        return pipe.step((x, y), target, with_gradient(loss_of))

    torch.testing.assert_close(run_world(2, body)[1], loss.detach())
    for found, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(found.grad, grad)


def test_lazy_modules_are_cut_by_time_or_once_they_have_shapes():
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(4))
    with pytest.raises(UsageError, match=r"module '0' has no shapes yet.*\n.*run the model.*by=\"time\""):
        cut(model, 2)
    assert [len(piece) for piece in cut(model, 2, by="time", sample=torch.zeros(3, 4))] == [1, 1]
    model(torch.zeros(3, 4))
    assert [len(piece) for piece in cut(model, 2)] == [1, 1]


def test_by_time_a_module_that_cannot_be_copied_is_refused():
    class Computed(nn.Linear):
        def forward(self, x):
            self.doubled = self.weight * 2
            return x @ self.doubled

    model = nn.Sequential(Computed(4, 4), nn.Linear(4, 4))
    model(torch.zeros(3, 4))
    with pytest.raises(UsageError, match=r"module '0' cannot be copied.*\n.*parameters"):
        cut(model, 2, by="time", sample=torch.zeros(3, 4))


class Net(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


def test_a_class_derived_from_sequential_is_cut_unless_its_forward_is_its_own():
    model = Net(3)
    first, second = cut(model, 2)
    x = torch.randn(2, 3)
    assert torch.equal(second(first(x)), model(x))
    assert [name for name, _ in second.named_parameters()] == ["2.weight", "2.bias"]
    with pytest.raises(UsageError, match=r"Residual has a forward\(\) of its own"):
        cut(Residual(nn.Linear(3, 3), nn.Tanh()), 2)


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
