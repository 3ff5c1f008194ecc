"""Subgroups: their numbers, their ranks in errors, and that they end with the generation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

from ferrorpc import (
    BackendUnavailableError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    FerroError,
    GradientSynchronizer,
    GroupAbortedError,
    GroupClosedError,
    PeerLostError,
    ProcessGroup,
    UsageError,
)
from ferrorpc.testing import FaultPlan, run_groups, run_world
from ferrorpc.transports.credit import EAGER_BYTES
from tests.contract.wrapped import wrapped_backends
from tests.integration.test_grpc_backend import GrpcWorld


def test_ranks_in_errors_are_world_ranks_with_the_group_rank_beside_them() -> None:
    def body(group: ProcessGroup) -> Any:
        sub = group.subgroup([3, 2, 1])
        if sub is None:
            return None
        if group.rank == 1:
            group.session.clock.parker().park(2.0)
        waiting = sub.recv(2, tag=1, async_op=True)
        errors = []
        for call in (lambda: sub.recv(2, timeout=30.0), sub.barrier, lambda: sub.barrier(async_op=True).wait(), waiting.wait):
            with pytest.raises(PeerLostError) as raised:
                call()
            errors.append((raised.value.rank, raised.value.group_rank))
        with pytest.raises(PeerLostError) as raised:
            group.barrier()
        return errors, raised.value.group_rank

    outcomes = run_world(4, body, faults=FaultPlan(kill={1: 1.0}))
    assert outcomes[3] == ([(1, 2)] * 4, None)


def test_where_the_backend_has_no_subgroups_the_ranks_outside_learn_so_too() -> None:
    def body(group: ProcessGroup) -> bool:
        with pytest.raises(BackendUnavailableError, match=r"'wrapped' has no subgroups\ntry: .* split"):
            group.subgroup([0])
        return bool(group.all_reduce(1) == 2)

    assert run_groups([ProcessGroup(backend) for backend in wrapped_backends(2)], body) == [True, True]


def test_a_timeout_in_a_subgroup_names_world_ranks_and_breaks_the_world() -> None:
    def body(group: ProcessGroup) -> Any:
        sub = group.subgroup([1, 2])
        if group.rank == 1:
            with pytest.raises(CollectiveTimeoutError) as raised:
                sub.all_reduce(np.ones(2), timeout=1.0)
            return raised.value.waiting_on
        group.session.clock.parker().park(3.0)
        with pytest.raises(GroupAbortedError) as aborted:
            group.barrier()
        return aborted.value.rank

    assert run_world(3, body) == [1, [2], 1]


def test_waits_of_send_and_recv_in_a_subgroup_ask_for_no_call_with_numbers_of_the_world() -> None:
    """Who has to make the call makes it in the subgroup, where ranks have other numbers."""

    def body(group: ProcessGroup) -> str:
        sub = group.subgroup([3, 1])
        if sub is None:
            return ""
        with pytest.raises(CollectiveTimeoutError) as raised:
            sub.recv(1, tag=4, timeout=1.0) if sub.rank == 0 else sub.send(np.zeros(1 << 20), 0, tag=5, timeout=2.0)
        if sub.rank == 0:
            group.session.clock.parker().park(3.0)
        return raised.value.message

    outcomes = run_world(4, body)
    assert outcomes[3] == "after 1 s, recv(from rank 1, tag=4) waits for rank 1 to send to rank 3 with tag 4"
    assert outcomes[1].endswith("waits for rank 3 to receive from rank 1 with tag 5")


def test_a_mismatch_in_a_subgroup_is_told_with_world_ranks() -> None:
    def body(group: ProcessGroup) -> Any:
        sub = group.subgroup([2, 3])
        group.session.clock.parker().park(1.0)
        with pytest.raises(CollectiveMismatchError) as raised:
            group.barrier() if sub is None else sub.all_reduce(np.ones(group.rank))
        return sorted(raised.value.signatures)

    assert run_world(4, body) == [[2, 3]] * 4


def test_subgroups_of_the_same_ranks_are_different_groups() -> None:
    def body(group: ProcessGroup) -> list[int]:
        one, two = group.subgroup([0, 1]), group.subgroup([0, 1])
        assert one is not None
        assert two is not None
        first = [one, two][group.rank].all_reduce(np.array(1), async_op=True)
        second = [two, one][group.rank].all_reduce(np.array(10), async_op=True)
        return sorted([int(first.wait()), int(second.wait())])

    # Rank 0 brings 1 to the first group, where rank 1 brings 10.
    assert run_world(2, body) == [[11, 11]] * 2


def test_a_subgroup_cannot_reform_and_closing_it_leaves_the_world_alone() -> None:
    def body(group: ProcessGroup) -> int:
        with group.subgroup([1, 0]) as sub:
            assert sub.generation == group.generation
            assert sub.backend == "simulated"
            with pytest.raises(UsageError, match="world"):
                sub.reform(1.0)
        return int(group.all_reduce(1))

    assert run_world(2, body) == [2, 2]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("how", ["close", "reform"])
def test_what_is_in_flight_in_a_subgroup_ends_before_its_world_does(how: str, depth: int) -> None:
    """Also where nothing but the Work remains of the subgroup."""

    def body(group: ProcessGroup) -> float:
        inner: Any = group
        for _ in range(depth):
            inner = inner.subgroup([1, 0])
        if group.rank:
            group.session.clock.parker().park(group.session.clock.now() + 0.2)
        work = inner.all_reduce(np.ones(4), async_op=True)
        del inner
        if how == "close":
            group.close()
        else:
            group.reform()
        return float(work.wait()[0])

    assert run_world(2, body, faults=FaultPlan(delay_seconds=(0.01, 0.03))) == [2.0, 2.0]


def test_a_world_can_be_closed_while_another_thread_makes_subgroups() -> None:
    """It would have raised RuntimeError, and could not have been closed again."""

    def body(group: ProcessGroup) -> bool:
        subgroups, made = [group.subgroup([0, 1]) for _ in range(3)], []

        def make() -> list[Any]:
            made.append(Mock(**{"backend.group_id": len(made) + 1}, _in_flight={}))
            group._dispatch.adopt(made[-1])
            return []

        for each in subgroups:
            assert each is not None
            cast(Any, each._dispatch)._in_flight = Mock(values=make)
        group.close()
        return len(made) >= 3

    assert run_world(2, body) == [True, True]


def test_who_uses_a_closed_subgroup_is_told_to_make_another() -> None:
    def body(group: ProcessGroup) -> str | None:
        sub = group.subgroup([0, 1])
        assert sub is not None
        sub.close()
        with pytest.raises(GroupClosedError, match="the subgroup was closed") as raised:
            sub.barrier()
        return raised.value.hint

    hint = "make another with subgroup(), or move close() after the last operation"
    assert run_world(2, body) == [hint, hint]


def closes_while_others_wait(group: ProcessGroup) -> Any:
    """Rank 2 closes a subgroup, and is then busy with something else."""
    sub, clock = group.subgroup([2, 1, 0]), group.session.clock
    assert sub is not None
    assert float(sub.all_reduce(1.0)) == 3.0
    if group.rank == 2:
        sub.close()
        clock.parker().park(clock.now() + 2.0)
    with pytest.raises(GroupAbortedError) as raised:
        group.barrier() if group.rank == 2 else sub.all_reduce(np.ones(4))
    return raised.value.rank, raised.value.cause, group.rank == 2 or raised.value.group_rank


CLOSED = "it closed a subgroup in which others wait for it: all_reduce(op=sum, float64[4]) #2"


def leaves_while_others_wait(group: ProcessGroup) -> str:
    """Rank 1 leaves a subgroup's block by an exception, with which it is then busy."""
    sub, clock = group.subgroup([1, 0]), group.session.clock
    assert sub is not None
    if group.rank == 1:
        with pytest.raises(ValueError, match="no such batch"), sub:
            raise ValueError("no such batch")
        clock.parker().park(clock.now() + 2.0)
    with pytest.raises(GroupAbortedError) as raised:
        group.barrier() if group.rank == 1 else sub.all_reduce(np.ones(4))
    return raised.value.cause


