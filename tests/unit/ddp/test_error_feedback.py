"""Residues count as their gradients do: with the rank's weight of the step that delivers them, and not after an overflow."""

from __future__ import annotations

import copy
import gc
import pickle

import numpy as np
import pytest

import ferrorpc
from ferrorpc.ddp.hooks import Compress, ErrorFeedback, PowerSGD, TopK
from ferrorpc.testing import run_world

ONES = np.ones(64, np.float32)


def synchroniser(group, hook, **more) -> ferrorpc.GradientSynchronizer:
    return ferrorpc.GradientSynchronizer({"a": np.zeros(64, np.float32)}, group, hook=hook, **more)


@pytest.mark.parametrize(
    "weights", [(4096, 4096, 4096, 8, 4096), (8, 8, 4096, 8, 8), (1, 1, 1, 1, 1), (1, 1e-35, 1e35, 1, 1e-30)]
)
@pytest.mark.parametrize("bits", ["bf16", "int8"])
def test_a_step_of_another_weight_takes_residues_in_its_own_scale(weights, bits):
    """As the last batch of an epoch, which has fewer tokens."""

    def body(group):
        sync, chance, errors = synchroniser(group, ErrorFeedback(Compress(bits))), np.random.default_rng(0), []
        for weight in weights:
            mine = chance.standard_normal(64).astype(np.float32)  # the same on all ranks
            errors.append(np.abs(sync({"a": mine}, weight=weight)["a"] - mine).max())
        return max(errors)

    assert max(run_world(2, body)) < 0.06


def test_no_more_is_delivered_than_was_left_out():
    def body(group):
        sync = synchroniser(group, ErrorFeedback(TopK(0.25)))
        return [float(sync({"a": ONES}, weight=weight)["a"].max()) for weight in (1000, 1, 1, 1)]

    assert run_world(2, body) == [[1, 2, 3, 4]] * 2


def test_residues_of_a_rank_that_has_left_are_not_delivered_in_the_place_of_all():
    def body(group):
        sync, found = synchroniser(group, ErrorFeedback(TopK(0.25))), []
        with sync.uneven(lambda means: None):
            for _ in range(1 if group.rank else 4):
                found.append(float(sync({"a": ONES})["a"].max()))
        return found

    assert run_world(4, body)[0] == [1, 2, 3, 4]


def test_a_rank_of_weight_zero_keeps_its_residue():
    def body(group):
        hook = ErrorFeedback(TopK(0.25))
        sync = synchroniser(group, hook)
        sync({"a": ONES}, weight=2)
        ((_, before),) = hook.state().items()
        sync({"a": ONES}, weight=group.rank)
        ((_, after),) = hook.state().items()
        kept = np.array_equal(after, before)
        return kept, float(sync({"a": 0 * ONES}, weight=1)["a"].sum())

    (kept, left), (delivered, _) = run_world(2, body)
    assert (kept, delivered) == (True, False)
    assert left > 0


@pytest.mark.parametrize("weight", [3.0, 4096.0])
def test_a_saved_residue_is_of_the_gradient_whatever_the_weight_was(weight):
    def body(group):
        hook, other = ErrorFeedback(TopK(0.25)), ErrorFeedback(TopK(0.25))
        sync, again = synchroniser(group, hook), synchroniser(group, other)
        sync({"a": ONES}, weight=weight)
        ((_, residue),) = hook.state().items()
        assert set(residue.round(5).tolist()) == {0.0, 1.0}
        other.load_state(hook.state())
        return [each({"a": ONES}, weight=7.0)["a"].round(5).tolist() for each in (sync, again)]

    for mine, loaded in run_world(2, body):
        assert mine == loaded


