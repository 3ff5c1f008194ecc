"""A gradient in parts, and computed in its place in the bucket: each part counts once, and none is lost without an error."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ferrorpc.ddp.synchroniser import GradientSynchronizer
from ferrorpc.errors import GroupAbortedError, UsageError
from tests.unit.ddp.world import run_world


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("weight", [None, 2])
def test_a_gradient_computed_in_its_place_is_not_copied(dtype, weight):
    def body(group):
        sync = GradientSynchronizer(
            {"a": np.zeros((2, 3), dtype), "b": np.zeros(2, dtype)}, group, gradient_as_bucket_view=True
        )
        places = []
        for number in range(2):
            with sync.step(weight) as step:
                place = step.place("a")
                np.add(np.ones((2, 3), dtype), np.full((2, 3), group.rank + number, dtype), out=place)
                step.ready("a")
                with pytest.raises(UsageError, match="ready before"):
                    step.place("a")
                step.ready("b", np.full(2, 4, dtype))
            assert step.grads["a"].__array_interface__["data"] == place.__array_interface__["data"]
            assert step.grads["a"].dtype == dtype
            places.append(step.grads["a"].astype(float).tolist())
        return places

    assert run_world(2, body) == [[[[1.5] * 3] * 2, [[2.5] * 3] * 2]] * 2


def test_parts_of_a_gradient_add_up_in_its_bucket():
    def body(group):
        sync = GradientSynchronizer({"a": np.zeros(2, ml_dtypes.bfloat16), "b": np.zeros(2)}, group)
        with sync.step() as step:
            step.add("a", np.full(2, 1, ml_dtypes.bfloat16))
            step.add("b", np.full(2, 10.0))
            step.add("a", np.full(2, 2, ml_dtypes.bfloat16))
            step.ready("a", np.full(2, group.rank, ml_dtypes.bfloat16))
            step.add("b", np.full(2, 20.0))
        return step.grads["a"].astype(float).tolist(), step.grads["b"].tolist()

    assert run_world(2, body) == [([3.5, 3.5], [30.0, 30.0])] * 2


def test_the_first_part_of_a_gradient_may_be_computed_in_its_place():
    def body(group):
        sync = GradientSynchronizer({"a": np.zeros(2)}, group)
        with sync.step() as step:
            step.place("a")[...] = 1.0
            step.add("a", np.full(2, 2.0))
            step.ready("a", np.full(2, 4.0))
        return step.grads["a"].tolist()

    assert run_world(2, body) == [[7.0, 7.0]] * 2


def test_a_gradient_that_this_step_has_not_been_given_is_not_the_one_before():
    def body(group):
        sync = GradientSynchronizer({"a": np.zeros(2)}, group)
        with sync.step() as step:
            place = step.place("a")
            place[...] = 8.0
            step.ready("a")
        with sync.step() as step:
            with pytest.raises(UsageError, match=r"'a' is not there.*\n.*step\.place\(name\)"):
                step.ready("a")
            step.ready("a", np.full(2, 4.0))
        return step.grads["a"].tolist()

    assert run_world(2, body) == [[4.0, 4.0]] * 2


@pytest.mark.parametrize("weight", [None, 2.0])
def test_parts_of_half_types_are_added_in_float32(weight):
    """Where a sum in the type itself would stand still, or exceed it on the way."""
    many = [np.ones(1, ml_dtypes.bfloat16)] * 1000
    large = [np.array([each], np.float16) for each in (40000, 40000, -40000)]

    def body(group):
        sync = GradientSynchronizer({"many": many[0], "large": large[0]}, group)
        found = []
        for _ in range(2):
            with sync.step(weight=weight) as step:
                for name, parts in (("many", many), ("large", large)):
                    for part in parts[:-1]:
                        step.add(name, part)
                    step.ready(name, parts[-1])
            found.append([float(step.grads[name][0]) for name in ("many", "large")])
        return found

    assert run_world(2, body) == [[[1000.0, 40000.0]] * 2] * 2


def test_the_place_of_a_gradient_that_has_parts_is_refused():
    def body(group):
        sync = GradientSynchronizer({"g": np.zeros(1)}, group)
        with sync.step() as step:
            step.add("g", np.ones(1))
            with pytest.raises(UsageError, match="'g' has parts already"):
                step.place("g")
        return step.grads["g"].tolist()

    assert run_world(2, body) == [[1.0]] * 2


PLACED = [[1.0, 2.0], [3.0, 4.0]]
"""What tests compute in a gradient's place."""


