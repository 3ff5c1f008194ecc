"""What ends a group that runs on NCCL, and how all hear of it; over the fake, whose operations hang as the real ones do."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from ferrorpc.backends.device import in_flight
from ferrorpc.backends.device.backend import DeviceBackend
from ferrorpc.backends.device.communicator import State
from ferrorpc.backends.hybrid import HybridBackend
from ferrorpc.backends.nccl.backend import NcclBackend
from ferrorpc.errors import (
    BarrierTimeoutError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    FerroError,
    GroupAbortedError,
    NcclError,
    PeerLostError,
    UsageError,
)
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.testing.gpu import nccl
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.fake_gpu.groups import SECONDS, Ranks, end_of
from tests.waiting import eventually


def test_ranks_that_call_different_things_get_both_signatures_instead_of_hanging(cupy: StandIn) -> None:
    ranks = Ranks(cupy, 2)

    def body(group: ProcessGroup) -> FerroError:
        group.all_reduce(ranks.array(3 + group.rank))  # returns at once: the GPU would wait for ever
        return end_of(group, CollectiveMismatchError)

    for error in ranks.run(body):
        assert isinstance(error, CollectiveMismatchError)
        assert error.signatures == {rank: f"all_reduce(op=sum, float32[{3 + rank}]) by NCCL" for rank in range(2)}
    ranks.wait_for_aborts()


@pytest.mark.parametrize(("timeout", "error"), [(0.0, BarrierTimeoutError), (-1.0, UsageError), ("soon", UsageError)])
def test_a_backends_own_barrier_takes_any_number_of_seconds(cupy: StandIn, timeout: Any, error: type[FerroError]) -> None:
    ranks = Ranks(cupy, 2)
    with pytest.raises(error) as raised:
        ranks.backends[0].barrier(timeout)
    assert error is BarrierTimeoutError or f"timeout={timeout!r}" in raised.value.message
    for group in ranks.groups:
        group.close()


def test_a_barrier_here_and_an_operation_there_is_such_a_difference(cupy: StandIn) -> None:
    """The barrier waits for nothing of this rank's GPU, and asks."""
    ranks = Ranks(cupy, 2)

    def body(group: ProcessGroup) -> Any:
        if group.rank:
            group.all_reduce(ranks.array())
            return end_of(group, CollectiveMismatchError)
        with pytest.raises(CollectiveMismatchError) as raised:
            group.barrier()
        return raised.value

    for error in ranks.run(body):
        assert error.signatures == {0: "barrier()", 1: "all_reduce(op=sum, float32[4]) by NCCL"}
    ranks.wait_for_aborts()


def test_a_barrier_that_waits_for_this_ranks_gpu_names_its_own_timeout(cupy: StandIn) -> None:
    ranks = Ranks(cupy, 2)

    def body(group: ProcessGroup) -> None:
        if group.rank:
            end_of(group, GroupAbortedError)
            return
        x = ranks.array()
        group.all_reduce(x, out=x, timeout=SECONDS)
        with pytest.raises(
            BarrierTimeoutError, match=r"after 0\.2 s, barrier\(\) #\d waits for the GPU of this rank: all_reduce"
        ):
            group.barrier(timeout=0.2)

    assert ranks.run(body) == [None, None]
    ranks.wait_for_aborts()


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "gather"])
def test_an_array_on_a_gpu_here_and_on_a_host_there_is_such_a_difference(cupy: StandIn, operation: str) -> None:
    ranks = Ranks(cupy, 2, HybridBackend)

    def body(group: ProcessGroup) -> Any:
        call = getattr(group, operation)
        if group.rank == 0:
            if operation == "all_reduce":
                call(ranks.array())
            else:
                with pytest.raises(CollectiveMismatchError):
                    call(ranks.array())
            return end_of(group, CollectiveMismatchError)
        if operation == "gather":
            call(np.ones(4, np.float32))  # sent, and over here before the others find out
            return end_of(group, CollectiveMismatchError)
        with pytest.raises(CollectiveMismatchError, match="by NCCL"):
            call(np.ones(4, np.float32))
        return None

    assert isinstance(ranks.run(body)[0], CollectiveMismatchError)
    ranks.wait_for_aborts()


