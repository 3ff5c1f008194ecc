"""Tied weights, and when gradients are complete."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ferrorpc import schedules
from ferrorpc.ddp.parameter import Parameter
from ferrorpc.errors import GroupAbortedError, UsageError
from ferrorpc.pipeline.runtime import Pipeline
from ferrorpc.testing import FaultPlan, World, run_world
from tests.unit.pipeline.models import edges_of, stage_of, ties_of
from tests.unit.pipeline.stages import Layer, batch, descend, half_square

DELAYS = FaultPlan(delay_seconds=(0.0, 0.05))


class Times:
    """x -> weight * x."""

    def __init__(self, weight: float, parameter: Parameter | None = None) -> None:
        self.weight = Parameter(np.array([weight])) if parameter is None else parameter

    def named_parameters(self):
        return iter([("weight", self.weight)])

    def parameters(self):
        return iter([self.weight])

    def forward(self, x):
        return self.weight.data * x, x

    def backward(self, context, grad_y):
        grad = (grad_y * context).sum(keepdims=True)
        self.weight.grad = grad if self.weight.grad is None else self.weight.grad + grad
        return self.weight.data * grad_y


def total(y, _):
    return float(y.sum()), np.ones_like(y)


ONES = np.ones(4)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_three_copies_begin_and_stay_alike(name: str):
    """y = w * 3 * w * w * x: the gradient of w is 3 * 3 w^2 * x."""

    def body(group):
        stage = Times(3.0 if group.rank == 1 else 2.0 + group.rank)
        pipe = Pipeline(stage, group, name, 2, tied=[("3/weight", "0/weight", "2/weight")])
        assert stage.weight.data.item() == (3.0 if group.rank == 1 else 2.0), "all copies have the first stage's value"
        pipe.step(ONES, ONES, total, reduction="sum")
        return stage.weight.grad.item()

    assert run_world(4, body, faults=DELAYS) == [3 * 3 * 4 * 4, 8 * 4, 3 * 3 * 4 * 4, 3 * 3 * 4 * 4]


def test_gradients_of_several_batches_add_up():
    def body(group):
        stage = Times(2.0)
        pipe = Pipeline(stage, group, "1f1b", 2, tied=[("0/weight", "1/weight")])
        pipe.step(ONES, ONES, total, reduction="sum")
        once = stage.weight.grad.item()
        pipe.step(ONES, ONES, total, reduction="sum")
        return once, stage.weight.grad.item()

    assert run_world(2, body) == [(16.0, 32.0)] * 2


class InPlace(Times):
    """Adds to the array that is in `.grad`, as most stages with buffers for their gradients do."""

    def __init__(self, weight: float) -> None:
        super().__init__(weight)
        self.weight.grad = np.zeros(1)

    def backward(self, context, grad_y):
        self.weight.grad += (grad_y * context).sum()
        return self.weight.data * grad_y


class OwnArray(InPlace):
    """Adds to an array of its own, and says in each backward that it is the gradient."""

    def __init__(self, weight: float) -> None:
        super().__init__(weight)
        self.total = self.weight.grad

    def backward(self, context, grad_y):
        self.total += (grad_y * context).sum()
        self.weight.grad = self.total
        return self.weight.data * grad_y


@pytest.mark.parametrize("make", [InPlace, OwnArray])
@pytest.mark.parametrize("is_cleared", [True, False])
def test_a_stage_may_keep_its_gradient_in_one_array(make, is_cleared: bool):
    """It was counted twice: what was set aside for the step was the array that the step then added to."""

    def body(group):
        stage = make(2.0)
        kept, seen = stage.weight.grad, []
        pipe = Pipeline(stage, group, "1f1b", 2, tied=[("0/weight", "1/weight")])
        for _ in range(3):
            if is_cleared:
                kept[:] = 0
            pipe.step(ONES, ONES, total, reduction="sum")
            assert stage.weight.grad is kept
            seen.append(kept.item())
        return seen

    assert run_world(2, body) == [[16.0, 16.0, 16.0] if is_cleared else [16.0, 32.0, 48.0]] * 2


def test_a_gradient_that_a_stage_replaces_stays_as_it_was_in_its_array():
    """Such as one that a program keeps to look at later, or the same zeros for all weights."""

    def body(group):
        stage = Times(2.0)
        pipe = Pipeline(stage, group, "1f1b", 2, tied=[("0/weight", "1/weight")])
        stage.weight.grad = earlier = np.array([3.0])
        pipe.step(ONES, ONES, total, reduction="sum")
        stage.weight.grad = fixed = np.broadcast_to(5.0, 1)
        pipe.step(ONES, ONES, total, reduction="sum")
        return earlier.item(), fixed.item(), stage.weight.grad.item()

    assert run_world(2, body) == [(3.0, 5.0, 21.0)] * 2


def test_copies_do_not_share_the_memory_of_their_gradients():
    """With zbv the first and the last stage are on one rank."""

    def body(group):
        stages = [Times(2.0), Times(2.0)]
        pipe = Pipeline(stages, group, "zbv", 2, tied=[("0/weight", "3/weight")])
        pipe.step(ONES, ONES, total, reduction="sum")
        return [stage.weight.grad for stage in stages]

    first, last = run_world(2, body)[0]
    assert first.tolist() == last.tolist() == [2 * 2.0**3 * 4]
    first += 1
    assert last.tolist() == [2 * 2.0**3 * 4]


def test_stages_of_one_rank_may_hold_one_object():
    def body(group):
        shared = Parameter(np.array([2.0]))
        stages = [Times(0.0, shared), Times(0.0, shared)] if group.rank == 0 else [Times(2.0), Times(2.0)]
        pipe = Pipeline(stages, group, "zbv", 2, tied=[("0/weight", "1/weight", "3/weight")])
        pipe.step(ONES, ONES, total, reduction="sum")
        return [stage.weight.grad.tolist() for stage in stages]

    expected = [3 * 2.0**3 * 4]
    assert run_world(2, body, faults=DELAYS) == [[expected, expected], [expected, [2.0**3 * 4]]]


def test_a_backward_apart_settles_ties_too():
    def body(group):
        stage = Times(2.0)
        pipe = Pipeline(stage, group, "gpipe", 2, tied=[("0/weight", "1/weight")])
        y = pipe.forward(ONES)
        assert stage.weight.grad is None
        pipe.backward(y, None if y is None else np.ones_like(y))
        return stage.weight.grad.item()

    assert run_world(2, body) == [16.0, 16.0]


@pytest.mark.parametrize("make", [Times, InPlace, OwnArray])
@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_a_step_that_fails_leaves_tied_weights_the_gradients_of_earlier_ones(fails: str, make):
    def refuse(*_):
        raise ValueError("a bad sample")

    def body(group):
        stage = make(2.0)
        pipe = Pipeline(stage, group, "gpipe", 2, tied=[("0/weight", "1/weight")])
        pipe.step(ONES, ONES, total, reduction="sum")
        group.barrier()
        if group.rank == 0:
            setattr(stage, fails, refuse)
        with pytest.raises(GroupAbortedError if group.rank else ValueError, match="a bad sample"):
            pipe.step(ONES, ONES, total, reduction="sum")
        return stage.weight.grad.item()

    assert run_world(2, body) == [16.0, 16.0]


@pytest.mark.parametrize("seed", range(10))
def test_tied_weights_are_one_weight(seed: int):
    """Up to the order of additions: one process in which both stages hold the same parameter."""
    schedule = schedules.zb1p(3, 5)

    def body(group):
        stage = stage_of(group.rank, 3)
        pipe = Pipeline(stage, group, schedule, edges=edges_of(3), tied=ties_of(3))
        for step in range(4):
            if step:
                descend([stage])
            pipe.step(*batch(11, seed=step), half_square)
        return stage

    pipelined = run_world(3, body, faults=DELAYS, seed=seed)
    alone = [stage_of(number, 3) for number in range(3)]
    alone[2].weight = alone[0].weight
    for step in range(4):
        if step:
            for parameter in {id(each): each for stage in alone for each in stage.parameters()}.values():
                parameter.data -= 0.1 * parameter.grad
                parameter.grad = None
        x, target = batch(11, seed=step)
        (y, skipped), first = alone[0].forward(x)
        y, second = alone[1].forward(y)
        y, third = alone[2].forward((skipped, y))
        to_first, grad = alone[2].backward(third, half_square(y, target)[1])
        alone[0].backward(first, (alone[1].backward(second, grad), to_first))
    for found, wanted in zip(pipelined, alone, strict=True):
        np.testing.assert_allclose(found.weight.data, wanted.weight.data, rtol=1e-12)
        np.testing.assert_allclose(found.weight.grad, wanted.weight.grad, rtol=1e-10)


@pytest.mark.parametrize(
    ("tied", "message"),
    [
        ([("0/weight", "1/bias")], r"there is no weight '1/bias' to tie(.|\n)*that stage has 1/weight"),
        ([("0/weight", "2/weight")], "'2/weight' names no weight"),
        ([("0/weight", "0/weight")], "'0/weight' names no weight"),
        ([("head/weight", "1/weight")], "'head/weight' names no weight"),
        ([("0/", "1/weight")], "'0/' names no weight"),
        ([("0/weight",)], "ties nothing"),
        (["0/weight"], "ties nothing"),
        ([("0/weight", "1/weight"), ("1/weight", "0/weight")], "'0/weight' is in two ties"),
        ([("0/weight", "1/wide")], r"tied weights differ: 0/weight is float64\[1\], 1/wide is float64\[2\]"),
        ([("0/weight", "1/dates")], r"tied weight '1/dates': dtype datetime64\[s\] is not supported"),
        ([("0/weight", "1/bare")], r"tied weight '1/bare' is a bare ndarray(.|\n)*ferrorpc\.Parameter"),
    ],
)
def test_ties_that_cannot_be_are_refused_on_every_rank(tied, message: str):
    class Wide(Times):
        def named_parameters(self):
            others = {"wide": np.zeros(2), "dates": np.zeros(1, "datetime64[s]")}
            wrapped = [(name, Parameter(array)) for name, array in others.items()]
            return iter([("weight", self.weight), ("bare", np.zeros(1, ml_dtypes.bfloat16)), *wrapped])

    def body(group):
        with pytest.raises(UsageError, match=message):
            Pipeline(Wide(1.0), group, "gpipe", 2, tied=tied)
        group.barrier()

    run_world(2, body)


def test_a_stage_that_cannot_name_its_weights_is_what_the_others_hear_of():
    class Nameless(Times):
        def named_parameters(self):
            raise ValueError("no names")

    def body(group):
        with pytest.raises(ValueError if group.rank else GroupAbortedError, match="no names"):
            Pipeline((Nameless if group.rank else Times)(1.0), group, "gpipe", 2, tied=[("0/weight", "1/weight")])

    run_world(2, body)


def test_names_are_those_of_the_stage_or_count_its_parameters():
    def body(group):
        pipe = Pipeline([Layer(0), Times(1.0)], group, "zbv", 2)
        assert [name for name, _ in pipe.named_parameters()] == ["0/0", "0/1", "1/weight"]
        assert [name for name, _ in pipe.named_parameters(1)] == ["1/weight"]

    run_world(1, body)


class TestOnGradients:
    """`on_gradients` is called when a piece's gradients are complete."""

    @pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb1p", "zbv"])
    def test_it_comes_once_for_each_piece_with_the_last_backward(self, name: str):
        schedule = schedules.named(name, 2, 5)

        def body(group):
            stages = {number: Layer(number) for number in schedule.pieces(group.rank)}
            pipe = Pipeline(list(stages.values()), group, schedule)
            seen = {}
            pipe.step(
                *batch(10), half_square, on_gradients=lambda piece: seen.update({piece: stages[piece].weight.grad.copy()})
            )
            return seen, {number: stage.weight.grad for number, stage in stages.items()}

        for seen, final in run_world(2, body, faults=DELAYS):
            assert list(seen) == sorted(seen, reverse=True), "the piece nearer the loss is first"
            assert seen.keys() == final.keys()
            assert all(np.array_equal(seen[piece], final[piece]) for piece in seen)

    def test_it_comes_while_others_still_compute(self):
        """In 1F1B the last stage is done first; in virtual time, with a second for each forward and backward."""
        world = World(3, timeout=600.0)

        class Slow(Layer):
            def forward(self, x):
                world.clock.parker().park(world.clock.now() + 1)
                return super().forward(x)

            def backward(self, context, grad_y):
                world.clock.parker().park(world.clock.now() + 1)
                return super().backward(context, grad_y)

        def body(group):
            pipe, told = Pipeline(Slow(group.rank), group, "1f1b", 4, clock=world.clock), []
            pipe.step(*batch(4), half_square, on_gradients=lambda _: told.append(world.clock.now()))
            return told[0], world.clock.now()

        (first, end), (second, _), (third, _) = world.run(body)
        assert (first, second, third) == pytest.approx((end, end - 1, end - 2))

    def test_with_tied_weights_it_waits_for_the_other_copies(self):
        def body(group):
            stage, seen = Times(2.0), []
            pipe = Pipeline(stage, group, "1f1b", 2, tied=[("0/weight", "2/weight")])
            pipe.step(ONES, ONES, total, reduction="sum", on_gradients=lambda _: seen.append(stage.weight.grad.item()))
            return seen

        assert run_world(3, body, faults=DELAYS) == [[32.0], [16.0], [32.0]]

    def test_a_weight_that_two_stages_share_must_be_tied(self):
        """The stage that is done first would give a part of its gradient away as the whole."""

        def body(group, tied):
            shared, seen = Parameter(np.array([2.0])), {}
            pipe = Pipeline([Times(0.0, shared), Times(0.0, shared)], group, schedules.looped_bfs(1, 2, chunks=2), tied=tied)
            pipe.step(ONES, ONES, total, reduction="sum")
            assert shared.grad.item() == 2 * 2.0 * 4
            shared.grad = None
            pipe.step(ONES, ONES, total, "sum", on_gradients=lambda piece: seen.update({piece: shared.grad.item()}))
            return seen

        (seen,) = run_world(1, lambda group: body(group, [("0/weight", "1/weight")]))
        assert seen == {0: 16.0, 1: 16.0}
        with pytest.raises(UsageError, match=r"share the weight '0/weight', '1/weight'(.|\n)*tied=.*'0/weight', '1/weight'"):
            run_world(1, lambda group: body(group, []))

    def test_what_it_raises_ends_the_group(self):
        def refuse(piece):
            raise RuntimeError("no room for it")

        def body(group):
            pipe = Pipeline(Layer(group.rank), group, "1f1b", 2)
            for _ in range(2):
                pipe.step(*batch(2), half_square, on_gradients=refuse if group.rank == 1 else None)

        first, second = run_world(2, body, return_exceptions=True)
        assert isinstance(second, RuntimeError)
        assert isinstance(first, GroupAbortedError)
        assert "RuntimeError: no room for it" in first.cause


