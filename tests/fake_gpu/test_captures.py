"""Calls while a CUDA graph is being captured from their stream."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ferrorpc
from ferrorpc.arrays.devices import device_of
from ferrorpc.backends.hybrid import HybridBackend
from ferrorpc.backends.nccl.backend import NcclBackend
from ferrorpc.errors import UsageError
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.testing import run_groups, run_world
from ferrorpc.testing.gpu.nccl import FakeNccl
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.fake_gpu import ddp_worlds
from tests.fake_gpu.test_nccl_streams import world
from tests.fake_gpu.worlds import host_lanes, nccl_backends
from tests.threads import in_threads, results_of
from tests.unit.ddp.model import Plain
from tests.waiting import eventually


@pytest.mark.parametrize("kind", [NcclBackend, HybridBackend])
def test_what_is_called_while_a_graph_is_captured_is_refused_and_the_group_stays_open(cupy: StandIn, kind: Any) -> None:
    """NCCL would wait for the end of the graph when its communicator is closed or aborted, and so for ever."""

    def body(group: ProcessGroup) -> None:
        backend: Any = group._backend
        x = cupy.asarray(np.ones(4, np.float32))
        pointer = x.data.ptr
        with cupy.cuda.Stream(non_blocking=True) as stream:
            work = group.all_reduce(x, async_op=True)
            stream.fake.captured = True
            for call in (
                lambda: group.all_reduce(x),
                lambda: group.all_reduce(x, async_op=True),
                lambda: group.broadcast(x),
                lambda: group.send(x, 1 - group.rank),
                lambda: backend.all_reduce_raw(pointer, pointer, 4, "float32"),
                work.wait,
            ):
                with pytest.raises(UsageError, match="a CUDA graph is being captured from the current stream"):
                    call()
            stream.fake.captured = False
            assert cupy.asnumpy(work.wait()).tolist() == [2.0] * 4
        stream.fake.captured = True
        with pytest.raises(UsageError, match="a CUDA graph is being captured from the given stream"):
            backend.all_reduce_raw(pointer, pointer, 4, "float32", stream=stream)
        assert cupy.asnumpy(group.broadcast(x)).tolist() == [1.0] * 4
        assert cupy.asnumpy(group.all_reduce(x)).tolist() == [2.0] * 4

    world(cupy, 2, body, kind=kind)


@pytest.mark.parametrize("kind", [NcclBackend, HybridBackend])
def test_so_is_what_would_be_launched_in_a_stream_given_to_the_backend(cupy: StandIn, kind: Any) -> None:
    nccl, lanes, given = FakeNccl(cupy.machine), host_lanes(2), list[Any]()
    for rank in range(2):
        with cupy.cuda.Device(rank):
            given.append(cupy.cuda.Stream(non_blocking=True))

    def body(group: ProcessGroup) -> None:
        backend: Any = group._backend
        with cupy.cuda.Device(group.rank):
            x, own = cupy.asarray(np.ones(4, np.float32)), given[group.rank].fake
            group.all_reduce(x)
            group.barrier()
            own.captured = True
            for call in (
                lambda: group.all_reduce(x),
                lambda: group.all_reduce(x, async_op=True),
                lambda: group.all_gather(x),
                lambda: backend.all_reduce_raw(x.data.ptr, x.data.ptr, 4, "float32"),
            ):
                with pytest.raises(UsageError, match="a CUDA graph is being captured from the group's stream"):
                    call()
            own.captured = False
            assert cupy.asnumpy(group.all_reduce(x)).tolist() == [2.0] * 4

    def backend(rank: int) -> Any:
        return kind(lanes[rank], device_of(cupy, rank), nccl.api(rank), stream=given[rank])

    run_groups([ProcessGroup(each) for each in results_of(in_threads(2, backend))], body)


def calls_with(group: ProcessGroup, given: Any, out: Any, async_op: bool) -> list[Callable[[], object]]:
    """Calls that read one of these arrays on this rank, or write to it."""
    into, me = {"out": out, "async_op": async_op}, group.rank
    found: list[Callable[[], object]] = [
        lambda: group.all_reduce(given, **into),
        lambda: group.all_reduce(given, op="max", **into),
        lambda: group.all_reduce(given, wire="int8", **into),
        lambda: group.broadcast(given, root=me, **into),
        lambda: group.reduce_scatter([given, given], **into),
    ]
    if out is None:
        found += [
            lambda: group.all_gather(given),
            lambda: group.all_to_all([given, given]),
            lambda: group.gather(given),
            lambda: group.scatter([given, given], root=me),
            lambda: group.send(given, 1 - me),
        ]
    return found


@pytest.mark.parametrize("lanes", ["messages", "hybrid"])
def test_a_refused_call_has_put_nothing_into_the_graph(cupy: StandIn, lanes: str) -> None:
    """What is put there before the refusal would be replayed with the graph, or would make the capture invalid."""

    def body(group: ProcessGroup) -> None:
        with cupy.cuda.Device(group.rank), cupy.cuda.Stream(non_blocking=True) as stream:
            x, strided = cupy.asarray(np.ones((2, 4), np.float32)), cupy.asarray(np.ones((4, 2), np.float32)).T
            apart, on_host = cupy.asarray(np.zeros((8, 2), np.float32)).T[:, ::2], np.ones((2, 4), np.float32)
            stream.fake.captured = True
            for given, out in ((x, None), (strided, None), (x, x), (x, apart), (on_host, x)):
                for async_op in (False, True):
                    for call in calls_with(group, given, out, async_op):
                        with pytest.raises(UsageError, match="a CUDA graph is being captured from the current stream"):
                            call()
            stream.fake.captured = False
            assert cupy.asnumpy(group.all_reduce(strided)).tolist() == [[2.0] * 4] * 2

    if lanes == "hybrid":
        world(cupy, 2, body, kind=HybridBackend)
    else:
        run_world(2, body, clock=SYSTEM_CLOCK, timeout=5.0)


class Buffered(Plain):
    """A module with a weight of ones and a running statistic."""

    def __init__(self, cupy: StandIn) -> None:
        super().__init__(w=cupy.asarray(np.ones(20, np.float32)))
        self.running = cupy.asarray(np.ones(3, np.float32))

    def named_buffers(self) -> list[tuple[str, Any]]:
        return [("running", self.running)]


def training_steps(cupy: StandIn, group: ProcessGroup) -> list[Callable[[], object]]:
    """Steps of every kind, and the construction of what takes them."""
    made: list[object] = []
    """Kept, because what is freed during a capture is freed in its stream."""
    grads, module, sgd = {"w": cupy.asarray(np.ones(20, np.float32))}, Buffered(cupy), ferrorpc.rules.SGD(0.5)
    ddp = ferrorpc.DistributedDataParallel(module, group)
    syncs = [
        ferrorpc.GradientSynchronizer(grads, group, hook=hook)
        for hook in (None, ferrorpc.hooks.ErrorFeedback(ferrorpc.hooks.PowerSGD(1)))
    ]
    optimizer = ferrorpc.ZeroOptimizer({"w": module["w"].data}, group, sgd)

    def with_gradient() -> None:
        module["w"].grad = grads["w"]
        ddp.sync_gradients()

    def without_gradient() -> None:
        module["w"].grad = None
        ddp.sync_gradients()

    def by_hand(sync: Any) -> None:
        with sync.step() as step:
            step.ready("w", grads["w"])

    return [
        with_gradient,
        without_gradient,
        ddp.broadcast_parameters,
        *(lambda sync=sync: sync(grads) for sync in syncs),
        *(lambda sync=sync: sync({"w": None}) for sync in syncs),
        *(lambda sync=sync: by_hand(sync) for sync in syncs),
        lambda: optimizer.step(grads),
        lambda: made.append(ferrorpc.DistributedDataParallel(module, group)),
        lambda: made.append(ferrorpc.GradientSynchronizer(grads, group)),
        lambda: made.append(ferrorpc.ZeroOptimizer({"w": module["w"].data}, group, sgd)),
    ]


@pytest.mark.parametrize("lanes", ["simulated", "hybrid"])
def test_a_training_step_is_refused_before_it_begins_and_the_group_stays_open(cupy: StandIn, lanes: str) -> None:
    def body(group: ProcessGroup) -> None:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for step in training_steps(cupy, group):
                step()
                stream.fake.captured = True
                with pytest.raises(UsageError, match="a CUDA graph is being captured from the current stream"):
                    step()
                stream.fake.captured = False
                group.barrier()
                step()

    ddp_worlds.world(cupy, lanes, 2, body)


def test_so_is_one_in_another_stream_than_the_last_which_is_captured(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> None:
        grads, weights = ({"w": cupy.asarray(np.ones(20, np.float32))} for _ in range(2))
        cupy.cuda.get_current_stream().synchronize()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            sync = ferrorpc.GradientSynchronizer(grads, group)
            optimizer = ferrorpc.ZeroOptimizer(weights, group, ferrorpc.rules.SGD(0.5))
        for step in (lambda: sync(grads), lambda: optimizer.step(grads)):
            with stream:
                step()
                stream.fake.captured = True
            with pytest.raises(UsageError, match=r"a CUDA graph is being captured from the .* (last|first) stream"):
                step()
            stream.fake.captured = False
            step()

    ddp_worlds.world(cupy, "hybrid", 2, body)


def test_a_wait_that_failed_half_way_takes_nothing_from_the_next_one(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> None:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            work = group.all_reduce(cupy.asarray(np.ones(4, np.float32)), async_op=True)
            eventually(work.done, "the GPU is through", 20.0)
            stream.fake.captured = True
            with pytest.raises(UsageError, match="captured"):
                work.wait()
            stream.fake.captured = False
            assert cupy.asnumpy(work.wait()).tolist() == [2.0] * 4

    world(cupy, 2, body)


@pytest.mark.parametrize("number", [0, 1])
def test_null_streams_cannot_be_captured_and_are_not_asked(cupy: StandIn, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """CUDA answers with an error where the thread captures another stream meanwhile."""

    def refused(stream: int) -> bool:
        raise RuntimeError(f"cudaErrorStreamCaptureImplicit for stream {stream}")

    device = device_of(cupy, 0)
    monkeypatch.setattr(device.runtime, "streamIsCapturing", refused)
    device.check_not_captured(device.adopt(number), "given")


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "broadcast"])
@pytest.mark.parametrize("async_op", [False, True])
def test_a_call_that_cuda_refuses_beside_a_capture_leaves_its_number_to_the_next(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, async_op: bool, operation: str
) -> None:
    """While a graph is captured from a blocking stream CUDA takes nothing in the null stream, whoever asks."""
    runtime = cupy.cuda.runtime
    record, captured = runtime.eventRecord, threading.Event()

    def recorded(event: int, stream: int) -> None:
        if captured.is_set() and stream == 0 and runtime.getDevice() == 0:
            raise runtime.CUDARuntimeError(906)
        record(event, stream)

    monkeypatch.setattr(runtime, "eventRecord", recorded)

    def body(group: ProcessGroup) -> None:
        x = cupy.asarray(np.ones(4, np.float32))
        group.all_reduce(x)
        group.barrier()
        if group.rank == 0:
            captured.set()
            with pytest.raises(runtime.CUDARuntimeError):
                getattr(group, operation)(x, async_op=async_op)
            captured.clear()
        assert cupy.asnumpy(group.all_reduce(x)).tolist() == [2.0] * 4
        group.barrier(timeout=5)

    world(cupy, 2, body)


@pytest.mark.parametrize("what", ["all_reduce", "host all_reduce", "barrier", "synchronize", "wait(host=True)"])
@pytest.mark.parametrize("kind", ["nccl", "staged"])
def test_a_call_that_blocks_leaves_the_captures_of_other_threads_alone(cupy: StandIn, kind: str, what: str) -> None:
    """A query of an event fails, and so does the capture, unless the thread that queries is in relaxed mode."""
    backends: list[Any] = nccl_backends(cupy, 2) if kind == "nccl" else host_lanes(2)
    captured = cupy.cuda.Stream(non_blocking=True).fake
    meeting = threading.Barrier(2)

    def body(group: ProcessGroup) -> None:
        with cupy.cuda.Device(group.rank):
            x = cupy.asarray(np.ones(1 << 16, np.float32))
            work = group.all_reduce(x, async_op=True)
            meeting.wait()
            captured.captured = True
            call: Callable[[], Any] = {
                "all_reduce": lambda: group.all_reduce(x),
                "host all_reduce": lambda: group.all_reduce(np.ones(5)),
                "barrier": group.barrier,
                "synchronize": group.synchronize,
                "wait(host=True)": lambda: work.wait(host=True),
            }[what]
            call()
            meeting.wait()
            captured.captured = False
            assert cupy.asnumpy(work.wait())[0] == 2.0

    run_groups([ProcessGroup(backend) for backend in backends], body)
    assert not captured.capture_failed


@pytest.mark.parametrize("which", ["last", "first"])
def test_a_bucket_dropped_while_one_of_its_streams_is_captured_returns_its_memory_after_that(cupy: StandIn, which: str) -> None:
    """What orders the memory's return would become a part of the graph: a garbage collection may drop it at any time."""

    def body(group: ProcessGroup) -> None:
        memory = cupy.machine.gpus[group.rank].memory
        first, last, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
        grads = {"w": cupy.asarray(np.ones(20, np.float32))}
        with first:
            sync = ferrorpc.GradientSynchronizer(grads, group)
        with last:
            sync(grads)
        group.synchronize()
        address = sync._reducer.memory[0].array.data.ptr

        def is_kept() -> bool:
            with other:
                ferrorpc.GradientSynchronizer(grads, group)
            cupy.machine.settle()
            return memory.find(address, 1) is not None

        captured = {"first": first, "last": last}[which].fake
        captured.captured = True
        del sync
        assert is_kept()
        captured.captured = False
        eventually(lambda: not is_kept(), "the memory returns")

    ddp_worlds.world(cupy, "nccl", 2, body)


@pytest.mark.parametrize("lanes", ["nccl", pytest.param("cuda_ipc", marks=pytest.mark.shared_memory)])
def test_a_subgroup_begins_and_ends_beside_a_capture_of_another_thread(cupy: StandIn, lanes: str) -> None:
    """What allocates, opens, waits for and frees memory is forbidden to threads that are not in relaxed mode."""
    captured = cupy.cuda.Stream(non_blocking=True).fake

    def body(group: ProcessGroup) -> None:
        x = cupy.asarray(np.ones(4, np.float32))
        group.barrier()
        captured.captured = True
        part: Any = group.subgroup([0, 1])
        assert cupy.asnumpy(part.all_reduce(x)).tolist() == [2.0] * 4
        part.close()
        group.barrier()
        captured.captured = False

    ddp_worlds.world(cupy, lanes, 2, body)
    assert not captured.capture_failed
    eventually(lambda: not cupy.machine.shared, "all slabs are freed")