@pytest.mark.parametrize("operation", ["broadcast", "scatter"])
@pytest.mark.parametrize("kind", [NcclBackend, HybridBackend])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_call_whose_root_says_where_its_arrays_are_differs_from_another_one(
    cupy: StandIn, operation: str, kind: type[DeviceBackend], on_gpu: bool
) -> None:
    ranks = Ranks(cupy, 3, kind)

    def body(group: ProcessGroup) -> FerroError:
        x = ranks.array(3) if on_gpu else np.ones(3, np.float32)
        if group.rank == 1:
            work = group.all_reduce(x, async_op=True)
        else:
            work = getattr(group, operation)(x if group.rank == 0 else None, async_op=True)
        with pytest.raises(CollectiveMismatchError) as raised:
            work.wait(host=True)
        return raised.value

    for error in ranks.run(body):
        assert isinstance(error, CollectiveMismatchError), error
        assert error.signatures[1].startswith("all_reduce(op=sum, float32[3])")
    ranks.wait_for_aborts()


def test_an_operation_whose_peer_never_comes_ends_in_its_deadline_and_names_it(cupy: StandIn) -> None:
    ranks = Ranks(cupy, 2)

    def body(group: ProcessGroup) -> FerroError:
        if group.rank == 0:
            work = group.all_reduce(ranks.array(), async_op=True, timeout=0.4)
            work.wait()  # the result is certain to come after what the stream holds; the host goes on
            with pytest.raises(CollectiveTimeoutError) as raised:
                work.wait(host=True)
            return raised.value
        return end_of(group, FerroError)

    mine, theirs = ranks.run(body)
    assert isinstance(mine, CollectiveTimeoutError)
    assert mine.waiting_on == [1]
    assert "after 0.4 s, all_reduce(op=sum, float32[4]) by NCCL #1 waits for" in mine.message
    assert isinstance(theirs, GroupAbortedError | CollectiveTimeoutError)
    ranks.wait_for_aborts()


@pytest.mark.parametrize("status", [State.REMOTE_ERROR, State.SYSTEM_ERROR])
@pytest.mark.parametrize("looks", [1, 1 << 30], ids=["in flight", "while NCCL launches"])
def test_an_error_that_nccl_meets_in_the_background_ends_the_group_on_every_rank(
    cupy: StandIn, status: State, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_flight, "SUSPICION_SECONDS", 0.05)
    monkeypatch.setattr(nccl, "LOOKS_TO_CONNECT", looks)
    ranks = Ranks(cupy, 2)

    def body(group: ProcessGroup) -> FerroError:
        if group.rank == 0:
            group.all_reduce(ranks.array(), async_op=True)
            (meeting,) = ranks.nccl.meetings.values()
            meeting.ends[0].broken = status
        return end_of(group, FerroError)

    mine, theirs = ranks.run(body)
    assert isinstance(mine, NcclError)
    assert mine.fields["status"] == status
    assert status.name.lower().replace("_", " ") in mine.message
    assert isinstance(theirs, FerroError)
    ranks.wait_for_aborts()


@pytest.mark.parametrize("noticed", ["before a call", "in flight"])
def test_where_nccl_notices_a_death_first_the_cause_is_still_who_died(cupy: StandIn, noticed: str) -> None:
    ranks = Ranks(cupy, 2)
    told = threading.Event()

    def body(group: ProcessGroup) -> Any:
        if group.rank == 1:
            told.wait(SECONDS)
            SYSTEM_CLOCK.parker().park(SYSTEM_CLOCK.now() + 0.1)
            return group.session.leave("killed by signal 9 (SIGKILL)")
        (meeting,) = ranks.nccl.meetings.values()
        if noticed == "in flight":
            group.all_reduce(ranks.array())
        meeting.ends[0].broken = State.REMOTE_ERROR
        told.set()
        with pytest.raises(PeerLostError) as raised:
            group.all_reduce(ranks.array())
        return raised.value

    error = ranks.run(body)[0]
    assert isinstance(error, PeerLostError), error
    assert (error.rank, error.reason) == (1, "killed by signal 9 (SIGKILL)")
    ranks.wait_for_aborts()