def test_a_tied_parameter_may_be_replaced_between_steps():
    """As `load_state_dict(assign=True)` does."""

    def body(group):
        stage = Times(2.0)
        pipe = Pipeline(stage, group, "1f1b", 2, tied=[("0/weight", "1/weight")])
        pipe.step(ONES, ONES, total, reduction="sum")
        stage.weight = Parameter(np.array([3.0]))
        pipe.step(ONES, ONES, total, reduction="sum")
        return stage.weight.grad.item()

    assert run_world(2, body) == [2 * 3 * 4, 2 * 3 * 4]


@pytest.mark.parametrize("replaced", [[0], [1], [0, 3]])
def test_a_tied_parameter_that_is_replaced_by_another_value_is_an_error_on_every_rank(replaced: list[int]):
    """A rank that is done already learns of it with what it does next. With zbv the first and last stage are on one rank."""

    def go_on(pipe, group):
        pipe.step(ONES, ONES, total, reduction="sum")
        group.barrier()

    def body(group):
        stages = [Times(2.0), Times(2.0)]
        pipe = Pipeline(stages, group, "zbv", 2, tied=[("0/weight", "1/weight", "3/weight")])
        pipe.step(ONES, ONES, total, reduction="sum")
        for number, stage in zip(pipe.schedule.pieces(group.rank), stages, strict=True):
            if number in replaced:
                stage.weight = Parameter(np.array([3.0]))
        with pytest.raises((UsageError, GroupAbortedError), match=r"'[01]/weight', '[013]/weight' differ, since one of them"):
            go_on(pipe, group)

    run_world(2, body)