LEFT = f"{CLOSED[:-1]}1; it had left by ValueError: no such batch"


@pytest.mark.parametrize("transport", ["grpc", "shared_memory", "simulated"])
def test_who_waits_in_a_subgroup_that_a_rank_left_by_an_exception_is_told_of_it(transport: str) -> None:
    if transport == "simulated":
        assert run_world(2, leaves_while_others_wait) == [LEFT, LEFT]
        return
    with GrpcWorld(2, transport=transport) as world:
        groups = [ProcessGroup(backend, timeout=20.0) for backend in world.backends]
        assert run_groups(groups, leaves_while_others_wait) == [LEFT, LEFT]


@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
def test_who_waits_in_a_subgroup_for_a_rank_that_closed_it_is_told(transport: str) -> None:
    with GrpcWorld(3, transport=transport) as world:
        outcomes = run_groups([ProcessGroup(backend, timeout=20.0) for backend in world.backends], closes_while_others_wait)
    assert outcomes == [(2, CLOSED, 0), (2, CLOSED, 0), (2, CLOSED, True)]


def test_who_waits_in_a_simulated_subgroup_for_a_rank_that_closed_it_is_told() -> None:
    assert run_world(3, closes_while_others_wait) == [(2, CLOSED, 0), (2, CLOSED, 0), (2, CLOSED, True)]