def test_the_death_of_a_member_aborts_what_its_peers_have_in_flight(cupy: StandIn) -> None:
    ranks = Ranks(cupy, 3)

    def body(group: ProcessGroup) -> Any:
        group.all_reduce(ranks.array())
        group.barrier()
        if group.rank == 2:
            return group.session.leave("ValueError: bad batch")
        group.all_reduce(ranks.array())
        return end_of(group, PeerLostError)

    found = ranks.run(body)
    for error in found[:2]:
        assert isinstance(error, PeerLostError)
        assert (error.rank, error.reason) == (2, "ValueError: bad batch")
    ranks.wait_for_aborts()
    cupy.machine.settle()
    assert all(not stream.tasks for gpu in cupy.machine.gpus for stream in gpu.streams.values()), "the GPUs are free"


def test_communicators_whose_operations_wait_for_each_other_are_aborted_together(cupy: StandIn) -> None:
    """NCCL's abort returns when the GPU is past what was launched; here that waits for operations of the other one."""
    ranks = Ranks(cupy, 2)

    def body(group: ProcessGroup) -> Any:
        pair = group.subgroup([0, 1])
        assert pair is not None
        if group.rank == 1:
            return group.session.leave("killed by signal 9 (SIGKILL)")
        for each in (group, pair, group, pair):
            each.all_reduce(ranks.array())
        return end_of(group, PeerLostError)

    assert isinstance(ranks.run(body)[0], PeerLostError)
    (meeting,) = ranks.nccl.meetings.values()
    ends = [*meeting.ends.values(), *meeting.children[0, 0].ends.values()]
    eventually(lambda: all(end.aborted for end in ends), "every abort")
    cupy.machine.settle()
    assert all(not stream.tasks for gpu in cupy.machine.gpus for stream in gpu.streams.values()), "the GPUs are free"


@pytest.mark.parametrize("way", ["synchronize", "barrier"])
def test_a_cause_that_the_caller_was_shown_is_not_logged_for_what_was_in_flight(
    cupy: StandIn, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    ranks, begun = Ranks(cupy, 2), threading.Event()

    def body(group: ProcessGroup) -> None:
        x = ranks.array()
        group.all_reduce(x)
        group.synchronize()
        if group.rank == 1:
            assert begun.wait(SECONDS)
            return group.abort("enough")
        works = [group.all_reduce(x, async_op=True) for _ in range(3)]
        begun.set()
        with pytest.raises(GroupAbortedError, match="enough"):
            getattr(group, way)()
        eventually(lambda: all(work.done() for work in works), "they have ended", SECONDS)
        works.clear()
        gc.collect()
        return None

    assert ranks.run(body) == [None] * 2
    assert "nobody looked" not in caplog.text


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather"])
def test_memory_of_what_nccl_still_launches_when_the_generation_ends_is_kept_until_the_abort(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """Another thread of NCCL's launches, and goes on until the abort joins it. Its stream holds nothing of that before."""
    ranks = Ranks(cupy, 2)
    may_abort, memories = threading.Event(), list[weakref.ref[Any]]()

    def body(group: ProcessGroup) -> Any:
        group.all_reduce(ranks.array())
        group.synchronize()
        group.barrier()
        monkeypatch.setattr(nccl, "LOOKS_TO_LAUNCH", 1 << 30)
        (meeting,) = ranks.nccl.meetings.values()
        meeting.ends[group.rank].stuck = may_abort
        x = ranks.array()
        memories.append(weakref.ref(x.data.mem))
        work = getattr(group, operation)(x, async_op=True)
        del x
        if group.rank == 0:
            eventually(lambda: all(end._launching for end in meeting.ends.values()), "NCCL has begun to launch", SECONDS)
            group.abort("enough")
        with pytest.raises(GroupAbortedError):
            work.wait(host=True)
        return None

    assert ranks.run(body) == [None, None]
    gc.collect()
    cupy.machine.settle()
    assert all(memory() for memory in memories)
    may_abort.set()
    ranks.wait_for_aborts()

    def is_given_back() -> bool:
        gc.collect()
        return not any(memory() for memory in memories)

    eventually(is_given_back, "all memory is given back", SECONDS)
