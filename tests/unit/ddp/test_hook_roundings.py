"""What hooks that send narrow numbers leave out of a mean, and that error feedback brings all of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ferrorpc import GradientSynchronizer
from ferrorpc.ddp.hooks import Compress, ErrorFeedback, Hook
from ferrorpc.testing import run_world
from ferrorpc.wire.codecs import CODEC_NAMES

LIKE = np.zeros((60, 20), np.float32)
"""Of more blocks than ranks, and no whole number of them."""


def grads(rank: int) -> np.ndarray:
    """Large values in every block, and on rank 0 small ones beside them."""
    large = np.where(np.arange(LIKE.size) % 100, 0, 127).reshape(LIKE.shape).astype(np.float32)
    small = np.random.default_rng(0).uniform(0.1, 0.4, LIKE.shape).astype(np.float32)
    return large if rank else np.maximum(large, small)


def missing(size: int, make: Callable[[], Hook], steps: int) -> float:
    """The most that is missing of any mean, or too much, in all steps together."""

    def body(group):
        sync = GradientSynchronizer(LIKE, group, hook=make())
        return sum(np.float64(sync(grads(group.rank))) for _ in range(steps))

    wanted = steps * sum(np.float64(grads(rank)) for rank in range(size)) / size
    return max(np.abs(found - wanted).max() for found in run_world(size, body))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("wire", CODEC_NAMES)
def test_with_feedback_no_more_is_missing_after_many_steps_than_after_a_few(wire, size):
    """Whichever rank adds a value up, and however small it is beside those that it is coded with."""
    few, many = (missing(size, lambda: ErrorFeedback(Compress(wire)), steps) for steps in (10, 60))
    assert many <= 2 * few
    assert many < 0.4 * missing(size, lambda: Compress(wire), 60)


@pytest.mark.parametrize("wire", CODEC_NAMES)
def test_what_the_rank_that_adds_up_does_not_use_arrives_too(wire):
    """Also where each value is too small for float16, and where that rank has other weights."""
    wanted = np.random.default_rng(1).uniform(1e-7, 3e-7, LIKE.shape).astype(np.float32)

    def body(group):
        sync = GradientSynchronizer(LIKE, group, hook=ErrorFeedback(Compress(wire)))
        return sum(np.float64(sync(None if group.rank else wanted, weight=[1, 3, 0][group.rank])) for _ in range(100))

    for found in run_world(3, body):
        assert np.abs(found - 25 * wanted).max() < 4e-7


WEIGHTS = [
    [(4, 512, 512), (512, 512, 512), (4, 512, 512)],
    [(1e-6, 1, 1), (1, 1, 1), (1, 1, 1)],
    [(1e-30, 1, 1), (1e8, 1, 1), (1, 1, 1), (1, 1, 1)],
    [(0, 100, 100), (1, 0, 0), (0, 1, 0)],
]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_feedback_disturbs_no_step_of_other_weights(wire, weights):
    given = [np.random.default_rng(rank).standard_normal(2048).astype(np.float32) for rank in range(3)]

    def errors(group, hook):
        sync = GradientSynchronizer(given[0], group, hook=hook)
        means = [sync(given[group.rank], weight=step[group.rank]) for step in weights]
        wanted = [sum(w * np.float64(each) for w, each in zip(step, given, strict=True)) / sum(step) for step in weights]
        return [np.abs(mean - each).max() for mean, each in zip(means, wanted, strict=True)]

    def body(group):
        return errors(group, ErrorFeedback(Compress(wire))), errors(group, Compress(wire))

    for with_feedback, without in run_world(3, body):
        assert max(with_feedback) < 4 * max(without), (with_feedback, without)


def test_what_was_left_out_of_one_slice_is_not_added_to_another():
    """In a world of another size, as after reform(), ranks add up other slices, of the same length here."""
    given = [np.random.default_rng(rank).standard_normal(512).astype(np.float32) for rank in range(3)]
    given = [each * np.repeat(np.float32([1e-3, 1e3]), 256) for each in given]

    def body(group, states):
        hook = ErrorFeedback(Compress("int8"))
        sync = GradientSynchronizer(given[0], group, hook=hook)
        if states:
            hook.load_state(states[group.rank + 1])
        return sync(given[group.rank]), hook.state()

    states = [state for _, state in run_world(3, lambda group: body(group, None))]
    for found, state in run_world(2, lambda group: body(group, states)):
        assert np.abs(found - (given[0] + given[1]) / 2)[:256].max() < 1e-4
        assert len(state) == 2, "of its gradients, and of its slice"


def test_a_mean_that_fits_float16_arrives_where_the_sum_does_not_fit():
    def body(group):
        found = []
        for hook in (Compress("f16"), ErrorFeedback(Compress("f16"))):
            sync = GradientSynchronizer({"w": np.zeros(2, np.float32)}, group, hook=hook)
            found.append(sync({"w": np.array([60000, 1], np.float32)})["w"].tolist())
        return found

    for found in run_world(3, body):
        assert found == [[60000, 1]] * 2
