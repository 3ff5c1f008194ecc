"""Streams, events and memory: what waits for what, in which order operations are launched, and how long buffers live."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest

from ferrorpc.backends.device.communicator import State
from ferrorpc.backends.device.completion import CompletionWatcher
from ferrorpc.backends.device.launch import Launch
from ferrorpc.backends.nccl.backend import NcclBackend
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.driver import PROBE_SECONDS
from ferrorpc.collectives.progress import Progress
from ferrorpc.errors import CollectiveTimeoutError, GroupAbortedError, NcclError, TensorMismatchError, UsageError
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import SYSTEM_CLOCK, Guard
from ferrorpc.testing import run_groups
from ferrorpc.testing.gpu.nccl import FakeNccl
from ferrorpc.testing.gpu.stand_in import StandIn
from ferrorpc.testing.reference import values
from ferrorpc.types import DType, ReduceOp, TensorSpec
from ferrorpc.wire.frames import Key
from tests.fake_gpu.worlds import nccl_backends
from tests.waiting import eventually


def world(cupy: StandIn, size: int, fn: Any, **options: Any) -> list[Any]:
    """fn(group) on every rank, each with its GPU current."""

    def body(group: ProcessGroup) -> Any:
        with cupy.cuda.Device(group.rank):
            return fn(group)

    return run_groups([ProcessGroup(backend) for backend in nccl_backends(cupy, size, **options)], body)


def test_a_blocking_call_does_not_block_the_host_and_the_stream_goes_on_after_it(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> None:
        released: list[bool] = []
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.fake.enqueue(lambda: bool(released))  # the caller's stream is busy with something long
            x = cupy.asarray(np.full(8, group.rank + 1.0, np.float32))
            total = group.all_reduce(x)
            after = total * 10
            del x, total
            released.append(True)
            np.testing.assert_array_equal(cupy.asnumpy(after), np.full(8, 30.0, np.float32))

    world(cupy, 2, body)


def test_wait_returns_when_the_result_is_certain_and_with_host_when_it_is_there(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> None:
        released: list[bool] = []
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.fake.enqueue(lambda: bool(released))
            work = group.all_reduce(cupy.asarray(np.ones(4, np.float32)), async_op=True)
            total = work.wait()
            assert not work.done(), "the GPU has not come to it"
            released.append(True)
            assert work.wait(host=True) is total
            assert work.done()
            np.testing.assert_array_equal(cupy.asnumpy(total), np.full(4, 2.0))

    world(cupy, 2, body)


def test_synchronize_and_barrier_block_the_host_until_the_gpu_is_through(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> None:
        backend: Any = group._backend
        for wait in (group.synchronize, group.barrier, backend.barrier):
            group.all_reduce(cupy.asarray(np.ones(4, np.float32)))
            wait()
            assert not backend.context.in_flight()

    world(cupy, 2, body)


def test_what_two_threads_wait_for_is_brought_to_the_host_once(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the progress thread knows when the caller may have the arrays: nobody else writes to them."""

    def body(group: ProcessGroup) -> Any:
        backend: Any = group._backend
        staging = backend.context.device.staging
        copies: list[str] = []
        second, down = threading.Event(), staging.to_host

        def slow(source: Any) -> Any:
            copies.append(threading.current_thread().name)
            if len(set(copies)) > 1:
                second.set()
            second.wait(0.2)
            return down(source)

        monkeypatch.setattr(staging, "to_host", slow)
        work = group.all_gather(np.full(2, group.rank), async_op=True)
        backend.synchronize(SYSTEM_CLOCK.now() + 10.0)
        return [each.tolist() for each in work.wait()], len(copies), len(set(copies))

    assert world(cupy, 2, body) == [([[0, 0], [1, 1]], 2, 1)] * 2


