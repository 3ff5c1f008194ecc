"""A group that another one has followed: what still comes of it does nothing to its successor."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ferrorpc import GroupClosedError, NcclError, ProcessGroup
from ferrorpc.coordination.local import LocalWorld
from ferrorpc.testing import World


def test_an_abort_that_comes_after_reform_ends_nothing() -> None:
    """As of a watchdog that was given the group before, and finds it stuck."""

    def body(group: ProcessGroup) -> Any:
        renewed = group.reform(10.0)
        renewed.barrier()
        group.abort("it is stuck")
        with pytest.raises(GroupClosedError):
            group.barrier()
        return int(renewed.all_reduce(1))

    assert World(2).run(body) == [2, 2]


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
