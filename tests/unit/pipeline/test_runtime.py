"""Pipelines in simulated worlds, compared with one process that runs the same microbatches in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from ferrorpc import schedules
from ferrorpc.errors import CollectiveMismatchError, GroupAbortedError, PeerLostError, UsageError
from ferrorpc.pipeline.runtime import Pipeline
from ferrorpc.testing import FaultPlan, Kill, RankKilled, World, run_world
from tests.unit.pipeline.stages import (
    WIDTH,
    Layer,
    WholeLayer,
    batch,
    descend,
    gradients,
    half_square,
    half_square_sum,
    one_process,
)

NAMES = (*schedules.NAMED, "zb1p 2")
DELAYS = FaultPlan(delay_seconds=(0.0, 0.05))


def schedule_of(name: str, stages: int, microbatches: int) -> schedules.Schedule:
    key, _, chunks = name.partition(" ")
    return schedules.named(key, stages, microbatches, int(chunks) if chunks else None)


def trained(
    schedule: schedules.Schedule,
    steps: int,
    data: Callable[[int], tuple[Any, Any]],
    loss_fn: Callable = half_square,
    layer: Callable[[int], Any] = Layer,
    seed: int = 0,
    **options,
) -> tuple[list[Any], list[Any]]:
    """(losses, stages by number) of several steps with random delays; gradient descent after each but the last."""

    def body(group):
        stages = {number: layer(number) for number in schedule.pieces(group.rank)}
        pipe = Pipeline(list(stages.values()), group, schedule)
        losses = []
        for step in range(steps):
            if step:
                descend(stages.values())
            x, target = data(step)
            losses.append(pipe.step(x, target, loss_fn, **options))
        assert pipe.peak_activations == schedule.simulate().peak_activations[group.rank] or layer is not Layer
        return losses, stages

    results = run_world(schedule.stages, body, faults=DELAYS, seed=seed)
    stages = {number: stage for _, held in results for number, stage in held.items()}
    (losses,) = [losses for losses, held in results if schedule.virtual_stages - 1 in held]
    assert all(loss is None for other, held in results if schedule.virtual_stages - 1 not in held for loss in other)
    return losses, [stages[number] for number in range(schedule.virtual_stages)]


@pytest.mark.parametrize(("stages", "microbatches", "rows"), [(1, 4, 8), (2, 8, 8), (3, 7, 17)])
@pytest.mark.parametrize("name", NAMES)
def test_three_steps_of_any_schedule_are_those_of_one_process_bit_for_bit(name, microbatches, rows, stages):
    schedule = schedule_of(name, stages, microbatches)
    losses, pipelined = trained(schedule, 3, lambda step: batch(rows, seed=step))
    alone = [Layer(number) for number in range(schedule.virtual_stages)]
    for step in range(3):
        if step:
            descend(alone)
        expected = one_process(alone, *batch(rows, seed=step), half_square, microbatches)
        assert losses[step] == pytest.approx(expected, rel=1e-14)
    for found, wanted in zip(gradients(pipelined), gradients(alone), strict=True):
        np.testing.assert_array_equal(found, wanted)
    for found, wanted in zip(pipelined, alone, strict=True):
        np.testing.assert_array_equal(found.weight.data, wanted.weight.data)


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("name", ["1f1b", "zb1p 2", "zbv"])
def test_any_interleaving_gives_the_same_bits(name: str, seed: int):
    schedule = schedule_of(name, 3, 7)
    _, pipelined = trained(schedule, 2, lambda step: batch(15, seed=step), seed=seed)
    alone = [Layer(number) for number in range(schedule.virtual_stages)]
    for step in range(2):
        if step:
            descend(alone)
        one_process(alone, *batch(15, seed=step), half_square, 7)
    assert all(np.array_equal(a, b) for a, b in zip(gradients(pipelined), gradients(alone), strict=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 1e-5)])
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_gradients_are_those_of_the_whole_batch_at_once(name: str, mean: bool, dtype, tolerance: float):
    """Uneven microbatches: 11 rows in 4."""
    schedule = schedule_of(name, 2, 4)
    loss_fn = half_square if mean else half_square_sum
    x, target = batch(11, dtype=dtype)
    losses, pipelined = trained(
        schedule, 1, lambda _: (x, target), loss_fn, lambda n: Layer(n, dtype), reduction="mean" if mean else "sum"
    )
    alone = [Layer(number, dtype) for number in range(schedule.virtual_stages)]
    assert losses[0] == pytest.approx(one_process(alone, x, target, loss_fn, 1, mean), rel=tolerance)
    for found, wanted in zip(gradients(pipelined), gradients(alone), strict=True):
        assert found.dtype == dtype
        assert np.linalg.norm(found - wanted) <= tolerance * np.linalg.norm(wanted)


def test_means_over_tokens_weigh_microbatches_by_their_tokens():
    """Microbatches of different shapes, as a list. The loss is a mean over unmasked tokens; one microbatch has none."""
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal((rows, WIDTH)) for rows in (1, 4, 2, 2)]
    masks = [np.array([1.0]), np.array([1.0, 0.0, 0.0, 1.0]), np.array([0.0, 0.0]), np.array([0.0, 1.0])]

    def loss_fn(y, mask):
        share = np.broadcast_to(mask[:, None] / mask.sum(), y.shape)
        return float((share * y).sum()), share

    schedule = schedules.one_f_one_b(2, 4)
    losses, pipelined = trained(schedule, 1, lambda _: (xs, masks), loss_fn, weight=np.sum)
    alone = [Layer(0), Layer(1)]
    expected = one_process(alone, np.concatenate(xs), np.concatenate(masks), loss_fn, 1)
    assert losses[0] == pytest.approx(expected, rel=1e-12)
    for found, wanted in zip(gradients(pipelined), gradients(alone), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


@pytest.mark.parametrize("layer", [Layer, WholeLayer])
@pytest.mark.parametrize("name", NAMES)
def test_a_microbatch_of_weight_0_is_left_out_even_if_it_is_nan(name: str, layer: Callable[[int], Any]):
    schedule = schedule_of(name, 2, 4)
    x, target = batch(8)
    x[2:4] = np.nan
    with np.errstate(invalid="ignore"):
        losses, pipelined = trained(
            schedule, 2, lambda _: (x, target), layer=layer, weight=lambda rows: rows[0, 0] != target[2, 0]
        )
    alone = [Layer(number) for number in range(schedule.virtual_stages)]
    for step in range(2):
        if step:
            descend(alone)
        kept = np.delete(x, slice(2, 4), axis=0), np.delete(target, slice(2, 4), axis=0)
        assert losses[step] == pytest.approx(one_process(alone, *kept, half_square, 3), rel=1e-14)
    for found, wanted in zip(gradients(pipelined), gradients(alone), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_step_with_a_timeout_that_is_none_is_refused_and_not_counted():
    def body(group):
        pipe = Pipeline(Layer(group.rank), group, "1f1b", 2)
        if group.rank == 0:
            with pytest.raises(UsageError, match="timeout"):
                pipe.step(*batch(4), half_square, timeout="soon")
        return pipe.step(*batch(4), half_square)

    assert run_world(2, body)[1] is not None


def test_a_stage_that_cannot_split_its_backward_runs_split_schedules_too():
    schedule = schedules.zbv(2, 4)
    _, pipelined = trained(schedule, 1, lambda _: batch(8), layer=WholeLayer)
    alone = [Layer(number) for number in range(4)]
    one_process(alone, *batch(8), half_square, 4)
    assert all(np.array_equal(a, b) for a, b in zip(gradients(pipelined), gradients(alone), strict=True))


class Fork:
    """x -> (2x, 3x), and back."""

    def forward(self, x):
        return (2 * x, 3 * x), None

    def backward(self, context, grad_y):
        return 2 * grad_y[0] + 3 * grad_y[1]


class Product:
    """(a, b) -> a * b; keeps the gradients it was given."""

    def __init__(self) -> None:
        self.seen = []

    def forward(self, x):
        return x[0] * x[1], x

    def backward(self, context, grad_y):
        self.seen.append(grad_y)
        return grad_y * context[1], grad_y * context[0]


class Source:
    """The identity; keeps the gradients that come back."""

    def __init__(self) -> None:
        self.seen = []

    def forward(self, x):
        return x, None

    def backward(self, context, grad_y):
        self.seen.append(grad_y)


def test_stages_may_have_several_inputs_and_outputs():
    def body(group):
        stage = [Source, Fork, Product][group.rank]()
        pipe = Pipeline(stage, group, "1f1b", 2)
        loss = pipe.step(np.array([1.0, 2.0]), np.zeros(2), lambda y, _: (float(y.sum()), np.ones_like(y)), reduction="sum")
        return loss, getattr(stage, "seen", None)

    source, _, product = run_world(3, body)
    assert product[0] == 6 * (1 + 4), "the sum of 2x * 3x"
    assert [grad.tolist() for grad in source[1]] == [[12.0], [24.0]]


@pytest.mark.parametrize("name", ["gpipe", "looped_bfs"])
def test_forward_and_backward_apart(name: str):
    schedule = schedule_of(name, 2, 4)
    x, target = batch(10)

    def body(group):
        stages = [Layer(number) for number in schedule.pieces(group.rank)]
        pipe = Pipeline(stages, group, schedule)
        y = pipe.forward(x)
        pipe.backward(y, None if y is None else half_square(y, target)[1])
        return y, dict(zip(schedule.pieces(group.rank), stages, strict=True))

    (nothing, first), (y, second) = run_world(2, body, faults=DELAYS)
    alone = [Layer(number) for number in range(schedule.virtual_stages)]
    one_process(alone, x, target, half_square, 1)
    assert nothing is None
    assert y.shape == (10, WIDTH)
    pipelined = {**first, **second}
    for found, wanted in zip(gradients([pipelined[n] for n in sorted(pipelined)]), gradients(alone), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_inference_keeps_nothing_where_no_backward_can_follow():
    def body(group):
        pipe = Pipeline(Layer(group.rank), group, "1f1b", 4)
        y = pipe.forward(batch(4)[0])
        assert pipe.peak_activations == 0
        with pytest.raises(UsageError, match=r"starts backwards before all forwards are done(.|\n)*gpipe"):
            pipe.backward(y, y)
        return y

    alone = [Layer(0), Layer(1)]
    y = alone[1].forward(alone[0].forward(batch(4)[0])[0])[0]
    np.testing.assert_allclose(run_world(2, body)[1], y, rtol=1e-14)


def test_a_backward_needs_its_forward_and_gradients_of_its_rows():
    def body(group):
        pipe = Pipeline(Layer(0), group, "gpipe", 2)
        with pytest.raises(UsageError, match="no forward for this backward"):
            pipe.backward(None, None)
        y = pipe.forward(batch(4)[0])
        with pytest.raises(UsageError, match="grads must have the 4 rows that forward returned, and has 3"):
            pipe.backward(y, y[:3])
        with pytest.raises(UsageError, match=r"grads must .*, and is None\ntry: backward\(outputs, grads\)"):
            pipe.backward(y)  # meant as the gradient, as in torch
        pipe.backward(y, y)
        with pytest.raises(UsageError, match="no forward for this backward"):
            pipe.backward(y, y)

    run_world(1, body)


class Timed(Layer):
    """Takes a known time of a virtual clock: forward 1, input 2, weights 1 second."""

    def __init__(self, number: int, clock) -> None:
        super().__init__(number)
        self._clock = clock

    def _spend(self, seconds: float) -> None:
        self._clock.parker().park(self._clock.now() + seconds)

    def forward(self, x):
        self._spend(1)
        return super().forward(x)

    def backward_input(self, context, grad_y):
        self._spend(2)
        return super().backward_input(context, grad_y)

    def backward_weight(self, context, grad_y):
        self._spend(1)
        super().backward_weight(context, grad_y)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_takes_the_time_that_was_simulated(name: str):
    """Computations and messages of known duration, in virtual time."""
    schedule = schedule_of(name, 3, 6)
    latency = 0.25
    world = World(3, faults=FaultPlan(delay_seconds=(latency, latency)), timeout=600.0)

    def body(group):
        stages = [Timed(number, world.clock) for number in schedule.pieces(group.rank)]
        pipe = Pipeline(stages, group, schedule, clock=world.clock)
        pipe.step(*batch(6), half_square)
        return pipe.recorded()

    for recorded in world.run(body):
        whole = schedule.chunks
        simulated = schedule.simulate(whole, 2 * whole, whole, latency)
        assert recorded.makespan == pytest.approx(simulated.makespan, rel=0.01)
        assert recorded.bubble_fraction == pytest.approx(simulated.bubble_fraction, abs=0.01)
        assert recorded.peak_activations == simulated.peak_activations
        assert [s.name for s in recorded.spans if s.lane == 1] == [s.name for s in simulated.spans if s.lane == 1]


def test_nothing_is_recorded_before_the_first_step():
    for recorded in run_world(2, lambda group: Pipeline(Layer(group.rank), group, "gpipe", 2).recorded()):
        assert not recorded.spans


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_a_stage_is_raised_there_and_ends_the_group_everywhere(kind):
    class Broken(Layer):
        def backward(self, context, grad_y):
            raise kind("no such gradient")

    def body(group):
        pipe = Pipeline(Broken(1) if group.rank == 1 else Layer(0), group, "1f1b", 4)
        with pytest.raises((kind, GroupAbortedError)) as raised:
            pipe.step(*batch(8), half_square)
        return raised.value

    first, second, third = run_world(3, body)
    assert isinstance(second, kind)
    for other in (first, third):
        assert isinstance(other, GroupAbortedError)
        assert other.rank == 1
        assert f"{kind.__name__}: no such gradient" in other.cause


@pytest.mark.parametrize("method", ["_begin", "_exchange"])
def test_an_interrupt_before_the_first_message_ends_the_group_everywhere(method: str):
    def train(group):
        pipe = Pipeline(Layer(group.rank), group, "1f1b", 4)
        if group.rank == 0:
            setattr(pipe, method, Mock(side_effect=KeyboardInterrupt))
        pipe.step(*batch(8), half_square)

    def body(group):
        with pytest.raises(KeyboardInterrupt if group.rank == 0 else GroupAbortedError):
            train(group)

    run_world(2, body)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_when_a_rank_dies_the_others_name_it(victim: int):
    def body(group):
        pipe = Pipeline(Layer(group.rank), group, "1f1b", 4)
        while True:
            pipe.step(*batch(8), half_square)

    faults = FaultPlan(delay_seconds=(0.0, 0.01), kill={victim: Kill(at_operation=23)})
    results = run_world(3, body, faults=faults, return_exceptions=True)
    for rank, error in enumerate(results):
        assert isinstance(error, RankKilled if rank == victim else PeerLostError)
        assert rank == victim or error.rank == victim


def test_ranks_with_different_schedules_are_told_both():
    def body(group):
        with pytest.raises(CollectiveMismatchError) as raised:
            Pipeline(Layer(0), group, "1f1b" if group.rank else "gpipe", 4)
        return raised.value

    for error in run_world(2, body):
        assert "gpipe: 2 stages" in error.signatures[0]
        assert "one_f_one_b: 2 stages" in error.signatures[1]


def test_pipelines_of_one_schedule_that_ranks_use_in_different_orders_are_told_apart():
    def body(group):
        pipes = [Pipeline(Layer(group.rank), group, "1f1b", 2) for _ in range(2)]
        pipes[group.rank].step(*batch(4), half_square)

    for error in run_world(2, body, return_exceptions=True):
        assert isinstance(error, CollectiveMismatchError)
        assert error.signatures[0].endswith("#1")
        assert error.signatures[1].endswith("#2")


@pytest.mark.parametrize(
    ("stage", "schedule", "microbatches", "message"),
    [
        (Layer(0), "zbv", 4, "every rank holds 2"),
        (Layer(0), schedules.zbv(1, 4), None, "was given 1 stages, but zbv: 1 stages, 2 chunks"),
        (Layer(0), schedules.gpipe(2, 4), None, "is for 2 ranks, but the group has 1"),
        (Layer(0), schedules.gpipe(1, 4), 8, "num_microbatches=8, but the schedule is gpipe"),
        (Layer(0), schedules.Schedule.from_text("0F0"), None, "is not sound"),
        (object(), "gpipe", 4, "stage 0 is a object without forward"),
        (Layer(0), "no_such", 4, "there is no schedule"),
        (Layer(0), None, 4, "schedule=None is no schedule"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused(stage, schedule, microbatches, message: str):
    with pytest.raises(UsageError, match=message):
        run_world(1, lambda group: Pipeline(stage, group, schedule, microbatches))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, np.zeros(4), half_square), "x is None"),
        ((batch(4)[0], None, half_square), "target is None"),
        ((*batch(4), None), "needs loss_fn"),
        ((*batch(3), half_square), "too few for 4"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_and_the_group_stays_open(arguments, message: str):
    def body(group):
        pipe = Pipeline(Layer(0), group, "1f1b", 4)
        with pytest.raises(UsageError, match=message):
            pipe.step(*arguments)
        return pipe.step(*batch(4), half_square)

    assert run_world(1, body)[0] > 0


@pytest.mark.parametrize("options", [{"reduction": "median"}, {"reduction": "sum", "weight": len}, {"weight": 2.0}])
def test_options_that_every_rank_gives_are_refused_on_every_rank(options):
    """Also where no loss is computed: a rank that went on would wait for one that refused."""

    def body(group):
        pipe = Pipeline(Layer(group.rank), group, "1f1b", 4)
        with pytest.raises(UsageError, match=r"no reduction|mean nothing|no function"):
            pipe.step(*batch(4), half_square, **options)
        return pipe.step(*batch(4), half_square)

    assert run_world(3, body)[2] > 0


class Forgetful(Layer):
    """A layer whose forward returns y alone, of two rows."""

    def forward(self, x):
        return super().forward(x)[0]


@pytest.mark.parametrize(
    ("layer", "loss_fn", "message"),
    [
        (Layer, lambda y, target: float(y.sum()), r"loss_fn returned float(.|\n)*\(loss, gradient of y\)"),
        (Layer, lambda y, target: (1.0, y, target), "loss_fn returned 3 values"),
        (Layer, lambda y, target: (None, y), r"loss_fn returned a NoneType as the loss(.|\n)*\(loss, gradient of y\)"),
        (Layer, lambda y, target: (1.0, None), r"loss_fn returned None as the gradient of y(.|\n)*\(loss, gradient of y\)"),
        (Forgetful, half_square, r"stage 0's forward returned ndarray(.|\n)*\(y, context\)"),
    ],
)
def test_who_returns_too_little_or_too_much_is_told_what_to_return(layer, loss_fn, message: str):
    with pytest.raises(UsageError, match=message):
        run_world(1, lambda group: Pipeline(layer(0), group, "1f1b", 2).step(*batch(4), loss_fn))


def test_a_schedule_of_ones_own_runs_as_well():
    """1F1B read from its CSV, with explicit messages."""
    schedule = schedules.Schedule.from_csv(schedules.one_f_one_b(2, 3).with_messages().to_csv(), "mine")
    _, pipelined = trained(schedule, 1, lambda _: batch(6))
    alone = [Layer(0), Layer(1)]
    one_process(alone, *batch(6), half_square, 3)
    assert all(np.array_equal(a, b) for a, b in zip(gradients(pipelined), gradients(alone), strict=True))
