"""A group of an earlier generation, which somebody still holds and calls: the next one goes on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ferrorpc import FerroError, GradientSynchronizer, GroupClosedError, NcclError
from ferrorpc.coordination.causes import REFORMED_HINT
from ferrorpc.coordination.local import LocalWorld
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


def test_who_goes_on_with_an_earlier_generations_group_is_told_of_the_one_that_followed() -> None:
    """Not to call init_process_group() again, which is refused while there is that one."""

    def body(group):
        part, stream = group.subgroup([1, 0]), group.stream()
        renewed = group.reform()
        told = []
        for call in (
            lambda: group.all_reduce(1),
            lambda: group.recv(1 - group.rank),
            lambda: stream.all_reduce(np.ones(1), 0),
            lambda: part.all_reduce(1),
            lambda: part.recv(1 - part.rank),
        ):
            with pytest.raises(FerroError, match="generation 1 was replaced by generation 2") as caught:
                call()
            told.append(caught.value.hint)
        with pytest.raises(GroupClosedError):
            group.barrier()
        return told, int(renewed.all_reduce(1))

    assert run_world(2, body) == [([REFORMED_HINT] * 5, 2)] * 2


@pytest.mark.parametrize("what", ["a failure", "a lost link"])
def test_what_a_rank_reports_of_an_earlier_generation_leaves_this_one_as_it_is(what: str) -> None:
    world = LocalWorld(2)
    sessions = [world.session(rank) for rank in range(2)]
    before = [session.membership.latch for session in sessions]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda session: session.rejoin(10.0), sessions))
    if what == "a failure":
        sessions[0].report(NcclError("late"), before[0])
    else:
        sessions[0].report_link_lost(1, "late", before[0])
    assert [session.membership.latch.cause for session in sessions] == [None, None]