@pytest.mark.parametrize("transport", ["grpc", "shared_memory", "simulated"])
def test_who_waits_for_a_number_of_a_stream_that_a_rank_skipped_before_it_closed_the_subgroup_is_told(
    transport: str,
) -> None:
    def body(group: ProcessGroup) -> Any:
        sub, clock = group.subgroup([1, 0]), group.session.clock
        assert sub is not None
        stream = sub.stream()
        for number in (2, 0):
            stream.all_reduce(np.ones(4), number).wait()
        if group.rank:
            sub.close()
            clock.parker().park(clock.now() + 2.0)
        with pytest.raises(GroupAbortedError, match=r"it closed a subgroup in which others wait for it: .* #1") as raised:
            group.barrier() if group.rank else stream.all_reduce(np.ones(4), 1).wait()
        return raised.value.rank

    if transport == "simulated":
        assert run_world(2, body) == [1, 1]
        return
    with GrpcWorld(2, transport=transport) as world:
        assert run_groups([ProcessGroup(backend, timeout=20.0) for backend in world.backends], body) == [1, 1]


def closes_between_steps(group: ProcessGroup) -> float:
    """Rank 2 closes a subgroup of which the others take another step; how long they wait to be told."""
    sub, clock = group.subgroup([2, 1, 0]), group.session.clock
    assert sub is not None
    synchronizer = GradientSynchronizer({"w": np.zeros(4)}, sub)
    synchronizer({"w": np.ones(4)})
    if group.rank == 2:
        sub.close()
        clock.parker().park(clock.now() + 2.0)
    began = clock.now()
    with pytest.raises(GroupAbortedError, match="rank 2 ended the group: it closed a subgroup in which others wait for it"):
        group.barrier() if group.rank == 2 else synchronizer({"w": np.ones(4)})
    return clock.now() - began


@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
def test_who_takes_a_step_in_a_subgroup_that_another_rank_closed_is_told(transport: str) -> None:
    with GrpcWorld(3, transport=transport) as world:
        waits = run_groups([ProcessGroup(backend, timeout=20.0) for backend in world.backends], closes_between_steps)
    assert max(waits) < 5.0


def test_who_takes_a_step_in_a_simulated_subgroup_that_another_rank_closed_is_told() -> None:
    assert max(run_world(3, closes_between_steps)) < 5.0


TO_RANK_0_OF: dict[str, Callable[[ProcessGroup], Any]] = {
    "send": lambda sub: sub.send(np.ones(EAGER_BYTES), 0),
    "send async": lambda sub: sub.send(np.ones(EAGER_BYTES), 0, async_op=True).wait(),
    "recv": lambda sub: sub.recv(0, tag=3),
    "recv async": lambda sub: sub.recv(0, tag=3, async_op=True).wait(),
    "expect": lambda sub: sub.expect(0, tag=3).take(),
}


