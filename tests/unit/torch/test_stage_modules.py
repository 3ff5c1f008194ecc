"""Modules as in real models, in a stage: they write to their input, have no weights, or pass None on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from ferrorpc import schedules
from ferrorpc.errors import FerroError, UsageError
from ferrorpc.pipeline.runtime import Pipeline
from ferrorpc.testing import run_world

torch = pytest.importorskip("torch")
nn = torch.nn
stages_of_torch = pytest.importorskip("ferrorpc.torch")
Stage, with_gradient = stages_of_torch.Stage, stages_of_torch.with_gradient
WIDTH, ROWS, MICROBATCHES = 6, 8, 4
loss_of = nn.functional.mse_loss


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def linear(seed: int) -> nn.Linear:
    module = nn.Linear(WIDTH, WIDTH)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return module


class Masked(nn.Module):
    """Passes on an optional mask and row numbers."""

    def __init__(self, seed: int, is_last: bool = False) -> None:
        super().__init__()
        self.layer, self.is_last = linear(seed), is_last

    def forward(self, x, mask=None, rows=None):
        y = self.layer(x)
        return y if self.is_last else (y, mask, torch.arange(len(x)))


def in_place(number: int) -> nn.Module:
    return nn.Sequential(nn.ReLU(inplace=True), linear(number))


def without_weights(number: int) -> nn.Module:
    return linear(number) if number == 0 else nn.Tanh()


def masked(number: int) -> nn.Module:
    return Masked(number, is_last=number == 3)


@pytest.mark.parametrize("make", [in_place, without_weights, masked])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb1p", "interleaved", "zbv"])
def test_gradients_are_those_of_one_process(name: str, make):
    ranks = 2 if name in ("interleaved", "zbv") else 4
    schedule = schedules.named(name, ranks, MICROBATCHES)
    assert schedule.virtual_stages == 4

    def body(group):
        stages = {number: Stage(make(number)) for number in schedule.pieces(group.rank)}
        x, target = batch()
        loss = Pipeline(list(stages.values()), group, schedule).step(x, target, with_gradient(loss_of))
        return loss, {number: [each.grad for each in stage.parameters()] for number, stage in stages.items()}

    results = run_world(ranks, body)
    found = {number: grads for _, held in results for number, grads in held.items()}
    alone = [make(number) for number in range(4)]
    total = 0.0
    for part, wanted in zip(*(each.chunk(MICROBATCHES) for each in batch()), strict=True):
        y = part
        for module in alone:
            y = module(*y) if isinstance(y, tuple) else module(y)
        loss = loss_of(y, wanted) / MICROBATCHES
        loss.backward()
        total += loss.item()
    assert next(loss.item() for loss, _ in results if loss is not None) == pytest.approx(total, rel=1e-5)
    for number, module in enumerate(alone):
        for got, parameter in zip(found[number], module.parameters(), strict=True):
            torch.testing.assert_close(got, parameter.grad)


def test_what_cannot_go_on_to_the_next_stage_is_named():
    class Wrapped(nn.Linear):
        def forward(self, x):
            return {"hidden": super().forward(x)}

    with pytest.raises(UsageError, match=r"Wrapped returned a dict.*\n.*tensor, or a tuple"):
        Stage(Wrapped(WIDTH, WIDTH)).forward(batch()[0])
    with pytest.raises(UsageError, match=r"given a ndarray.*\n.*from_numpy"):
        Stage(linear(0)).forward(batch()[0].numpy())


class Sum(nn.Module):
    def forward(self, x, y):
        return x.flatten(1) + y


@pytest.mark.parametrize("again", [lambda y: y, lambda y: y.view(-1, 2, WIDTH // 2)])
def test_a_stage_that_writes_to_what_it_is_given_does_so_to_its_own(again):
    """Also when another stage of this rank was given the same tensor, or a view of it."""

    class Twice(nn.Module):
        def forward(self, x):
            y = x * 1
            return y, again(y)

    schedule = schedules.looped_bfs(1, 2, chunks=3).with_edges([(0, 1), (0, 2), (1, 2)])
    modules = [Twice(), nn.ReLU(inplace=True), Sum()]

    def body(group):
        x, _ = batch()
        return Pipeline([Stage(module) for module in modules], group, schedule).forward(x)

    x, _ = batch()
    (found,) = run_world(1, body)
    torch.testing.assert_close(found, x + x.relu())


def test_a_lazy_module_gets_its_shapes_in_the_first_step():
    def body(group):
        return Pipeline(Stage(nn.LazyLinear(WIDTH)), group, "gpipe", 2).step(*batch(), with_gradient(loss_of))

    assert run_world(1, body)[0].isfinite()


class Counting(nn.Module):
    """Returns its own state beside its output: a count of microbatches, and what it computed last.

    Args:
        keep: keeps a tensor as a part of the state, given the module, a name and the tensor.
    """

    def __init__(self, keep: Callable[[nn.Module, str, Any], None]) -> None:
        super().__init__()
        self.layer, self.shift = linear(0), nn.Parameter(torch.ones(1))
        keep(self, "count", torch.zeros(1))
        keep(self, "latest", torch.zeros(ROWS // MICROBATCHES, WIDTH))

    def forward(self, x):
        self.count += 1
        self.latest = self.latest.detach()
        self.latest.copy_(self.layer(x))
        return self.latest.view(-1, 2, WIDTH // 2), self.count, self.shift


class Weighing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(1)

    def forward(self, x, count, shift):
        return self.layer(x.flatten(1)) * count + shift


@pytest.mark.parametrize("keep", [nn.Module.register_buffer, setattr])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_module_may_return_its_own_state_which_later_microbatches_change(ranks: int, keep):
    """Whether the stage after is on this rank or on another one."""
    schedule = schedules.looped_bfs(ranks, MICROBATCHES, chunks=2 // ranks)
    modules, alone = [Counting(keep), Weighing()], [Counting(keep), Weighing()]

    def body(group):
        stages = [Stage(modules[number]) for number in schedule.pieces(group.rank)]
        Pipeline(stages, group, schedule).step(*batch(), with_gradient(loss_of))

    run_world(ranks, body)
    for part, wanted in zip(*(each.chunk(MICROBATCHES) for each in batch()), strict=True):
        (loss_of(alone[1](*alone[0](part)), wanted) / MICROBATCHES).backward()
    for module, same in zip(modules, alone, strict=True):
        for found, wanted in zip(module.parameters(), same.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad)


class OfWorkspace(nn.Module):
    """Computes without gradients, always in the same memory, which it has in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.workspaces = linear(0), [torch.zeros(ROWS // MICROBATCHES, WIDTH)]

    def forward(self, x):
        with torch.no_grad():
            return self.workspaces[0].copy_(self.layer(x))


def test_outputs_of_an_inference_may_all_be_in_the_same_memory():
    x, _ = batch()
    (y,) = run_world(1, lambda group: Pipeline(Stage(OfWorkspace()), group, "gpipe", MICROBATCHES).forward(x))
    torch.testing.assert_close(y, linear(0)(x).detach())


class Masking(nn.Module):
    """Gives a mask besides, or hands on the one that it is given, twice; the next stage writes to one of them."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer = linear(number)

    def forward(self, x, mask=None, same=None):
        y = self.layer(x)
        if mask is None:
            return y, (x > 0).float(), None
        return y * mask if same is None else y + same.mul_(2), mask, mask


@pytest.mark.parametrize(("name", "ranks"), [("gpipe", 4), ("dualpipe_v", 2)])
def test_stages_hand_on_what_they_are_given_in_inference_mode_too(name: str, ranks: int):
    schedule, (x, _) = schedules.named(name, ranks, MICROBATCHES), batch()

    def body(group):
        stages = [Stage(Masking(number)) for number in schedule.pieces(group.rank)]
        with torch.inference_mode():
            return Pipeline(stages, group, schedule).forward(x)

    (found,) = [each for each in run_world(ranks, body) if each is not None]
    with torch.no_grad():
        y, mask, _ = Masking(0)(x)
        y = linear(1)(y) * mask
        for number in (2, 3):
            y = linear(number)(y) + 2 * mask
    for each, wanted in zip(found, (y, mask, mask), strict=True):
        torch.testing.assert_close(each, wanted)


def test_what_was_made_in_inference_mode_may_go_through_a_pipeline_in_any_mode():
    with torch.inference_mode():
        x = batch()[0]

    def body(group):
        with torch.no_grad():
            return Pipeline(Stage(linear(group.rank)), group, "gpipe", MICROBATCHES).forward(x)

    _, found = run_world(2, body)
    with torch.no_grad():
        torch.testing.assert_close(found, linear(1)(linear(0)(x)))


class Reusing(nn.Module):
    """Trains, and returns what it computes in the memory of the microbatch before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.workspaces = linear(0), [torch.zeros(ROWS // MICROBATCHES, WIDTH)]

    def forward(self, x):
        return self.workspaces[0].detach().copy_(self.layer(x))


def test_outputs_of_training_may_all_be_in_the_same_memory_too():
    module, (x, target) = Reusing(), batch()

    def body(group):
        pipe = Pipeline([Stage(module), Stage(linear(1))], group, schedules.looped_bfs(1, MICROBATCHES, chunks=2))
        return pipe.step(x, target, with_gradient(loss_of))

    alone, last = linear(0), linear(1)
    expected = loss_of(last(alone(x)), target)
    expected.backward()
    torch.testing.assert_close(run_world(1, body), [expected.detach()])
    torch.testing.assert_close(module.layer.weight.grad, alone.weight.grad)


def test_a_criterion_may_write_to_what_it_is_given():
    """As one that masks logits does."""

    def criterion(y, target):
        y[:, 0] = 0
        return loss_of(y, target)

    def body(group):
        stage = Stage(linear(0))
        return Pipeline(stage, group, "gpipe", 2).step(*batch(), with_gradient(criterion)), stage.module

    ((loss, module),) = run_world(1, body)
    alone, (x, target) = linear(0), batch()
    expected = criterion(alone(x), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(module.weight.grad, alone.weight.grad)


class Scores(NamedTuple):
    logits: Any
    extra: Any


class First(nn.Module):
    def forward(self, scores):
        return scores[0]


class Scoring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(0)

    def forward(self, x):
        return Scores(self.layer(x), None)


def test_named_tuples_of_the_batch_and_of_the_module_stay_so():
    def body(group):
        x, target = batch()
        stage = Stage(nn.Sequential(First(), Scoring()))
        loss = with_gradient(lambda y, target: loss_of(y.logits, target.logits))
        return Pipeline(stage, group, "gpipe", 2).step(Scores(x, None), Scores(target, None), loss)

    x, target = batch()
    torch.testing.assert_close(run_world(1, body)[0], loss_of(linear(0)(x), target).detach())


class Maximal(nn.Module):
    """Returns a named tuple of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(0)

    def forward(self, x):
        return torch.max(self.layer(x), dim=1)


@pytest.mark.parametrize(("module", "name"), [(Scoring, "logits"), (Maximal, "values")])
def test_a_criterion_and_who_asks_for_outputs_get_the_named_tuple_of_the_last_stage(module, name: str):
    def body(group):
        x, target = batch()
        pipe = Pipeline(Stage(module()), group, "gpipe", 2)
        loss = pipe.step(x, target, with_gradient(lambda y, _: getattr(y, name).sum()), reduction="sum")
        return loss, pipe.forward(x)

    ((loss, outputs),) = run_world(1, body)
    expected = module()(batch()[0])
    assert type(outputs) is type(expected)
    torch.testing.assert_close(getattr(outputs, name), getattr(expected, name).detach())
    torch.testing.assert_close(loss, getattr(expected, name).detach().sum())


class Scaling(nn.Module):
    """Takes and returns a tuple, as modules of a Sequential do that pass a second value on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(0)

    def forward(self, values):
        return self.layer(values[0]), values[1]


@pytest.mark.parametrize("wrap", ["none", "compile", "DistributedDataParallel", "both"])
def test_a_wrapped_sequential_takes_a_tuple_as_it_is(wrap: str):
    def body(group):
        piece = nn.Sequential(Scaling(), First())
        if wrap in ("compile", "both"):
            piece = torch.compile(piece, backend="eager")
        if wrap in ("DistributedDataParallel", "both"):
            piece = stages_of_torch.DistributedDataParallel(piece, group)
        x, target = batch()
        return Pipeline(Stage(piece, split=False), group, "gpipe", 2).step((x, x), target, with_gradient(loss_of))

    x, target = batch()
    torch.testing.assert_close(run_world(1, body)[0], loss_of(linear(0)(x), target).detach())


class TwoLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = linear(0), linear(0)

    def forward(self, x):
        return self.last(self.first(x))


def test_a_tied_weight_may_have_another_name_in_its_stage_too():
    """As after a model's tie_weights(), whether the pipeline is made before or after it."""

    def body(group, is_made_before: bool):
        module, tied = TwoLinear(), [("0/last.weight", "1/first.weight")]
        pipe = Pipeline(Stage(module), group, "gpipe", 2, tied=tied) if is_made_before else None
        if group.rank == 0:
            module.last.weight = module.first.weight
        pipe = pipe or Pipeline(Stage(module), group, "gpipe", 2, tied=tied)
        pipe.step(*batch(), with_gradient(loss_of))
        return module

    (x, target), alone = batch(), [TwoLinear(), TwoLinear()]
    alone[0].last.weight = alone[1].first.weight = alone[0].first.weight
    loss_of(alone[1](alone[0](x)), target).backward()
    for is_made_before in (True, False):
        for found, wanted in zip(run_world(2, lambda group, when=is_made_before: body(group, when)), alone, strict=True):
            torch.testing.assert_close(found.first.weight.grad, wanted.first.weight.grad)


def test_a_weight_that_is_tied_by_its_other_name_is_known_to_be_when_gradients_are_asked_for_early():
    def body(group):
        first, module = linear(0), TwoLinear()
        module.last.weight = module.first.weight = first.weight
        stages = [Stage(first), Stage(module)]
        pipe = Pipeline(stages, group, "looped_bfs", 2, tied=[("0/weight", "1/last.weight")])
        pipe.step(*batch(), with_gradient(loss_of), on_gradients=seen.append)

    seen: list[int] = []
    run_world(1, body)
    assert sorted(seen) == [0, 1]


class NamedAlone(nn.Linear):
    """Its own named_parameters() has not all of torch's arguments."""

    def named_parameters(self, prefix="", recurse=True):
        yield from super().named_parameters(prefix, recurse)


def test_a_stage_with_names_of_its_own_can_be_tied():
    def body(group):
        module = NamedAlone(WIDTH, WIDTH) if group.rank else linear(0)
        Pipeline(Stage(module), group, "gpipe", 2, tied=[("0/weight", "1/weight")]).step(*batch(), with_gradient(loss_of))
        return module.weight

    first, second = run_world(2, body)
    torch.testing.assert_close(first.grad, second.grad)


def test_a_weight_that_is_in_two_ties_under_two_names_is_refused():
    def body(group):
        module = TwoLinear()
        module.last.weight = module.first.weight
        ties = [("0/first.weight", "1/last.weight"), ("0/last.weight", "1/first.weight")]
        with pytest.raises(FerroError, match="is in two ties, under two names"):
            Pipeline(Stage(module), group, "gpipe", 2, tied=ties)

    run_world(2, body)
