"""A GPU through CuPy, where CuPy's own ways would lead astray."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from ferrorpc.arrays import capture_mode
from ferrorpc.arrays.cupy_kind import CupyKind, cupy_kind
from ferrorpc.arrays.device import Device
from ferrorpc.arrays.devices import device_of
from ferrorpc.arrays.kinds import copy_into
from ferrorpc.arrays.staging import Staging
from ferrorpc.backends.nccl.backend import NcclBackend
from ferrorpc.collectives.progress import Progress
from ferrorpc.ddp.bucket import lay_out
from ferrorpc.ddp.device_bucket_memory import DeviceBucketMemory, DeviceContext
from ferrorpc.errors import BackendUnavailableError, UsageError
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import SYSTEM_CLOCK, Guard, Latch
from ferrorpc.testing import run_groups, run_world
from ferrorpc.testing.gpu.nccl import FakeNccl
from ferrorpc.testing.gpu.stand_in import StandIn
from ferrorpc.types import DType, TensorSpec
from tests.fake_gpu.worlds import host_lanes
from tests.threads import in_threads, results_of


def test_the_null_stream_that_waits_is_that_of_its_own_gpu_on_every_thread(cupy: StandIn) -> None:
    device, released = device_of(cupy, 1), False
    cupy.cuda.Device(0).use()
    null, other = device.current(), device.new_stream()
    assert null.pointer == 0
    cupy.machine.stream(other.pointer).enqueue(lambda: released)
    assert cupy.cuda.Device().id == 0
    null.wait(other.record())
    after = null.record()
    cupy.machine.settle()
    assert not after.done
    assert not cupy.machine.gpus[0].default.tasks
    released = True
    cupy.machine.settle()
    assert after.done


def test_what_cupy_has_for_a_mark_marks_something_else_once_nobody_has_the_mark(cupy: StandIn) -> None:
    device, released = device_of(cupy, 1), [False, False]
    one, other, waits = device.new_stream(), device.new_stream(), device.new_stream()
    for place, stream in enumerate((one, other)):
        cupy.machine.stream(stream.pointer).enqueue(lambda place=place: released[place])
    first = one.record()
    kept = one.record()
    waits.wait(first)
    after = waits.record()
    behind, own = first.number, kept.number
    del first
    again = other.record()
    assert again.number == behind, "none is made while one is spare"
    assert kept.number == own
    released[0] = True
    cupy.machine.settle()
    assert kept.done
    assert after.done, "it waited for what the mark was when it was told to, not for what it is now"
    assert not again.done
    released[1] = True
    cupy.machine.settle()
    assert again.done


def test_a_mark_that_a_finalizer_keeps_stays_the_mark_it_was(cupy: StandIn) -> None:
    """In a circle of garbage every finalizer is called, in any order, before it is known what one of them keeps."""
    device, kept, released = device_of(cupy, 0), [], False

    class Holder:
        def __init__(self, mark: Any) -> None:
            self.mark, self.circle = mark, self

        def __del__(self) -> None:
            kept.append(self.mark)

    stream, others = device.new_stream(), device.new_stream()
    cupy.machine.stream(stream.pointer).enqueue(lambda: released)
    for _ in range(8):
        Holder(stream.record())
    gc.collect()
    assert len(kept) == 8
    later = [others.record() for _ in range(8)]
    cupy.machine.settle()
    assert all(mark.done for mark in later)
    assert not any(mark.done for mark in kept), "they would say what other marks have come to"
    released = True
    cupy.machine.settle()
    assert all(mark.done for mark in kept)


def test_marks_are_made_on_the_gpu_of_their_stream_whichever_is_current(cupy: StandIn) -> None:
    streams = [device_of(cupy, index).new_stream() for index in (0, 1)]
    for stream in streams * 2:
        mark = stream.record()  # of another GPU it would be a fault
        del mark
    assert [len(device_of(cupy, index).events) for index in (0, 1)] == [1, 1]
    assert cupy.cuda.Device().id == 0


def test_a_stream_that_the_program_made_current_stays_so(cupy: StandIn) -> None:
    device = device_of(cupy, 0)
    mine = cupy.cuda.Stream(non_blocking=True).use()
    device.empty((3,), np.dtype(np.float32), device.new_stream())
    with device.on(device.new_stream()):
        assert cupy.cuda.get_current_stream() is not mine
    assert cupy.cuda.get_current_stream() is mine


@pytest.mark.parametrize("status", [226, 700, 721, 810, 911])
def test_a_gpu_that_has_failed_says_so_when_its_marks_are_looked_at_and_when_work_is_queued(cupy: StandIn, status: int) -> None:
    device = device_of(cupy, 0)
    mark, own = device.current().record(), device.new_stream()
    cupy.machine.failure = status
    with pytest.raises(BackendUnavailableError, match=f"the GPU has failed: cudaError {status}"):
        assert mark.done
    x, stream = cupy.asarray(np.ones(3, np.float32)), device.current()
    for queued in (
        stream.record,
        lambda: stream.wait(mark),
        device.marked,
        lambda: device.upload(x, np.zeros(3, np.float32), stream),
        lambda: device.staging.to_host(x),
        lambda: device.is_captured(own),
    ):
        with pytest.raises(BackendUnavailableError, match="started again"):
            queued()
    cupy.machine.failure = 0


def test_a_gpu_that_has_failed_says_so_to_a_thread_that_has_used_none_and_where_a_mark_has_to_be_made(cupy: StandIn) -> None:
    device = device_of(cupy, 1)
    with cupy.cuda.Device(1):
        mark = device.current().record()
    cupy.machine.failure = 700
    for call in (lambda: mark.done, device.enter_own_thread, device.event):
        with ThreadPoolExecutor(1) as thread, pytest.raises(BackendUnavailableError, match="the GPU has failed"):
            thread.submit(call).result(10)
    cupy.machine.failure = 0


def test_a_stream_is_captured_where_cuda_refuses_to_say_because_of_a_capture(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = device_of(cupy, 0)
    own, runtime = device.new_stream(), device.runtime
    for refusal in (runtime.CUDARuntimeError(901), RuntimeError("an error has invalidated the capture sequence")):
        monkeypatch.setattr(runtime, "streamIsCapturing", Mock(side_effect=refusal))
        assert device.is_captured(own)


@pytest.mark.parametrize("status", [900, 907], ids=["a query during a capture", "an event in a capture"])
def test_a_capture_is_not_called_a_failure_of_the_gpu(cupy: StandIn, status: int) -> None:
    mark = device_of(cupy, 0).current().record()
    cupy.machine.failure = status
    with pytest.raises(BackendUnavailableError, match=f"a CUDA graph .*: cudaError {status}") as raised:
        assert mark.done
    assert "before the capture or after it" in raised.value.hint
    cupy.machine.failure = 0


def test_gpus_whose_uuids_begin_alike_up_to_a_zero_are_told_apart(cupy: StandIn) -> None:
    assert len({device_of(cupy, index).uuid for index in range(8)}) == 8
    cupy.machine.gpus[0].uuid = bytes(range(1, 17))
    assert Device(cupy, 0, Staging).uuid == "GPU-01020304-0506-0708-090a-0b0c0d0e0f10"


def test_a_stream_that_is_another_on_every_thread_is_refused(cupy: StandIn) -> None:
    with cupy.cuda.Stream(ptds=True), pytest.raises(UsageError, match="per-thread default stream"):
        device_of(cupy, 0).current()


def test_streams_of_other_libraries_are_adopted_by_their_number(cupy: StandIn) -> None:
    device = device_of(cupy, 2)
    other = cupy.machine.gpus[2].new_stream()
    adopted = device.adopt(other.pointer)
    with device.on(adopted):
        assert cupy.stream is other
    assert adopted.record().done


def test_an_adopted_stream_is_one_object_as_long_as_memory_may_belong_to_it(cupy: StandIn) -> None:
    """CuPy's MemoryAsyncPool has a weak reference to the stream in which it allocated, and frees in another one without it."""
    device, pointer = device_of(cupy, 1), cupy.machine.gpus[1].new_stream().pointer
    with device.on(device.adopt(pointer)):
        allocated_in = weakref.ref(cupy.cuda.get_current_stream())
    gc.collect()
    assert allocated_in() is not None
    with device.on(device.adopt(pointer)):
        assert cupy.cuda.get_current_stream() is allocated_in()


