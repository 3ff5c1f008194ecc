"""When results are complete on a GPU: for the host, for other streams, and for arrays that are let go of elsewhere.

`seen()` is what the memory of an array holds right now, without waiting for anything.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from ferrorpc.arrays.devices import device_of
from ferrorpc.arrays.staging import Staging
from ferrorpc.errors import CollectiveTimeoutError, GroupAbortedError, LimitExceededError, TensorMismatchError
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import FOREVER, SYSTEM_CLOCK
from ferrorpc.operations import landings as landings_module
from ferrorpc.operations.landings import Landing
from ferrorpc.testing import run_world
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.fake_gpu.ddp_worlds import EACH_ITS_OWN_GPU, LANES, world
from tests.waiting import eventually

COUNT = 6


def full(cupy: StandIn, value: float, dtype: Any = np.float32) -> Any:
    return cupy.asarray(np.full(COUNT, value, dtype))


def strided(cupy: StandIn) -> Any:
    return cupy.asarray(np.zeros((COUNT, 2), np.float32))[:, 0]


def own_stream(cupy: StandIn) -> Any:
    return cupy.cuda.Stream(non_blocking=True)


def is_captured(stream: Any, value: bool) -> None:
    stream.fake.captured = value


def all_are(array: Any, value: float) -> bool:
    return bool((array.seen() == value).all())


@pytest.mark.parametrize("lanes", LANES)
def test_a_wait_of_the_host_waits_for_the_copy_to_where_the_result_belongs(cupy: StandIn, lanes: str) -> None:
    def body(group: ProcessGroup) -> None:
        with own_stream(cupy):
            for _ in range(3):
                out = strided(cupy)
                assert all_are(group.all_reduce(full(cupy, 1), out=out, async_op=True).wait(host=True), group.size)

    world(cupy, lanes, 2, body)


CALLS: dict[str, Callable[[StandIn, ProcessGroup], Any]] = {
    "plain": lambda cupy, group: group.all_reduce(full(cupy, 1)),
    "strided": lambda cupy, group: group.all_reduce(full(cupy, 1), out=strided(cupy)),
    "list": lambda cupy, group: group.all_gather(full(cupy, 2), out=[strided(cupy), strided(cupy)])[1],
    "int16": lambda cupy, group: group.all_reduce(full(cupy, 1, np.int16)),
    "wire": lambda cupy, group: group.all_reduce(full(cupy, 1), wire="int8"),
}


@pytest.mark.parametrize("lanes", ["simulated", "hybrid"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("wait", ["synchronize", "barrier"])
def test_the_host_goes_on_after_results_are_complete(cupy: StandIn, lanes: str, call: str, wait: str) -> None:
    def body(group: ProcessGroup) -> None:
        with own_stream(cupy):
            result = CALLS[call](cupy, group)
            getattr(group, wait)()
            assert all_are(result, 2)

    world(cupy, lanes, 2, body)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("how", ["strided", "list", "broadcast", "recv"])
def test_arrays_of_the_caller_are_complete_although_nobody_waits_for_the_work(cupy: StandIn, lanes: str, how: str) -> None:
    def body(group: ProcessGroup) -> None:
        with own_stream(cupy) as stream:
            out = strided(cupy)
            stream.synchronize()
            if how == "strided":
                work: Any = group.all_reduce(full(cupy, 1), out=out, async_op=True)
            elif how == "list":
                work = group.all_gather(full(cupy, 2), out=[out, strided(cupy)], async_op=True)
            elif how == "recv":
                group.send(full(cupy, 2), 1 - group.rank)
                work = group.recv(1 - group.rank, out=out, async_op=True)
            else:  # the root's array is on the host
                out = full(cupy, 2) if group.rank == 0 else full(cupy, 0)
                stream.synchronize()
                given = np.full(COUNT, 2, np.float32) if group.rank == 0 else None
                work = group.broadcast(given, 0, out=None if group.rank == 0 else out, async_op=True)
            eventually(work.done, "it is done")
            assert all_are(out, 2)
            group.synchronize()

    world(cupy, lanes, 2, body)


@pytest.mark.parametrize("lanes", EACH_ITS_OWN_GPU)
@pytest.mark.parametrize("how", ["strided", "wire"])
@pytest.mark.parametrize("async_op", [False, True])
def test_an_array_may_be_dropped_in_the_stream_that_made_it(cupy: StandIn, lanes: str, how: str, async_op: bool) -> None:
    """Its memory may be used again in that stream, whatever the operation's stream still has to do."""
    if (lanes, how) == ("nccl", "wire"):
        pytest.skip("NCCL has no such operation")

    def body(group: ProcessGroup) -> None:
        first, second = own_stream(cupy), own_stream(cupy)
        with first:
            x = cupy.asarray(np.ones((4096, 2), np.float32))
        first.synchronize()
        with second:
            options = {"wire": "int8"} if how == "wire" else {}
            result: Any = group.all_reduce(x.reshape(-1) if how == "wire" else x[:, 0], async_op=async_op, **options)
            with first:
                del x
            first.synchronize()
            if async_op:
                result = result.wait()
            np.testing.assert_array_equal(cupy.asnumpy(result), 2)

    world(cupy, lanes, 2, body)
    assert not cupy.machine.faults


