"""From one generation to the next: who goes on with whom, and what an earlier generation's group is good for then."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from ferrorpc import (
    FerroError,
    GradientSynchronizer,
    GroupAbortedError,
    GroupClosedError,
    NcclError,
    PeerLostError,
    ProcessGroup,
    RendezvousTimeoutError,
)
from ferrorpc.coordination.local import LocalWorld
from ferrorpc.generation_errors import REFORMED_HINT
from ferrorpc.testing import FaultPlan, World, run_world

X = np.ones(3, np.float32)


def test_survivors_of_an_elastic_world_go_on_in_the_next_generation() -> None:
    world = World(4, faults=FaultPlan(kill={2: 3.0}), min_size=2)

    def body(group: ProcessGroup) -> Any:
        group.store.set(f"rank/{group.rank}", b"was here")
        sub = group.subgroup([0, 1, 2, 3])

        def train() -> None:
            while True:
                group.all_reduce(X)
                world.clock.parker().park(world.clock.now() + 0.5)

        with pytest.raises(PeerLostError) as raised:
            train()
        assert raised.value.rank == 2
        with group.reform(10.0) as renewed:
            assert renewed.generation == group.generation + 1
            assert renewed.store.get("rank/2") == b"was here"
            for over in (group, sub):
                with pytest.raises((GroupClosedError, PeerLostError)):
                    over.barrier()
            with pytest.raises(GroupClosedError):
                group.reform(1.0)
            total = int(renewed.all_reduce(1))
            renewed.barrier()
            return renewed.size, total

    outcomes = world.run(body)
    assert [outcomes[rank] for rank in (0, 1, 3)] == [(3, 3)] * 3


def test_reform_admits_pending_members_of_a_healthy_group() -> None:
    world = World(3, min_size=1)
    joined: list[int] = []

    def newcomer() -> None:
        group = world.join(30.0)
        joined.append(int(group.all_reduce(1)))

    def body(group: ProcessGroup) -> Any:
        if group.rank == 2:
            return "left"
        if group.rank == 0:
            world.clock.start(newcomer, "newcomer")
        world.clock.parker().park(1.0)
        assert len(group.pending_members) == 1
        renewed = group.reform(10.0)
        assert renewed.pending_members == []
        total = int(renewed.all_reduce(1))
        world.clock.parker().park(world.clock.now() + 1.0)
        return group.generation, renewed.generation, renewed.size, total

    assert world.run(body) == [(1, 2, 3, 3), (1, 2, 3, 3), "left"]
    assert joined == [3]


def test_a_fixed_world_without_a_replacement_says_who_is_missing() -> None:
    world = World(3, faults=FaultPlan(kill={1: 1.0}))

    def body(group: ProcessGroup) -> bool:
        world.clock.parker().park(2.0)
        with pytest.raises(RendezvousTimeoutError, match="rank 1") as caught:
            group.reform(3.0 + group.rank)
        assert caught.value.missing == [1]
        return world.clock.now() < 10.0

    outcomes = world.run(body)
    assert (outcomes[0], outcomes[2]) == (True, True)


def test_one_timeout_bounds_both_what_is_in_flight_and_the_others_that_do_not_come() -> None:
    world = World(2)

    def body(group: ProcessGroup) -> Any:
        clock = group.session.clock
        if group.rank:
            clock.parker().park(20.0)
            return None
        group.recv(1, async_op=True)  # never comes
        with pytest.raises(RendezvousTimeoutError):
            group.reform(4.0)
        return clock.now() <= 4.5

    assert world.run(body) == [True, None]


def test_what_never_ends_on_all_ranks_leaves_them_time_to_meet() -> None:
    def body(group: ProcessGroup) -> int:
        group.recv(1 - group.rank, async_op=True)
        return int(group.reform(4.0).all_reduce(1))

    assert run_world(2, body) == [2, 2]


def test_after_a_reform_in_vain_only_another_one_helps() -> None:
    world = World(2)

    def body(group: ProcessGroup) -> int:
        if group.rank == 0:
            part = group.store
            with pytest.raises(RendezvousTimeoutError):
                group.reform(1.0)
            for call in (group.barrier, lambda: group.all_reduce(X), lambda: group.send(X, 1), lambda: group.recv(1)):
                with pytest.raises(GroupClosedError, match=r"came to nothing(.|\n)*call group.reform\(\) again"):
                    call()
            assert "given up" in repr(group)
            part.set("tried", b"")
        else:
            group.store.wait(["tried"])
        with group.reform(10.0) as renewed:
            return int(renewed.all_reduce(1))

    assert world.run(body) == [2, 2]


def test_after_a_reform_in_vain_a_group_can_be_closed() -> None:
    world = World(2)

    def body(group: ProcessGroup) -> None:
        if group.rank == 0:
            with pytest.raises(RendezvousTimeoutError):
                group.reform(1.0)
            group.close()
            assert "closed" in repr(group)
        else:
            world.clock.parker().park(2.0)
            with pytest.raises(PeerLostError, match="rank 0 has left"):
                group.recv(0)

    world.run(body)


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


@pytest.mark.parametrize("is_broken", [False, True])
def test_who_goes_on_with_an_earlier_generations_group_is_told_of_the_one_that_followed(is_broken: bool) -> None:
    """Not to call init_process_group() again, which is refused while there is that one."""

    def body(group):
        part, stream = group.subgroup([1, 0]), group.stream()
        group.barrier()
        if is_broken:
            if group.rank == 0:
                group.abort("for a test")
            with pytest.raises(GroupAbortedError):
                part.barrier()
        renewed = group.reform()
        told = []
        for call in (
            lambda: group.all_reduce(1),
            lambda: group.recv(1 - group.rank),
            lambda: stream.all_reduce(np.ones(1), 0),
            lambda: part.all_reduce(1),
            lambda: part.recv(1 - part.rank),
            lambda: part.subgroup([0]),
            lambda: part.empty(3),
        ):
            with pytest.raises(FerroError, match="generation 1 was replaced by generation 2") as caught:
                call()
            told.append(caught.value.hint)
            assert not caught.value.retryable  # a loop that reforms after retryable errors would never end
        with pytest.raises(GroupClosedError):
            group.barrier()
        return told, int(renewed.all_reduce(1))

    assert run_world(2, body) == [([REFORMED_HINT] * 7, 2)] * 2


@pytest.mark.parametrize("what", ["a failure", "a lost link"])
def test_what_a_rank_reports_of_an_earlier_generation_leaves_this_one_as_it_is(what: str) -> None:
    world = LocalWorld(2)
    sessions = [world.session(rank) for rank in range(2)]
    before = [session.membership.latch for session in sessions]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda session: session.rejoin(10.0), sessions))
    if what == "a failure":
        before[0].end(NcclError("late"))
    else:
        sessions[0].report_link_lost(1, "late", before[0])
    assert [session.membership.latch.cause for session in sessions] == [None, None]


def test_a_with_block_closes_the_group_that_followed_the_one_it_began_with() -> None:
    def body(group: ProcessGroup) -> tuple[bool, bool]:
        with group:
            renewed = group.reform()
            assert int(renewed.all_reduce(1)) == 2
        return "closed" in repr(renewed), group.session.left

    assert run_world(2, body) == [(True, True)] * 2


def test_a_with_block_goes_through_many_generations_and_keeps_the_newest_alone() -> None:
    def body(group: ProcessGroup) -> tuple[bool, bool]:
        with group as renewed:
            renewed = renewed.reform()
            between = weakref.ref(renewed)
            for _ in range(3):
                renewed = renewed.reform()
            gc.collect()
            kept = between() is not None
            with renewed:
                latest = renewed.reform()
        return kept, "closed" in repr(latest)

    assert run_world(2, body) == [(False, True)] * 2


def test_leaving_a_with_block_by_an_exception_tells_the_generation_that_followed() -> None:
    def body(group: ProcessGroup) -> str:
        try:
            with group:
                renewed = group.reform()
                if renewed.rank == 1:
                    raise ValueError("a bad batch")
                renewed.barrier()
        except (ValueError, PeerLostError) as error:
            return str(error)
        return "nothing"

    first, second = run_world(2, body)
    assert "ValueError: a bad batch" in first
    assert second == "a bad batch"


@pytest.mark.parametrize("seed", range(5))
def test_who_calls_reform_before_an_operation_that_needs_it_is_named_and_all_go_on(seed: int) -> None:
    def body(group: ProcessGroup) -> tuple[bool, int]:
        if group.rank == 1:
            renewed = group.reform(20.0)
        else:
            with pytest.raises(GroupAbortedError, match=r"rank 1.*it called reform\(\) already.*rank \d still needs it"):
                group.barrier()
            renewed = group.reform(20.0)
        return group.session.clock.now() < 15.0, int(renewed.all_reduce(1))

    assert run_world(3, body, seed=seed) == [(True, 3)] * 3