def on_new_thread(body: Callable[[], object]) -> None:
    """Runs on a thread that stands on GPU 0, as every thread at first."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(body).result()


def contexts(cupy: StandIn) -> list[int]:
    return [gpu.index for gpu in cupy.machine.gpus if gpu.has_context]


def test_threads_that_have_used_no_gpu_leave_nothing_on_the_first_one(cupy: StandIn) -> None:
    """A context takes half a gigabyte of it, for each process of the host."""
    device = device_of(cupy, 2)

    def first() -> None:
        device.make_current()
        device.staging.downloads.keep("an array", device.current().record())

    on_new_thread(first)
    on_new_thread(device.staging.downloads.let_go)
    on_new_thread(lambda: device.pinned(5))
    on_new_thread(device.event)
    assert contexts(cupy) == [2]


def test_a_rank_has_a_context_on_no_gpu_but_its_own_until_it_has_ended(cupy: StandIn) -> None:
    def body() -> None:
        device = device_of(cupy, 2)
        device.make_current()
        with ProcessGroup(NcclBackend(host_lanes(1)[0], device, FakeNccl(cupy.machine).api(2))) as group:
            group.all_reduce(cupy.asarray(np.ones(3, np.float32)), async_op=True).wait(host=True)

    on_new_thread(body)
    assert contexts(cupy) == [2]


def test_a_bucket_that_another_thread_collects_leaves_nothing_on_the_first_gpu(cupy: StandIn) -> None:
    buckets: list[DeviceBucketMemory] = []

    def first() -> None:
        device_of(cupy, 2).make_current()
        (bucket,) = lay_out({"p": TensorSpec(DType.FLOAT32, (3,))}, 1 << 20).buckets
        with cupy.cuda.Stream(non_blocking=True):
            buckets.append(DeviceBucketMemory(bucket, DeviceContext(cupy_kind(2), partial(Guard, SYSTEM_CLOCK, Latch(), 20.0))))
        device_of(cupy, 2).staging.uploads.let_go()
        device_of(cupy, 2).event()  # is spare afterwards

    on_new_thread(first)
    on_new_thread(buckets.clear)
    assert contexts(cupy) == [2]


def test_threads_that_use_a_gpu_at_once_for_the_first_time_share_what_it_has(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pinned memory of its own, the thread that came second would lose it again, while the GPU reads from it."""
    for made in (Staging, CupyKind):
        meet_in(monkeypatch, made)
    device = device_of(cupy, 3)
    first, second = in_threads(2, lambda number: device.staging)
    assert first is second is device.staging
    first, second = in_threads(2, lambda number: cupy_kind(77))
    assert first is second is cupy_kind(77)