@pytest.mark.parametrize("lanes", ["simulated", "hybrid"])
@pytest.mark.parametrize("size", [1, 2])
def test_an_output_may_be_dropped_in_the_stream_that_made_it(cupy: StandIn, lanes: str, size: int) -> None:
    released: list[bool] = []
    cupy.machine.copying = lambda direction, gpu, size_bytes: direction == "down" or bool(released)

    def body(group: ProcessGroup) -> None:
        first = own_stream(cupy)
        with first:
            x, out = full(cupy, 1, np.int16), cupy.asarray(np.zeros(COUNT, np.int16))
            released.append(True)
            first.synchronize()
            released.clear()
        group.barrier()
        with own_stream(cupy):
            group.all_reduce(x, out=out)
            del out
        first.synchronize()
        released.append(True)
        cupy.machine.settle()

    world(cupy, lanes, size, body)
    assert not cupy.machine.faults


@pytest.mark.parametrize("lanes", LANES)
def test_a_later_waiter_waits_for_nothing_but_the_result(cupy: StandIn, lanes: str) -> None:
    """What the first waiter's stream was given since may need this very rank, and takes no graph into that stream's capture."""

    def body(group: ProcessGroup) -> None:
        first, later = own_stream(cupy), own_stream(cupy)
        with first:
            work = group.all_reduce(full(cupy, 1), out=strided(cupy), async_op=True)
            work.wait(host=True)
            released: list[bool] = []
            first.fake.enqueue(lambda: bool(released))
        is_captured(first, True)
        with later:
            np.testing.assert_array_equal(cupy.asnumpy(work.wait()), 2)
        is_captured(first, False)
        released.append(True)

    world(cupy, lanes, 2, body)


@pytest.mark.parametrize("lanes", ["simulated", "hybrid"])
def test_what_is_late_in_one_stream_does_not_delay_copies_for_another(cupy: StandIn, lanes: str) -> None:
    def body(group: ProcessGroup) -> None:
        late, other = own_stream(cupy), own_stream(cupy)
        with late:
            into = full(cupy, 0)
        with other:
            wanted = full(cupy, 0)
        late.synchronize()
        other.synchronize()
        group.barrier()
        if group.rank == 0:
            released: list[bool] = []
            with late:
                late.fake.enqueue(lambda: bool(released))
                group.recv(1, tag=1, out=into)
            with other:
                np.testing.assert_array_equal(cupy.asnumpy(group.recv(1, tag=2, out=wanted)), 7)
            released.append(True)
            with late:
                np.testing.assert_array_equal(cupy.asnumpy(into), 7)
        else:
            group.send(np.full(COUNT, 7, np.float32), 0, tag=1)
            group.send(np.full(COUNT, 7, np.float32), 0, tag=2)

    world(cupy, lanes, 2, body)


@pytest.mark.parametrize("lanes", ["simulated", "hybrid"])
def test_a_result_for_a_late_stream_delays_no_kernels_of_others(cupy: StandIn, lanes: str) -> None:
    def body(group: ProcessGroup) -> None:
        late, other = own_stream(cupy), own_stream(cupy)
        released: list[bool] = []
        into = strided(cupy)
        cupy.cuda.get_current_stream().synchronize()
        if group.rank == 0:
            with late:
                late.fake.enqueue(lambda: bool(released))
                work = group.recv(1, out=into, async_op=True)
        else:
            group.send(np.full(COUNT, 7, np.float32), 0)
        with other:
            np.testing.assert_allclose(cupy.asnumpy(group.all_reduce(full(cupy, 1), wire="int8")), 2, rtol=0.02)
        released.append(True)
        if group.rank == 0:
            eventually(work.done, "it has landed")
            assert all_are(into, 7)

    world(cupy, lanes, 2, body)


