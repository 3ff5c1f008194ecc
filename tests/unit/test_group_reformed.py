"""A group of an earlier generation, which somebody still holds and calls: the next one goes on."""

from __future__ import annotations

import numpy as np
import pytest

from ferrorpc import GradientSynchronizer, GroupClosedError
from ferrorpc.testing import run_world


def test_abort_of_an_earlier_generations_group_does_not_end_the_next_one() -> None:
    def body(group):
        renewed = group.reform()
        if group.rank:
            group.abort("too late")
        return [int(renewed.all_reduce(1)) for _ in range(2)]

    assert run_world(3, body) == [[3, 3]] * 3


def test_a_step_of_an_earlier_generations_synchroniser_concerns_that_rank_alone() -> None:
    def body(group):
        sync = GradientSynchronizer({"g": np.zeros(2)}, group)
        renewed = group.reform()
        if group.rank:
            with pytest.raises(GroupClosedError):
                sync({"g": np.ones(2)})
        return [int(renewed.all_reduce(1)) for _ in range(2)]

    assert run_world(3, body) == [[3, 3]] * 3
