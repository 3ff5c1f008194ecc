"""What becomes of recvs whose message nobody sends any more: their sender has left, or this rank leaves."""

from __future__ import annotations

import gc
import logging

import numpy as np
import pytest

from ferrorpc import FerroError, GroupClosedError, PeerLostError, ProcessGroup
from ferrorpc.testing import FaultPlan, World, run_world

X = np.ones(3, np.float32)
LONG = np.ones(6 << 20, np.uint8)
LEFT = r"^recv\(from rank 1, tag=0\) has nobody to send to it: rank 1 has left: it closed the group, or called reform\(\)"


@pytest.mark.parametrize("faults", [None, FaultPlan(delay_seconds=(0.0, 0.01))])
def test_a_recv_from_a_rank_that_has_left_ends_alone(faults: FaultPlan | None) -> None:
    def body(group: ProcessGroup) -> None:
        if group.rank == 1:
            group.send(X, 0, tag=2)
            group.close()
            return
        if group.rank == 0:
            posted = group.recv(1, tag=3, async_op=True)
            with pytest.raises(PeerLostError, match=LEFT) as caught:
                group.recv(1)
            assert (caught.value.rank, caught.value.retryable) == (1, True)
            with pytest.raises(PeerLostError, match="nobody to send"):
                posted.wait()
            assert group.recv(1, tag=2).tolist() == X.tolist()
            with pytest.raises(PeerLostError, match="nobody to send"):
                group.recv(1, tag=2)
        group.send(X, 2 - group.rank)
        assert group.recv(2 - group.rank).tolist() == X.tolist()

    run_world(3, body, faults=faults)


def test_a_recv_that_has_a_part_of_its_message_ends_with_the_generation_once_its_sender_has_left() -> None:
    world = World(2)

    def body(group: ProcessGroup) -> None:
        if group.rank == 1:
            group.send(LONG, 0, async_op=True)
            group.close()
            return
        world.clock.parker().park(2.0)
        with pytest.raises(PeerLostError, match="rank 1 was lost: it left the job"):
            group.recv(1)
        with pytest.raises(PeerLostError, match="rank 1 was lost: it left the job"):
            group.barrier()

    world.run(body)


def test_in_a_subgroup_the_rank_that_has_left_is_named_by_both_of_its_numbers() -> None:
    def body(group: ProcessGroup) -> None:
        sub = group.subgroup([1, 0])
        assert sub is not None
        if group.rank == 1:
            group.close()
            return
        with pytest.raises(PeerLostError, match=LEFT) as caught:
            sub.recv(0)
        assert (caught.value.rank, caught.value.group_rank) == (1, 0)

    run_world(2, body)


def test_who_waits_for_a_rank_that_called_reform_meets_it_there() -> None:
    def body(group: ProcessGroup) -> int:
        if group.rank == 0:
            with pytest.raises(PeerLostError, match=LEFT):
                group.recv(1)
        return int(group.reform().all_reduce(1))

    assert run_world(3, body) == [3, 3, 3]


def test_recvs_that_nobody_answers_get_half_the_time_of_a_reform() -> None:
    world = World(3)

    def body(group: ProcessGroup) -> float:
        sub = group.subgroup([0, 1, 2])
        assert sub is not None
        others = [rank for rank in range(3) if rank != group.rank]
        works = [each.recv(other, async_op=True) for each in (group, sub) for other in others]
        group.barrier()
        began = world.clock.now()
        renewed = group.reform(60.0)
        took = world.clock.now() - began
        for work in works:
            with pytest.raises(GroupClosedError, match=r"by close\(\) or reform\(\)"):
                work.wait()
        assert int(renewed.all_reduce(1)) == 3
        return took

    assert all(30.0 <= took < 32.0 for took in world.run(body))  # of virtual time


def test_a_reform_waits_for_a_rank_that_still_sends() -> None:
    """Its later calls would fail, and with them the generation."""
    world = World(2)

    def body(group: ProcessGroup) -> None:
        works = [group.recv(1, async_op=True) for _ in range(4)] if group.rank == 0 else []
        for _ in range(4 if group.rank else 0):
            world.clock.parker().park(world.clock.now() + 1.0)
            group.send(X, 0)
        assert int(group.reform(60.0).all_reduce(1)) == 2
        assert [work.exception() for work in works] == [None] * len(works)

    world.run(body)


def test_a_recv_that_has_a_part_of_its_message_is_waited_for() -> None:
    def body(group: ProcessGroup) -> None:
        work = group.recv(1, async_op=True) if group.rank == 0 else group.send(LONG, 0, async_op=True)
        group.reform(60.0)
        assert work.exception() is None

    run_world(2, body, faults=FaultPlan(delay_seconds=(0.3, 0.3)))


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("how", ["close", "reform", "close of a subgroup"])
def test_nobody_has_to_look_at_a_recv_that_ends_because_a_rank_leaves(
    how: str, leaver: int, caplog: pytest.LogCaptureFixture
) -> None:
    end = ProcessGroup.reform if how == "reform" else ProcessGroup.close

    def body(group: ProcessGroup) -> None:
        sub = group.subgroup([0, 1])
        assert sub is not None
        used = sub if how == "close of a subgroup" else group
        work = used.recv(1, async_op=True) if group.rank == 0 else None
        group.barrier()
        if group.rank == leaver:
            end(used)
        elif group.rank == 0:
            used.synchronize()
        assert work is None or isinstance(work._error, FerroError)  # looked at without being told
        del work
        gc.collect()
        if group.rank != leaver:
            end(used)

    with caplog.at_level(logging.ERROR, "ferrorpc.work"):
        run_world(2, body)
    assert [record.getMessage() for record in caplog.records] == []