@pytest.mark.parametrize(
    ("finish", "expected"),
    [
        (lambda step, place, part: step.ready("a", place), 0),
        (lambda step, place, part: [step.add("a", place), step.ready("a")], 0),
        (lambda step, place, part: [step.add("a", place), step.ready("a", None)], 0),
        (lambda step, place, part: step.add("a", place), 0),
        (lambda step, place, part: [step.add("a", place), step.ready("a", part)], 10),
        (lambda step, place, part: [step.add("a", place), step.add("a", part), step.ready("a", part)], 20),
        (lambda step, place, part: [step.add("a", part), step.ready("a", part)], 20),
    ],
)
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("weight", [None, 2.0])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_what_was_computed_in_a_place_counts_once_also_if_the_place_is_passed(dtype, weight, views, finish, expected):
    """As a function with `out=` returns it."""

    def body(group):
        sync = GradientSynchronizer({"a": np.zeros((2, 2), dtype)}, group, gradient_as_bucket_view=views)
        found = []
        for _ in range(2):
            with sync.step(weight) as step:
                place = step.place("a")
                place[...] = PLACED
                finish(step, place, np.full((2, 2), 10, dtype))
            found.append((step.grads["a"].astype(float) - expected).tolist())
        return found

    assert run_world(2, body) == [[PLACED] * 2] * 2


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize(
    ("given", "what"),
    [(lambda place: None, "None"), (lambda place: np.full((2, 2), 10.0), "another array"), (np.transpose, "another array")],
)
def test_another_gradient_than_the_one_in_its_place_is_refused(given, what, views):
    """Whether it is the whole or a further part was not said: what is in the place was lost."""

    def body(group):
        sync = GradientSynchronizer({"a": np.zeros((2, 2))}, group, gradient_as_bucket_view=views)
        with sync.step() as step:
            place = step.place("a")
            place[...] = PLACED
            with pytest.raises(UsageError, match=rf"'a' was to be computed in its place, but {what} was passed(.|\n)*add\(\)"):
                step.ready("a", given(place))
            step.ready("a")
        return step.grads["a"].tolist()

    assert run_world(2, body) == [PLACED] * 2


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("method", ["add", "ready"])
def test_a_place_in_which_parts_were_added_up_is_no_further_part(method, views):
    def body(group):
        sync = GradientSynchronizer({"a": np.zeros((2, 2))}, group, gradient_as_bucket_view=views)
        with sync.step() as step:
            place = step.place("a")
            place[...] = PLACED
            step.add("a", np.zeros((2, 2)))
            with pytest.raises(UsageError, match=r"'a' lies in the place of 'a', .*\n.*ready\(name\) alone"):
                getattr(step, method)("a", place)
        return step.grads["a"].tolist()

    assert run_world(2, body) == [PLACED] * 2


def test_a_gradient_that_was_computed_in_its_place_and_is_never_ready_ends_the_step():
    """It counted as zeros."""

    def body(group):
        def take_step():
            with GradientSynchronizer({"a": np.zeros(2)}, group).step() as step:
                step.place("a")[...] = 1.0
                if group.rank == 0:
                    step.ready("a")

        error = UsageError if group.rank else GroupAbortedError
        with pytest.raises(error, match="'a' was to be computed in its place, but was never ready"):
            take_step()

    run_world(2, body)


@pytest.mark.parametrize("views", [False, True])
def test_a_place_without_elements_is_like_any_other(views):
    def body(group):
        sync = GradientSynchronizer({"a": np.zeros(2), "none": np.zeros((0, 2))}, group, gradient_as_bucket_view=views)
        with sync.step() as step:
            step.add("a", np.ones(2))
            step.ready("none", step.place("none"))
        with sync.step() as step:
            step.add("none", step.place("none"))
            step.ready("none", np.zeros((0, 2)))
        return step.grads["none"].shape

    assert run_world(2, body) == [(0, 2)] * 2


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("weight", [None, 3.0])
def test_a_place_that_was_ready_is_no_other_ones_gradient(views: bool, weight: float | None):
    """As of tied weights, whose gradients are the same: what is there is weighted by now, or the mean."""

    def body(group):
        like = {"in": np.zeros(2), "out": np.zeros(2)}
        sync = GradientSynchronizer(like, group, gradient_as_bucket_view=views)
        with sync.step(weight) as step:
            place = step.place("in")
            place[...] = 5.0
            step.ready("in")
            with pytest.raises(UsageError, match=r"(?s)'out' lies in the place of 'in'.*copy it before"):
                step.ready("out", place)
            step.ready("out", np.full(2, 5.0))
        return {name: mean.tolist() for name, mean in step.grads.items()}

    assert run_world(2, body) == [{"in": [5.0] * 2, "out": [5.0] * 2}] * 2


def test_a_mean_of_the_last_step_that_is_overwritten_is_to_be_copied_unless_its_place_was_asked_for():
    def body(group):
        sync = GradientSynchronizer({"a": np.zeros(2)}, group, gradient_as_bucket_view=True)
        with sync.step() as step:
            step.ready("a", np.ones(2))
        mean = step.grads["a"]
        with sync.step() as step:
            step.add("a", np.full(2, 5.0))
            with pytest.raises(UsageError, match="copy it before the step"):
                step.ready("a", mean)
            step.ready("a")
        with sync.step() as step:
            step.add("a", step.place("a"))
            with pytest.raises(UsageError, match="call ready\\(name\\) alone"):
                step.ready("a", mean)
            step.ready("a")

    assert run_world(1, body) == [None]


def test_the_mean_is_of_the_kind_in_which_the_place_was_passed():
    torch = pytest.importorskip("torch")

    def body(group):
        sync = GradientSynchronizer({"a": np.zeros(2)}, group)
        with sync.step() as step:
            place = step.place("a")
            place[...] = 5.0
            step.ready("a", torch.from_numpy(place))
        return type(step.grads["a"])

    assert run_world(1, body) == [torch.Tensor]