@pytest.mark.parametrize(
    "make",
    [lambda: ErrorFeedback(TopK(0.25)), lambda: ErrorFeedback(Compress("int8")), lambda: ErrorFeedback(PowerSGD(1))],
    ids=["top quarter", "int8", "power"],
)
def test_where_one_rank_overflows_no_rank_keeps_a_residue_of_that_step(make):
    """All see that the mean is not finite, and skip the step."""

    def body(group):
        sync, mine = synchroniser(group, make()), np.full(64, 1000, np.float32)
        mine[0] = np.inf if group.rank == 1 else 1000
        assert not np.isfinite(sync({"a": mine})["a"]).all()
        return [float(np.abs(sync({"a": 0 * ONES})["a"]).max()) for _ in range(2)]

    assert run_world(3, body) == [[0, 0]] * 3


@pytest.mark.parametrize("user", [None, 1])
def test_the_residue_of_a_parameter_waits_while_its_rank_does_not_use_it(user):
    """If no rank uses it there is no mean, and what was sent for one would be lost."""

    def body(group):
        like = {"a": np.zeros(64, np.float32), "b": np.zeros(64, np.float32)}
        sync = ferrorpc.GradientSynchronizer(like, group, hook=ErrorFeedback(TopK(0.25)))
        taken = sync({"a": ONES, "b": 0 * ONES})["a"].sum()
        for _ in range(3):
            mean = sync({"a": 0 * ONES if group.rank == user else None, "b": 0 * ONES})["a"]
            taken += 0 if mean is None else mean.sum()
        for _ in range(6):
            taken += sync({"a": 0 * ONES, "b": 0 * ONES})["a"].sum()
        return float(taken)

    assert run_world(2, body) == [64.0, 64.0]


def test_a_step_that_fails_leaves_residues_as_they_are_then_and_changes_none_later():
    """`b` is not used in it, on rank 0; what it has interrupted is freed when there are newer residues."""

    def body(group):
        hook, like, seen = ErrorFeedback(TopK(0.25)), {"a": np.zeros(64, np.float32), "b": np.zeros(64, np.float32)}, []

        def residue() -> float:
            ((_, both),) = hook.state().items()
            return float(both[:64].sum())  # b comes first

        def fail(step) -> None:
            if group.rank == 1:
                group.recv(0)
                raise ValueError("fails")
            step.ready("b", None)
            step.ready("a", 100 * ONES)
            group.send(np.zeros(1), 1)

        sync = ferrorpc.GradientSynchronizer(like, group, hook=hook)
        sync({"a": 100 * ONES, "b": ONES})
        seen.append(residue())
        with pytest.raises((ferrorpc.FerroError, ValueError)), sync.step() as step:
            fail(step)
        seen.append(residue())
        again = ferrorpc.GradientSynchronizer(like, group.reform(30), hook=hook)
        for _ in range(3):
            again({"a": 0 * ONES, "b": ONES})
        newest = residue()
        del sync, step
        gc.collect()
        return seen, residue() == newest

    assert run_world(2, body) == [([64.0, 64.0], True)] * 2


def test_a_weight_that_is_hardly_more_than_nothing_leaves_residues_alone():
    def body(group):
        sync = synchroniser(group, ErrorFeedback(TopK(0.25)))
        weights = (1.0, 1.0 if group.rank else 1e-60, 1.0, 1.0)
        return [float(sync({"a": ONES}, weight=weight)["a"].max()) for weight in weights]

    assert run_world(2, body) == [[1.0, 2.0, 1.5, 2.0]] * 2, "rank 0 sends in the third step what rank 1 sent in the second"


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda hook: pickle.loads(pickle.dumps(hook))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_of_a_hook_in_use_remembers_the_same_and_serves_another_model(copied):
    def body(group):
        hook = ErrorFeedback(TopK(0.5))
        sync = synchroniser(group, hook)
        sync({"a": np.arange(64, dtype=np.float32)})
        other = copied(hook)
        again = synchroniser(group, other)
        return again({"a": ONES})["a"].tolist(), sync({"a": ONES})["a"].tolist()

    for one, same in run_world(2, body):
        assert one == same
        assert any(one)