@pytest.mark.parametrize("wire", [None, "int8"])
def test_what_is_written_after_a_failed_operation_stays(cupy: StandIn, wire: str | None) -> None:
    """Copies to the caller's arrays may still be in the GPU's queues then."""
    released: list[bool] = []

    def body(group: ProcessGroup) -> None:
        with own_stream(cupy) as stream:
            outs, x = [full(cupy, 0) for _ in range(3)], full(cupy, 1)
            stream.synchronize()
            group.barrier()
            cupy.machine.copying = lambda direction, gpu, size_bytes: direction == "down" or bool(released)
            group.barrier()
            if group.rank == 2:
                SYSTEM_CLOCK.parker().park(SYSTEM_CLOCK.now() + 1.0)
                return
            call: Any = group.all_gather if wire is None else group.all_reduce
            options: dict[str, Any] = {"out": outs} if wire is None else {"out": outs[0], "wire": wire}
            with pytest.raises((CollectiveTimeoutError, GroupAbortedError)):
                call(x, timeout=0.5, **options)
            for out in outs:
                out[...] = 5
            SYSTEM_CLOCK.parker().park(SYSTEM_CLOCK.now() + 0.7)
            released.append(True)
            cupy.machine.settle()
            assert all(all_are(out, 5) for out in outs)

    world(cupy, "simulated", 3, body)


def test_every_thread_that_synchronises_waits_for_all_results(cupy: StandIn) -> None:
    """Also after an interrupt of another one."""
    released: list[bool] = []

    def body(group: ProcessGroup) -> None:
        with own_stream(cupy):
            x = full(cupy, 1, np.int16)
            cupy.cuda.get_current_stream().synchronize()
            group.barrier()
            cupy.machine.copying = lambda direction, gpu, size_bytes: direction == "down" or bool(released)
            result = group.all_reduce(x)
            first = threading.Thread(target=group.synchronize)
            first.start()
            SYSTEM_CLOCK.call_at(SYSTEM_CLOCK.now() + 0.2, lambda: released.append(True))
            group.synchronize()
            assert all_are(result, 2)
            first.join(20)
        group.barrier()

    world(cupy, "simulated", 2, body)


@pytest.mark.parametrize("lanes", ["simulated", "hybrid"])
def test_a_result_that_does_not_fit_is_an_error_although_nobody_waits(cupy: StandIn, lanes: str) -> None:
    def body(group: ProcessGroup) -> None:
        outs = [full(cupy, 0), cupy.asarray(np.zeros(COUNT - 1, np.float32))]
        work = group.all_gather(full(cupy, 1), out=outs, async_op=True)
        eventually(work.done, "it is over")
        assert isinstance(work.exception(), TensorMismatchError)
        group.barrier()

    world(cupy, lanes, 2, body)


def test_who_asks_whether_a_result_has_landed_lets_others_go_first(cupy: StandIn) -> None:
    """On a clock whose threads take turns the rank whose thread has to go on would never have its turn."""
    released: list[bool] = []

    def body(group: ProcessGroup) -> None:
        with own_stream(cupy) as stream:
            into = full(cupy, 0)
            stream.synchronize()
            group.barrier()
            if group.rank == 0:
                stream.fake.enqueue(lambda: bool(released))
                work = group.recv(1, out=into, async_op=True)
                until = SYSTEM_CLOCK.now() + 20
                while not work.done():
                    assert SYSTEM_CLOCK.now() < until
                assert all_are(into, 7)
            else:
                group.send(np.full(COUNT, 7, np.float32), 0)
                clock = group._backend.clock
                clock.parker().park(clock.now() + 1.0)
                released.append(True)

    run_world(2, body)


@pytest.mark.parametrize("lanes", ["simulated", "hybrid"])
@pytest.mark.parametrize("operation", ["all_reduce", "int16", "all_gather", "broadcast", "all_to_all"])
def test_operations_begun_before_a_capture_leave_the_captured_stream_alone(cupy: StandIn, lanes: str, operation: str) -> None:
    """Whatever of them has to be done in the meantime."""
    captured = threading.Event()

    def begun(group: ProcessGroup, x: Any) -> Any:
        if operation == "all_to_all":
            return group.all_to_all([x, x], async_op=True)
        if operation == "broadcast":
            return group.broadcast(x, 1, async_op=True)
        return getattr(group, "all_reduce" if operation == "int16" else operation)(x, async_op=True)

    def body(group: ProcessGroup) -> None:
        with own_stream(cupy) as stream:
            x = full(cupy, 1, np.int16 if operation == "int16" else np.float32)
            stream.synchronize()
            if group.rank == 0:
                work = begun(group, x)
                is_captured(stream, True)
                captured.set()
                SYSTEM_CLOCK.parker().park(SYSTEM_CLOCK.now() + 0.2)
                is_captured(stream, False)
            else:
                captured.wait(20)
                work = begun(group, x)
            found = work.wait()
            result = found[0] if isinstance(found, list) else found
            expected = 1 if operation in ("all_gather", "all_to_all", "broadcast") else group.size
            np.testing.assert_array_equal(cupy.asnumpy(result), expected)
            group.barrier()

    world(cupy, lanes, 2, body)
    assert not cupy.machine.faults


