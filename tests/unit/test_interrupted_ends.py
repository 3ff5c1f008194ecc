"""Ctrl-C within close() and reform(): what was begun can be finished, so the process can always join again."""

from __future__ import annotations

import itertools
from functools import partial

import pytest

import ferrorpc
from ferrorpc import GroupAbortedError, GroupClosedError, PeerLostError, ProcessGroup
from ferrorpc.testing import run_world
from tests.interrupts import was_struck

FILES = ("ferrorpc/group.py", "ferrorpc/operations/dispatch.py")


def alone() -> ProcessGroup:
    return ferrorpc.init_process_group(timeout=5.0)


@pytest.mark.parametrize("is_subgroup", [False, True])
def test_wherever_close_is_interrupted_the_group_is_left(is_subgroup: bool) -> None:
    """Nobody else could do it: a second close() does nothing."""

    def body(world: ProcessGroup, place: int) -> bool:
        group = world.subgroup([0, 1]) if is_subgroup else world
        assert group is not None
        if group.rank == 1:
            with pytest.raises((GroupAbortedError, PeerLostError), match="rank 0"):
                group.barrier(timeout=60.0)
            return False
        work = group.recv(1, async_op=True)
        struck = was_struck(place, group.close, FILES)
        group.close()
        with pytest.raises(GroupClosedError):
            work.wait(1.0)
        return struck

    place = 1
    while run_world(2, partial(body, place=place))[0]:
        place += 1
    assert place > 3


@pytest.mark.parametrize("end", ["reform", "close"])
def test_wherever_reform_is_interrupted_the_group_can_be_formed_again_or_closed(end: str) -> None:
    for place in itertools.count(1):
        group, renewed = alone(), list[ProcessGroup]()
        reform = partial(lambda group, renewed: renewed.append(group.reform()), group, renewed)
        struck = was_struck(place, reform, (*FILES, "ferrorpc/guard.py"))
        if end == "reform" and struck:
            renewed.append(group.reform())
        for each in renewed:
            assert each.all_reduce(1) == 1
            each.close()
        group.close()
        if not struck:
            break
    assert place > 3
    with pytest.raises(GroupClosedError, match="use the group that"):
        group.reform()


@pytest.mark.parametrize("numbers_begin_anew", [False, True])
def test_an_interrupt_of_reform_that_comes_too_late_ends_the_generation_that_the_others_have(numbers_begin_anew: bool) -> None:
    """They would wait there for this rank, which waits for them to ask for another one. A coordinator that has lost its journal
    gives the next generation the number of this one."""

    def body(group: ProcessGroup, place: int) -> bool:
        if numbers_begin_anew:
            group.session._world.generation.number = 0
            group._backend._networks._networks.clear()
        if group.rank == 0:
            made = list[ProcessGroup]()
            files = (*FILES, "backends/simulated.py", "coordination/local.py")
            struck = was_struck(place, lambda: made.append(group.reform()), files)
            renewed = made[0] if made else group.reform()
        else:
            struck, renewed = False, group.reform()
        try:
            total = renewed.all_reduce(1)
        except GroupAbortedError as error:
            assert "KeyboardInterrupt during reform()" in error.cause  # noqa: PT017
            total = renewed.reform().all_reduce(1)
        assert total == 2
        return struck

    place = 1
    while run_world(2, partial(body, place=place), timeout=10.0)[0]:
        place += 1
    assert place > 20


def test_two_threads_may_close_a_group() -> None:
    def body(group: ProcessGroup) -> None:
        clock = group.session.clock
        group.recv(1 - group.rank, async_op=True)
        if group.rank == 0:
            clock.start(group.close, "closes too")
        clock.parker().park(clock.now() + 0.1)
        group.close()

    run_world(2, body)