def meet_in(monkeypatch: pytest.MonkeyPatch, made: type[Any]) -> None:
    """Two threads that make objects of a class begin at the same time, if they can be in there together."""
    begin, both = made.__init__, threading.Barrier(2)

    def meet(self: Any, *arguments: Any) -> None:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)
        begin(self, *arguments)

    monkeypatch.setattr(made, "__init__", meet)


def test_an_array_is_written_on_its_own_gpu_whichever_is_current(cupy: StandIn) -> None:
    with cupy.cuda.Device(3):
        x = cupy.asarray(np.zeros(4, np.float32))
    copy_into(x, np.arange(4, dtype=np.float32))
    np.testing.assert_array_equal(cupy.asnumpy(x), np.arange(4))


@pytest.mark.parametrize("operation", ["all_reduce", "broadcast"])
def test_threads_of_the_library_may_query_events_while_a_graph_is_captured(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """A query fails another thread's capture, unless the thread that queries is in relaxed mode."""
    modes: list[tuple[str, int, int]] = []

    def exchange(mode: int) -> int:
        modes.append((threading.current_thread().name, mode, cupy.gpu.index))
        return cupy.exchange_capture_mode(mode)

    monkeypatch.setattr(capture_mode, "exchange", exchange)
    monkeypatch.setattr(SYSTEM_CLOCK, "progress", Progress(SYSTEM_CLOCK), raising=False)

    def body(group: ProcessGroup) -> None:
        with cupy.cuda.Device(2):
            getattr(group, operation)(cupy.asarray(np.ones(100_000, np.float32)), async_op=True).wait(host=True)

    run_world(4, body, clock=SYSTEM_CLOCK)
    assert next(each for each in modes if each[0] == "ferrorpc-progress") == ("ferrorpc-progress", 2, 2)


def test_memory_is_looked_after_beside_the_capture_of_a_graph_also_by_the_thread_that_captures(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = list[int]()

    def mode() -> int:
        now = cupy.exchange_capture_mode(0)
        cupy.exchange_capture_mode(now)
        return now

    device = device_of(cupy, 0)
    staging = device.staging
    staging.downloads.keep("an array", device.current().record())
    query, pin = cupy.cuda.runtime.eventQuery, cupy.cuda.alloc_pinned_memory
    monkeypatch.setattr(cupy.cuda.runtime, "eventQuery", lambda event: modes.append(mode()) or query(event))
    monkeypatch.setattr(cupy.cuda, "alloc_pinned_memory", lambda size: modes.append(mode()) or pin(size))
    staging.host_memory((5,), np.dtype(np.float32))
    assert (modes, mode()) == ([capture_mode.RELAXED] * 2, 0), "in relaxed mode, which spares the captures of this thread, too"


@pytest.mark.parametrize("what", ["barrier", "synchronize", "close", "async barrier"])
def test_a_thread_that_has_used_no_gpu_makes_no_context_on_another_than_the_groups(cupy: StandIn, what: str) -> None:
    nccl, lanes = FakeNccl(cupy.machine), host_lanes(2)

    def make(rank: int) -> NcclBackend:
        cupy.cuda.Device(1 + rank).use()
        return NcclBackend(lanes[rank], device_of(cupy, 1 + rank), nccl.api(rank, gpu=1 + rank))

    def body(group: ProcessGroup) -> None:
        cupy.cuda.Device(1 + group.rank).use()
        x = cupy.asarray(np.ones(64, np.float32))
        group.all_reduce(x, out=x)
        call: Callable[[], Any] = {
            "barrier": group.barrier,
            "synchronize": group.synchronize,
            "close": group.close,
            "async barrier": lambda: group.barrier(async_op=True).wait(),
        }[what]
        with ThreadPoolExecutor(1) as others:
            others.submit(call).result()

    backends = results_of(in_threads(2, make))
    cupy.machine.gpus[0].has_context = False
    run_groups([ProcessGroup(backend) for backend in backends], body)
    assert not cupy.machine.gpus[0].has_context


class LastTaken(deque[Any]):
    """Marks of a GPU, of which another thread takes the last one just when one is to be looked at."""

    def __init__(self, things: Iterable[Any], looks: int) -> None:
        super().__init__(things)
        self.looks = looks

    def popleft(self) -> Any:
        self.looks -= 1
        if self.looks < 0:
            raise IndexError("pop from an empty deque")
        return super().popleft()


@pytest.mark.parametrize("looks", [0, 1])
def test_two_threads_may_look_for_a_spare_mark_at_once(cupy: StandIn, looks: int) -> None:
    device = device_of(cupy, 0)
    in_use = device.event()
    device.events = LastTaken(device.events, looks)
    assert device.event() is not in_use
    assert len(device.events) == 2