def test_a_host_array_goes_up_without_waiting_for_the_callers_stream(cupy: StandIn) -> None:
    """Whatever its size, as long as pinned memory is free: an asynchronous call returns at once."""
    staging = Staging(device_of(cupy, 0), slot_bytes=64, slots=2)
    values = np.arange(1000.0)
    with own_stream(cupy) as busy:
        free: list[bool] = []
        busy.fake.enqueue(lambda: bool(free))
        there = staging.to_device(values)
        values[:] = 0
        free.append(True)
        np.testing.assert_array_equal(cupy.asnumpy(there), np.arange(1000.0))


def test_who_gives_a_time_waits_for_the_gpu_so_long(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landings_module, "COPY_SECONDS", 0.02)
    free = threading.Event()
    with own_stream(cupy) as busy:
        x = full(cupy, 1)
        busy.fake.enqueue(free.is_set)
        landing = Landing(x)
        with pytest.raises(CollectiveTimeoutError, match=r"within 0\.02 s"):
            landing.settle(SYSTEM_CLOCK, FOREVER)
        SYSTEM_CLOCK.call_at(SYSTEM_CLOCK.now() + 0.1, free.set)
        landing.settle(SYSTEM_CLOCK, SYSTEM_CLOCK.now() + 60.0)
        assert not busy.fake.tasks


def test_who_has_no_memory_is_said(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's error is a MemoryError, too."""

    class OutOfMemoryError(MemoryError):
        pass

    def body(group: ProcessGroup) -> None:
        x = full(cupy, 1, np.int16)
        group.all_reduce(x)
        if group.rank == 1:  # which may have its own result before
            with suppress(GroupAbortedError):
                group.all_reduce(x)
            return
        monkeypatch.setattr(
            device_of(cupy, 0), "empty", Mock(side_effect=OutOfMemoryError("Out of memory allocating 12 bytes"))
        )
        with pytest.raises(LimitExceededError, match="the GPU has no memory for what the operation brings: Out of memory"):
            group.all_reduce(x)

    world(cupy, "hybrid", 2, body)


@pytest.mark.parametrize("count", [COUNT, 65_536], ids=["inline", "in parts"])
@pytest.mark.parametrize("way", ["blocking", "async"])
def test_a_broadcast_over_host_lanes_is_complete_for_the_callers_next_kernel(cupy: StandIn, way: str, count: int) -> None:
    slow = [False]
    cupy.machine.copying = lambda direction, gpu, size_bytes: not (direction == "up" and gpu == 1 and slow[0])

    def body(group: ProcessGroup) -> set[float]:
        with own_stream(cupy) as stream:
            x = cupy.asarray(np.full(count, 7.0 if group.rank == 0 else 0.0, np.float32))
            stream.synchronize()
            group.barrier()
            is_late = group.rank == 1
            busy = [is_late]
            stream.fake.enqueue(lambda: not busy[0])  # kernels of before
            slow[0] |= is_late
            if way == "blocking":
                group.broadcast(x, root=0, out=x)
            else:
                work = group.broadcast(x, root=0, out=x, async_op=True)
                eventually(lambda: work.has_ended or not is_late)
                work.wait()
            busy[0] = False
            y = x * 1.0
            if is_late:
                for _ in range(100):
                    cupy.machine.step()
                slow[0] = False
            stream.synchronize()
            group.barrier()
            return set(y.seen().tolist())

    assert world(cupy, "simulated", 3, body) == [{7.0}] * 3


def test_a_work_that_has_ended_keeps_nothing_of_its_group(cupy: StandIn) -> None:
    kept: list[Any] = []

    def body(group: ProcessGroup) -> None:
        work = group.all_reduce(full(cupy, 1), async_op=True)
        eventually(lambda: work.has_ended)
        group.barrier()
        kept.append((work, weakref.ref(group._dispatch)))

    world(cupy, "nccl", 2, body)
    gc.collect()
    assert [dispatch() for _, dispatch in kept] == [None, None]