def test_operations_in_program_order_keep_it_although_some_must_announce_first(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> None:
        chance, works = random.Random(7), []
        for item in range(12):
            x = cupy.asarray(np.full(item + 1, float(group.rank)))
            works.append(group.all_gather(x, async_op=True) if chance.random() < 0.5 else group.all_reduce(x, async_op=True))
        last = group.all_reduce(cupy.asarray(np.ones(1)))
        for item, work in enumerate(works):
            found = work.wait()
            if isinstance(found, list):
                expected = [np.full(item + 1, float(rank)) for rank in range(2)]
                np.testing.assert_array_equal([cupy.asnumpy(each) for each in found], expected)
            else:
                np.testing.assert_array_equal(cupy.asnumpy(found), np.full(item + 1, 1.0))
        np.testing.assert_array_equal(cupy.asnumpy(last), [2.0])

    world(cupy, 2, body)


def test_an_operation_does_not_begin_after_what_its_callers_stream_was_given_later(cupy: StandIn) -> None:
    """Or two ranks that wait for operations of two groups in another order would wait for ever."""
    begun = threading.Event()

    def in_the_air(group: ProcessGroup, gathered: list[Any], total: Any) -> list[Any]:
        x = cupy.asarray(np.ones(3, np.float32))
        works = [group.all_gather(x, out=gathered, async_op=True)]  # which waits until every rank has said what it brings
        works += [group.all_reduce(x, out=total, async_op=True), group.all_reduce(x, async_op=True)]
        parts = [cupy.asarray(np.ones((rank + 1,), np.float32)) for rank in range(2)]
        return [*works, group.reduce_scatter(parts, async_op=True)]

    def body(group: ProcessGroup) -> None:
        pair = group.subgroup([0, 1])
        assert pair is not None
        gathered, total = [cupy.empty(3, np.float32) for _ in range(2)], cupy.empty(3, np.float32)
        if group.rank == 0:
            works = in_the_air(pair, gathered, total)
            group.all_reduce(cupy.asarray(np.ones(3, np.float32)))  # what is in this stream now waits for the other rank
            begun.set()
        else:
            begun.wait(10)
            works = in_the_air(pair, gathered, total)
            works[-1].wait(host=True)
            group.all_reduce(cupy.asarray(np.ones(3, np.float32)))
        found = [work.wait(host=True) for work in works]
        np.testing.assert_array_equal(cupy.asnumpy(found[1]), np.full(3, 2.0))
        np.testing.assert_array_equal(cupy.asnumpy(found[3]), np.full(group.rank + 1, 2.0))

    def on_gpu(group: ProcessGroup) -> None:
        with cupy.cuda.Device(group.rank):
            body(group)

    run_groups([ProcessGroup(backend, timeout=3) for backend in nccl_backends(cupy, 2)], on_gpu)


def test_everything_may_be_launched_in_a_stream_of_the_callers(cupy: StandIn) -> None:
    streams = []
    for index in range(2):
        with cupy.cuda.Device(index):
            streams.append(cupy.cuda.Stream(non_blocking=True))
    nccl = FakeNccl(cupy.machine)

    class OnOwnStream(NcclBackend):
        def __init__(self, lanes: Any, device: Any, api: Any) -> None:
            super().__init__(lanes, device, api, stream=streams[device.index].ptr)

    def body(group: ProcessGroup) -> int:
        found = group.all_reduce(cupy.asarray(np.ones(2, np.float32)))
        np.testing.assert_array_equal(cupy.asnumpy(found), [2.0, 2.0])
        backend: Any = group._backend
        return backend.context.launch_queue(0).stream.pointer

    found = world(cupy, 2, body, kind=OnOwnStream, world=nccl)
    assert found == [stream.ptr for stream in streams]


def test_raw_forms_take_pointers_in_the_callers_stream_or_the_backends(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> None:
        backend: Any = group._backend
        me, size = group.rank, group.size
        for is_given in (False, True):
            with cupy.cuda.Stream(non_blocking=True) as current:
                stream = current if is_given else None
                x, y = cupy.asarray(np.arange(4.0) + me), cupy.empty(4 * size)
                backend.all_reduce_raw(x.data.ptr, y.data.ptr, 4, "float64", stream=stream)
                total = sum(np.arange(4.0) + rank for rank in range(size))
                np.testing.assert_array_equal(cupy.asnumpy(y[:4]), total)
                backend.all_gather_raw(x.data.ptr, y.data.ptr, 4, DType.FLOAT64, stream=stream)
                np.testing.assert_array_equal(cupy.asnumpy(y), np.concatenate([np.arange(4.0) + rank for rank in range(size)]))
                part = cupy.asarray(np.zeros(4))
                backend.reduce_scatter_raw(y.data.ptr, part.data.ptr, 4, "float64", "mean", stream=stream)
                np.testing.assert_array_equal(cupy.asnumpy(part), np.arange(4.0) + me)
                backend.broadcast_raw(x.data.ptr, y.data.ptr, 4, "float64", root=1, stream=stream)
                np.testing.assert_array_equal(cupy.asnumpy(y[:4]), np.arange(4.0) + 1)
        with pytest.raises(TensorMismatchError, match="has no op='band' for int32"):
            backend.all_reduce_raw(0, 0, 1, "int32", "band")
        with pytest.raises(UsageError, match="root"):
            backend.broadcast_raw(0, 0, 1, "int32", root=size)
        group.barrier()

    world(cupy, 2, body)


def test_a_raw_form_is_in_flight_until_the_gpu_has_come_past_it(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> None:
        backend: Any = group._backend
        released: list[bool] = []
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.fake.enqueue(lambda: bool(released))
            x = cupy.asarray(np.ones(4))
            backend.all_reduce_raw(x.data.ptr, x.data.ptr, 4, "float64", stream=stream)
            with pytest.raises(CollectiveTimeoutError, match=r"had not done all_reduce_raw\(op=sum, float64\[4\]\)"):
                backend.synchronize(SYSTEM_CLOCK.now() + 0.05)
            released.append(True)
            group.barrier()
            assert not backend.context.in_flight()
            np.testing.assert_array_equal(cupy.asnumpy(x), np.full(4, 2.0))

    world(cupy, 2, body)


def test_a_raw_form_in_a_stream_of_the_callers_is_not_through_when_a_later_one_is(cupy: StandIn) -> None:
    """Operations in the communicator's stream come one after the other; this one's stream is late."""
    backend: Any = nccl_backends(cupy, 1)[0]
    late, released = cupy.cuda.Stream(non_blocking=True), []
    late.fake.enqueue(lambda: bool(released))
    x = cupy.asarray(np.ones(4))
    backend.all_reduce_raw(x.data.ptr, x.data.ptr, 4, "float64", stream=late)
    backend.all_reduce_raw(x.data.ptr, x.data.ptr, 4, "float64")
    with pytest.raises(CollectiveTimeoutError, match="had not done all_reduce_raw"):
        backend.synchronize(SYSTEM_CLOCK.now() + 0.05)
    released.append(True)
    backend.synchronize(SYSTEM_CLOCK.now() + 5)
    backend.close()


def test_grouped_sends_and_receives_may_cross(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> None:
        backend: Any = group._backend
        me, size = group.rank, group.size
        after, before = (me + 1) % size, (me - 1) % size
        x, y = cupy.asarray(np.full(6, float(me))), cupy.empty(6)
        backend.exchange_raw([(x.data.ptr, 48, after)], [(y.data.ptr, 48, before)])
        np.testing.assert_array_equal(cupy.asnumpy(y), np.full(6, float(before)))
        sevens = cupy.asarray(np.full(6, 7.0))
        backend.exchange_raw([(sevens.data.ptr, 48, 1)] if me == 0 else [], [(y.data.ptr, 48, 0)] if me == 1 else [])
        np.testing.assert_array_equal(cupy.asnumpy(y), np.full(6, 7.0 if me == 1 else float(before)))
        for wrong, match in ((size, "peer"), (me, "itself")):
            with pytest.raises(UsageError, match=match):
                backend.exchange_raw([(0, 8, wrong)], [])
        group.barrier()

    world(cupy, 3, body)


def test_mean_is_that_of_nccl_and_bool_and_complex_are_what_they_must_be(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> None:
        mine = [values(DType.BOOL, 9, rank) for rank in range(2)]
        found = group.all_reduce(cupy.asarray(mine[group.rank]))
        np.testing.assert_array_equal(cupy.asnumpy(found), mine[0] | mine[1])
        pair = [values(DType.COMPLEX64, 5, rank) for rank in range(2)]
        found = group.all_reduce(cupy.asarray(pair[group.rank]), op="mean")
        np.testing.assert_allclose(cupy.asnumpy(found), (pair[0] + pair[1]) / 2, rtol=1e-6)
        for op, dtype in (("product", np.complex64), ("sum", np.int16), ("bxor", np.int32)):
            with pytest.raises(TensorMismatchError, match=f"NCCL has no op='{op}'.*"):
                group.all_reduce(cupy.asarray(np.ones(2, dtype)), op=op)
        group.barrier()

    world(cupy, 2, body)


def test_buffers_are_kept_while_the_gpu_needs_them_and_not_longer(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> None:
        before = cupy.gpu.memory.live_blocks
        for _ in range(5):
            group.all_reduce(cupy.asarray(np.ones(100)))  # input and result are dropped at once
            group.reduce_scatter([cupy.asarray(np.ones(3)) for _ in range(2)])
        group.synchronize()
        cupy.cuda.get_current_stream().synchronize()

        def let_go() -> bool:
            cupy.machine.settle()
            return cupy.gpu.memory.live_blocks <= before

        eventually(let_go, "all buffers are let go of")

    world(cupy, 2, body)


def test_a_rank_whose_part_is_done_may_leave_while_others_have_not_come_to_theirs(cupy: StandIn) -> None:
    """NCCL keeps what it brought for whoever is late, longer here than between two probes."""
    late = SYSTEM_CLOCK.now() + 2 * PROBE_SECONDS

    def body(group: ProcessGroup) -> Any:
        x = cupy.asarray(np.full(4, group.rank + 1.0, np.float32))
        cupy.cuda.get_current_stream().synchronize()
        if group.rank == 1:
            return group.reduce(x, root=0)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.fake.enqueue(lambda: SYSTEM_CLOCK.now() > late)
            total = group.reduce(x, root=0)
            group.synchronize()
            return cupy.asnumpy(total).tolist()

    assert world(cupy, 2, body) == [[3.0] * 4, None]


def test_a_rank_that_has_not_looked_yet_needs_nobody_for_what_is_complete(cupy: StandIn) -> None:
    """Its host was busy for so long that the other one has left."""
    backends = nccl_backends(cupy, 2)
    call = Call(Operation.ALL_REDUCE, (TensorSpec(DType.FLOAT32, (4,)),), op=ReduceOp.SUM)
    executions: list[Any] = []
    for backend in backends:
        with cupy.cuda.Device(backend.rank):
            x = cupy.asarray(np.ones(4, np.float32))
            executions.append(backend.prepare(call).start(Key(0, 0, 1), [x], None, Guard(SYSTEM_CLOCK, backend.latch, 20.0)))
            executions[-1].until_done = False
    eventually(lambda: all(execution.advance() for execution in executions), "both are in their streams")
    cupy.machine.settle()
    assert executions[1].try_complete()
    backends[1].close()
    for _ in range(4):
        executions[0].probe()
    assert backends[0].latch.cause is None
    assert executions[0].try_complete()
    np.testing.assert_array_equal(cupy.asnumpy(executions[0].results[0]), np.full(4, 2.0, np.float32))


def test_who_waits_on_the_host_looks_at_the_gpu_for_itself(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """What watches the GPU for all looks seldom; here it sees nothing at all."""
    backend: Any = nccl_backends(cupy, 1)[0]
    with ProcessGroup(backend, timeout=backend.timeout) as group, cupy.cuda.Stream(non_blocking=True) as stream:
        x = cupy.asarray(np.ones(4, np.float32))
        group.all_reduce(x, async_op=True).wait(host=True)  # the first connects
        with monkeypatch.context() as patch:
            patch.setattr(CompletionWatcher, "advance", lambda watcher: False)
            released: list[bool] = []
            stream.fake.enqueue(lambda: bool(released))
            work = group.all_reduce(x, out=x, async_op=True)
            with pytest.raises(CollectiveTimeoutError, match="still runs after"):
                work.wait(0.05, host=True)
            assert not work.done()
            released.append(True)
            found = work.wait(5, host=True)
            assert work.done()
            assert found is x
        assert cupy.asnumpy(x).tolist() == [1] * 4


@pytest.mark.parametrize("host", [False, True])
def test_a_completed_operation_keeps_its_result_although_the_generation_ends_before_its_work_is_notified(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, host: bool
) -> None:
    backend: Any = nccl_backends(cupy, 1)[0]
    with ProcessGroup(backend) as group:
        x = cupy.asarray(np.ones(4, np.float32))
        group.all_reduce(x, async_op=True).wait(host=True)  # the first connects
        watches_no_more = threading.Event()
        with monkeypatch.context() as patch:
            patch.setattr(CompletionWatcher, "advance", lambda watcher: watches_no_more.set())
            group.all_reduce(x, async_op=True)  # perhaps completed by the thread that was just watching
            assert watches_no_more.wait(10.0)
            works = [group.all_reduce(each, async_op=True) for each in (x, x[::2])]
            backend.synchronize(SYSTEM_CLOCK.now() + 10.0)
            assert not any(work.done() for work in works)
            backend.latch.trip(GroupAbortedError(0, "enough"))
        for work, count in zip(works, (4, 2), strict=True):
            assert cupy.asnumpy(work.wait(10, host=host)).tolist() == [1.0] * count


def test_synchronize_does_not_take_the_end_of_the_generation_for_the_end_of_the_work(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was in flight is let go of when the generation ends, maybe while somebody looks."""
    backend: Any = nccl_backends(cupy, 1)[0]
    with ProcessGroup(backend) as group:
        in_flight = backend.context.in_flight

        def ended() -> list[Any]:
            backend.latch.trip(GroupAbortedError(0, "enough"))
            return [each for each in in_flight() if not each]

        monkeypatch.setattr(backend.context, "in_flight", ended)
        with pytest.raises(GroupAbortedError, match="enough"):
            group.synchronize()


@pytest.mark.usefixtures("launched_within_the_call")
def test_what_is_launched_while_others_are_in_flight_wakes_nobody(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """One watcher watches all of it, and each Work is done when the GPU has reached its own end event."""
    backend: Any = nccl_backends(cupy, 1)[0]
    submitted: list[str] = []
    submit = Progress.submit

    def counting(progress: Progress, execution: Any, *args: Any) -> Any:
        submitted.append(execution.label)
        return submit(progress, execution, *args)

    with ProcessGroup(backend, timeout=backend.timeout) as group, cupy.cuda.Stream(non_blocking=True) as stream:
        x = cupy.asarray(np.ones(4, np.float32))
        monkeypatch.setattr(Progress, "submit", counting)
        group.all_reduce(x, async_op=True).wait(host=True)  # the first connects
        group.synchronize()
        released: list[int] = []
        works = []
        for place in range(3):
            stream.fake.enqueue(lambda place=place: len(released) > place)
            works.append(group.all_reduce(x, async_op=True))
            backend.all_reduce_raw(x.data.ptr, x.data.ptr, 4, "float32")
        assert len(submitted) == 1
        assert not any(work.done() for work in works)
        for work in works:
            released.append(1)
            work.wait(host=True)
        assert len(submitted) == 1


def test_what_the_root_has_announced_is_launched_on_the_callers_thread(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, launchers = threading.Event(), []
    run = Launch.run

    def noting(launch: Launch) -> None:
        launchers.append(threading.current_thread())
        run(launch)

    def body(group: ProcessGroup) -> threading.Thread:
        x = cupy.asarray(np.full(3, group.rank, np.float32))
        group.broadcast(x, root=0, out=x)  # the first connects
        group.barrier()
        monkeypatch.setattr(Launch, "run", noting)
        if group.rank == 1:
            assert has_begun.wait(20.0)
        work = group.broadcast(x, root=0, out=x, async_op=True)
        has_begun.set()
        assert cupy.asnumpy(work.wait()).tolist() == [0.0] * 3
        return threading.current_thread()

    root, receiver = world(cupy, 2, body)
    assert receiver in launchers
    assert root not in launchers, "NCCL would wait on the GPU for a receiver that may be late"


def test_what_a_launch_meets_on_the_callers_thread_ends_the_work_and_the_group(cupy: StandIn) -> None:
    backend: Any = nccl_backends(cupy, 1)[0]
    group = ProcessGroup(backend)
    x = cupy.asarray(np.ones(4, np.float32))
    flying = group.all_reduce(x, async_op=True)
    backend.context.program.communicator.broken = State.SYSTEM_ERROR
    work = group.all_reduce(x, async_op=True)
    with pytest.raises(NcclError, match="system error"):
        work.wait()
    with pytest.raises(NcclError, match="system error"):
        group.all_reduce(x)
    eventually(flying.done, "what was in flight has ended, too")
    assert not backend.context.in_flight()
    group.close()


def test_a_deadline_that_comes_before_that_of_what_is_in_flight_already_is_kept(cupy: StandIn) -> None:
    backend: Any = nccl_backends(cupy, 1)[0]
    group = ProcessGroup(backend)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        x = cupy.asarray(np.ones(4, np.float32))
        group.all_reduce(x)
        group.synchronize()
        released: list[bool] = []
        stream.fake.enqueue(lambda: bool(released))
        late = group.all_reduce(x, async_op=True)
        with pytest.raises(CollectiveTimeoutError, match=r"after 0\.2 s"):
            group.all_reduce(x, async_op=True, timeout=0.2).wait(host=True)
        with pytest.raises(CollectiveTimeoutError, match=r"after 0\.2 s"):
            late.wait(host=True)
        released.append(True)
    cupy.machine.settle()  # or the abort waits for ever
    group.close()