def test_a_tied_parameter_that_is_gone_is_an_error_on_every_rank():
    """As after a parametrization of it."""

    def body(group):
        stage = Times(2.0)
        pipe = Pipeline(stage, group, "1f1b", 2, tied=[("0/weight", "1/weight")])
        if group.rank == 0:
            stage.named_parameters = lambda: iter([("original", stage.weight)])
        pipe.step(ONES, ONES, total, reduction="sum")

    first, second = run_world(2, body, return_exceptions=True)
    assert isinstance(first, UsageError)
    assert isinstance(second, GroupAbortedError)
    assert "the tied weight '0/weight' is not there any more" in second.cause


@pytest.mark.parametrize("kind", [Times, InPlace])
def test_copies_on_one_rank_whose_gradients_are_one_array_count_each_part_once(kind: type[Times]):
    """As where both are given the mean over replicas."""

    def body(group):
        stages = kind(2.0), kind(2.0)
        pipe = Pipeline(stages, group, "zbv", 2, tied=[("0/weight", "1/weight")])
        found = []
        for _ in range(2):
            pipe.step(ONES, ONES, total, reduction="sum")
            found.append([each.weight.grad.item() for each in stages])
            stages[0].weight.grad[...] = 0.0
            stages[1].weight.grad = stages[0].weight.grad
        return found

    assert run_world(1, body) == [[[16.0, 16.0]] * 2]