@pytest.mark.parametrize("call", TO_RANK_0_OF)
@pytest.mark.parametrize("transport", ["grpc", "shared_memory", "simulated"])
def test_who_sends_to_or_receives_from_a_rank_that_closed_the_subgroup_is_told_and_the_generation_lives(
    transport: str, call: str
) -> None:
    def body(group: ProcessGroup) -> Any:
        sub, clock = group.subgroup([2, 1, 0]), group.session.clock
        assert sub is not None
        if group.rank == 2:
            sub.close()
        group.barrier()
        told: Any = None
        if group.rank == 0:
            began = clock.now()
            with pytest.raises(GroupClosedError, match="rank 2 has closed this subgroup") as raised:
                TO_RANK_0_OF[call](sub)
            told = raised.value.group_rank, clock.now() - began < 5.0
        return told, int(group.all_reduce(1))

    expected = [((0, True), 3), (None, 3), (None, 3)]
    if transport == "simulated":
        assert run_world(3, body) == expected
        return
    with GrpcWorld(3, transport=transport) as world:
        assert run_groups([ProcessGroup(backend, timeout=20.0) for backend in world.backends], body) == expected


@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
def test_a_rank_that_closes_a_subgroup_first_fails_nobody_who_has_its_part_already(transport: str) -> None:
    """Rank 1 waits for rank 2 in operations that rank 0 has left, and longer than it takes to ask both where they are."""

    def body(group: ProcessGroup) -> Any:
        sub = group.subgroup([0, 1, 2])
        assert sub is not None
        if group.rank == 2:
            time.sleep(1.0)
        gathered, message = sub.gather(group.rank, root=1), None
        if group.rank == 0:
            sub.send(np.full(5, 3.0), 1)
        elif group.rank == 1:
            message = sub.recv(0)
        sub.close()
        group.barrier()
        return (gathered and list(map(int, gathered))), None if message is None else list(message)

    with GrpcWorld(3, transport=transport) as world:
        outcomes = run_groups([ProcessGroup(backend, timeout=20.0) for backend in world.backends], body)
    assert outcomes == [(None, None), ([0, 1, 2], [3.0] * 5), (None, None)]


@pytest.mark.parametrize("how", ["blocking", "async_op", "expect"])
def test_a_recv_that_waits_in_a_subgroup_ends_when_another_thread_closes_it(how: str) -> None:
    def body(group: ProcessGroup) -> Any:
        sub, clock = group.subgroup([1, 0]), group.session.clock
        assert sub is not None
        calls: dict[str, Callable[[], Any]] = {
            "blocking": lambda: sub.recv(1 - sub.rank),
            "async_op": sub.recv(1 - sub.rank, tag=1, async_op=True).wait,
            "expect": lambda: sub.expect(1 - sub.rank, tag=2).take(),
        }
        ended: list[tuple[type, bool]] = []

        def wait() -> None:
            with pytest.raises(FerroError) as raised:
                calls[how]()
            ended.append((type(raised.value), clock.now() < 3.0))

        clock.start(wait, "waits")
        clock.parker().park(1.0)
        sub.close()
        clock.parker().park(clock.now() + 1.0)
        return ended, int(group.all_reduce(1))

    assert run_world(2, body) == [([(GroupClosedError, True)], 2)] * 2


def test_a_recv_that_waits_in_a_subgroup_has_the_cause_that_ended_the_generation_before_it_was_closed() -> None:
    def body(group: ProcessGroup) -> Any:
        sub = group.subgroup([1, 0])
        assert sub is not None
        waiting = sub.recv(1 - sub.rank, async_op=True)
        if group.rank:
            group.abort("enough")
        with pytest.raises(GroupAbortedError, match="enough") as raised:
            waiting.wait()
        sub.close()
        return raised.value.group_rank

    assert run_world(2, body) == [0, 0]


def test_closed_subgroups_leave_nothing_behind_in_their_generation() -> None:
    def body(group: ProcessGroup) -> int:
        before = len(group._backend.latch._watchers)
        for _ in range(3):
            sub = group.subgroup([0])
            assert sub is not None
            sub.close()
        return len(group._backend.latch._watchers) - before

    assert run_world(1, body) == [0]


def test_a_call_that_one_rank_got_wrong_does_not_part_later_subgroups() -> None:
    def body(group: ProcessGroup) -> float:
        if group.rank == 0:
            with pytest.raises(UsageError):
                group.subgroup([0, 1], timeout=-1)
        sub = group.subgroup([0, 1], timeout=10)
        assert sub is not None
        return float(sub.all_reduce(1.0))

    assert run_world(2, body) == [2.0, 2.0]
