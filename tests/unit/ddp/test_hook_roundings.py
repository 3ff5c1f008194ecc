"""What hooks that send narrow numbers leave out of a mean, and that error feedback brings all of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ferrorpc import GradientSynchronizer
from ferrorpc.ddp.hooks import Compress, ErrorFeedback, Hook, PowerSGD
from ferrorpc.testing import run_world

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


@pytest.mark.parametrize("wire", ["bf16", "f16", "int8"])
@pytest.mark.parametrize(
    ("among", "size"), [(lambda hook: hook, 3), (lambda hook: PowerSGD(4, hook), 2)], ids=["values", "factors"]
)
def test_with_feedback_no_more_is_missing_after_many_steps_than_after_a_few(among, wire, size):
    """Whichever rank adds a value up, and however small it is beside those that it is coded with."""
    few, many = (missing(size, lambda: ErrorFeedback(among(Compress(wire))), steps) for steps in (10, 60))
    assert many < 2 * few
    assert many < 0.4 * missing(size, lambda: among(Compress(wire)), 60)


def test_a_mean_that_fits_float16_arrives_where_the_sum_does_not_fit():
    def body(group):
        found = []
        for hook in (Compress("f16"), ErrorFeedback(Compress("f16"))):
            sync = GradientSynchronizer({"w": np.zeros(2, np.float32)}, group, hook=hook)
            found.append(sync({"w": np.array([60000, 1], np.float32)})["w"].tolist())
        return found

    for found in run_world(3, body):
        assert found == [[60000, 1]] * 2
