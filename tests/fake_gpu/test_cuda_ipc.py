"""Ranks that share a GPU, over the fakes: what a group promises holds where they read each other's GPU memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from ferrorpc.arrays.devices import device_of
from ferrorpc.backends.cuda_ipc import peers
from ferrorpc.backends.cuda_ipc.backend import CudaIpcBackend
from ferrorpc.backends.cuda_ipc.communicator import ABORT_SECONDS, kernel_of
from ferrorpc.backends.cuda_ipc.control_block import SLOTS, block_bytes
from ferrorpc.backends.device.communicator import DataType, Op
from ferrorpc.backends.registry import Place, create
from ferrorpc.errors import (
    BackendUnavailableError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    FerroError,
    GroupAbortedError,
    NcclError,
    PeerLostError,
    TensorMismatchError,
)
from ferrorpc.exit_codes import EXIT_RETRY
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.kernels.cuda.folds import FOLDS, Folds
from ferrorpc.testing import BackendContract, run_groups
from ferrorpc.testing.gpu.machine import Machine
from ferrorpc.testing.gpu.stand_in import StandIn, stand_in
from tests.fake_gpu.groups import SECONDS, end_of
from tests.fake_gpu.on_gpu import Cupy, OnGpu
from tests.fake_gpu.operations import every_operation
from tests.fake_gpu.shared_worlds import ipc_backends
from tests.fake_gpu.test_nccl_ending import never
from tests.fake_gpu.worlds import host_lanes, sessions
from tests.integration.test_grpc_backend import GrpcWorld
from tests.threads import in_threads, results_of
from tests.waiting import eventually

pytestmark = pytest.mark.shared_memory


class TestOnGpuArrays(BackendContract):
    """Bit for bit as host arrays: sums are folded in rank order here, too."""

    largest_world = 4

    def world(self, size: int, fn: Callable[[ProcessGroup], Any]) -> list[Any]:
        with stand_in(Machine(1)) as cupy, ipc_backends(cupy, size) as backends:

            def body(group: ProcessGroup) -> Any:
                stand_for: Any = OnGpu(group, Cupy(cupy))
                return fn(stand_for)

            return run_groups([ProcessGroup(backend) for backend in backends], body)


class TestOnHostArrays(BackendContract):
    """Host arrays in the same groups go by the host lanes."""

    largest_world = 4

    def world(self, size: int, fn: Callable[[ProcessGroup], Any]) -> list[Any]:
        with stand_in(Machine(1)) as cupy, ipc_backends(cupy, size, apart=False) as backends:
            return run_groups([ProcessGroup(backend) for backend in backends], fn)


SLOT_BYTES = 4096
"""Small, so that ordinary arrays take several rounds."""


@contextmanager
def groups(cupy: StandIn, size: int, **options: Any) -> Iterator[list[ProcessGroup]]:
    """One on each rank, closed at the end."""
    with ipc_backends(cupy, size, **options) as backends:
        found = [ProcessGroup(backend, timeout=SECONDS) for backend in backends]
        yield found
        assert in_threads(size, lambda rank: found[rank].close()) == [None] * size


def on_ranks(found: list[ProcessGroup], body: Callable[[ProcessGroup], Any]) -> list[Any]:
    """What body(group) returns on each rank, or raises there."""
    return results_of(in_threads(len(found), lambda rank: body(found[rank])))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_operation_takes_and_gives_back_cupy_arrays(cupy: StandIn, size: int) -> None:
    with groups(cupy, size) as found:
        on_ranks(found, lambda group: every_operation(group, cupy, gpu=0))


def test_a_group_that_was_made_while_the_gpu_was_busy_waits_for_nothing_of_that(cupy: StandIn) -> None:
    """Not the host, and not what another stream computes."""
    busy: list[bool] = [True]
    cupy.machine.gpus[0].default.enqueue(lambda: not busy)

    def body(group: ProcessGroup) -> None:
        with cupy.cuda.Stream(non_blocking=True):
            x = cupy.asarray(np.full(4, group.rank + 1, np.float32))
            assert cupy.asnumpy(group.all_reduce(x)).tolist() == [3.0] * 4

    with groups(cupy, 2) as found:
        on_ranks(found, body)
        busy.clear()


@pytest.mark.parametrize("problem", [RuntimeError("no compiler"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_what_breaks_off_in_the_middle_does_not_count_as_done(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, problem: BaseException
) -> None:
    def broken(*arguments: Any) -> None:
        raise problem

    with ipc_backends(cupy, 1) as (backend,):
        communicator = backend.context.program.communicator
        x, stream = cupy.asarray(np.ones(4, np.float32)), cupy.cuda.Stream(non_blocking=True)
        with monkeypatch.context() as patch:
            patch.setattr(Folds, "fold", broken)
            with pytest.raises(type(problem)):
                communicator.all_reduce(x.data.ptr, x.data.ptr, 4, DataType.FLOAT32, Op.SUM, stream.ptr)
        with pytest.raises(NcclError, match=str(problem) or "KeyboardInterrupt"):
            communicator.state()


def test_a_round_in_another_stream_leaves_what_is_still_folded(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank folds its own slot too, which nothing else orders after a fold in another stream."""
    busy: list[bool] = [True]
    queued = Folds.fold

    def late(self: Folds, *arguments: Any) -> None:
        if threading.current_thread() in first and first.pop(threading.current_thread()):
            cupy.stream.enqueue(lambda: not busy)
        queued(self, *arguments)

    first: dict[threading.Thread, bool] = {}
    monkeypatch.setattr(Folds, "fold", late)

    def body(group: ProcessGroup) -> list[Any]:
        backend: Any = group._backend
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        xs = [cupy.asarray(np.full(4, 10 * turn + group.rank, np.float32)) for turn in range(SLOTS + 1)]
        cupy.machine.settle()
        if group.rank == 0:
            first[threading.current_thread()] = True
        for turn, x in enumerate(xs):
            backend.all_reduce_raw(x.data.ptr, x.data.ptr, 4, "float32", stream=streams[turn > 0])
        cupy.machine.settle()
        group.session.barrier("queued")
        busy.clear()
        group.synchronize()
        return [cupy.asnumpy(x).tolist() for x in xs]

    with groups(cupy, 2) as found:
        assert on_ranks(found, body) == [[[20.0 * turn + 1] * 4 for turn in range(SLOTS + 1)]] * 2


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(("count", "slot_bytes"), [(1, SLOT_BYTES), (1024, SLOT_BYTES), (1025, 1), (7000, SLOT_BYTES)])
def test_arrays_of_many_rounds_are_folded_in_rank_order(cupy: StandIn, size: int, count: int, slot_bytes: int) -> None:
    """Slices end in the middle of an array; the last round is shorter than the others."""
    everyones = [np.random.default_rng(rank).standard_normal(count).astype(np.float32) for rank in range(size)]
    total = everyones[0]
    for each in everyones[1:]:
        total = total + each

    def body(group: ProcessGroup) -> None:
        x = cupy.asarray(everyones[group.rank])
        for _ in range(2):
            assert cupy.asnumpy(group.all_reduce(x)).tobytes() == total.tobytes()
        assert cupy.asnumpy(group.all_reduce(x, op="mean")).tobytes() == (total / np.float32(size)).tobytes()
        root = group.reduce(x, root=size - 1)
        if group.rank == size - 1:
            assert cupy.asnumpy(root).tobytes() == total.tobytes()
        parts = [x[place * (count // size) : (place + 1) * (count // size)] for place in range(size)]
        own = group.rank * (count // size)
        mine = cupy.asnumpy(group.reduce_scatter(parts))
        assert mine.tobytes() == total[own : own + count // size].tobytes()
        for rank, part in enumerate(group.all_gather(x)):
            assert cupy.asnumpy(part).tobytes() == everyones[rank].tobytes()
        exchanged = group.all_to_all([x] * size)
        for rank, part in enumerate(exchanged):
            assert cupy.asnumpy(part).tobytes() == everyones[rank].tobytes()
        assert cupy.asnumpy(group.broadcast(x, root=1)).tobytes() == everyones[1].tobytes()

    with groups(cupy, size, slot_bytes=slot_bytes) as found:
        on_ranks(found, body)


def test_a_rank_is_ahead_of_those_who_read_by_as_many_rounds_as_there_are_slots(cupy: StandIn) -> None:
    with ipc_backends(cupy, 2, slot_bytes=SLOT_BYTES) as backends:
        ends: list[Any] = [backend.context.program.communicator for backend in backends]
        source = [cupy.asarray(np.full(SLOT_BYTES * 5, rank, np.uint8)) for rank in range(2)]
        target = cupy.asarray(np.zeros(SLOT_BYTES * 5, np.uint8))
        stream = backends[0].context.program.stream.pointer, backends[1].context.program.stream.pointer
        nbytes = source[0].nbytes
        ends[0].broadcast(source[0].data.ptr, source[0].data.ptr, nbytes, DataType.UINT8, 0, stream[0])
        for _ in range(10):
            assert ends[0].state().name == "IN_PROGRESS"
        assert ends[0]._rounds._round == SLOTS, "its slots are full, and nobody has read"
        ends[1].broadcast(source[1].data.ptr, target.data.ptr, nbytes, DataType.UINT8, 0, stream[1])
        while [end for end in ends if end.state().name == "IN_PROGRESS"]:
            pass
        cupy.machine.settle()
        np.testing.assert_array_equal(cupy.asnumpy(target), np.zeros(nbytes, np.uint8))
        assert in_threads(2, lambda rank: backends[rank].close()) == [None] * 2


def test_a_root_that_closes_at_once_leaves_its_memory_to_those_who_still_read_it(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> None:
        x, busy = cupy.asarray(np.full(4, group.rank, np.float32)), cupy.cuda.Stream(non_blocking=True)
        until = SYSTEM_CLOCK.now() + ABORT_SECONDS + 0.8
        if group.rank == 0:
            busy.fake.enqueue(lambda: SYSTEM_CLOCK.now() > until)
        with busy:
            group.broadcast(x, root=1, out=x)
            group.close()
            assert cupy.asnumpy(x).tolist() == [1.0] * 4

    with groups(cupy, 2) as found:
        on_ranks(found, body)


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("operation", ["broadcast", "scatter"])
def test_a_root_goes_ahead_of_those_that_take_what_it_gives(
    cupy: StandIn, operation: str, async_op: bool, closes: bool
) -> None:
    is_through = threading.Event()

    def body(group: ProcessGroup) -> None:
        x = cupy.asarray(np.arange(5, dtype=np.float32))
        given = {"broadcast": x, "scatter": [x, x]}[operation]
        if group.rank == 1:
            found = getattr(group, operation)(given, root=1, async_op=async_op)
            found = found.wait() if async_op else found
            is_through.set()
        else:
            assert is_through.wait(SECONDS / 2), "the root waits for this rank"
            SYSTEM_CLOCK.parker().park(SYSTEM_CLOCK.now() + 0.3 * closes)  # the root is closing, and probes find it gone
            found = getattr(group, operation)(root=1, out=cupy.asarray(np.zeros(5, np.float32)))
        if closes:
            group.close()
        np.testing.assert_array_equal(cupy.asnumpy(found), np.arange(5))

    with groups(cupy, 2) as found:
        on_ranks(found, body)


def test_raw_forms_work_on_addresses(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> None:
        backend: Any = group._backend
        x = cupy.asarray(np.arange(6, dtype=np.float32) + group.rank)
        out = cupy.asarray(np.zeros(12, np.float32))
        backend.all_reduce_raw(x.data.ptr, out.data.ptr, 6, "float32", op="max")
        np.testing.assert_array_equal(cupy.asnumpy(out)[:6], np.arange(6) + 1)
        backend.all_gather_raw(x.data.ptr, out.data.ptr, 6, "float32")
        np.testing.assert_array_equal(cupy.asnumpy(out), np.concatenate([np.arange(6), np.arange(6) + 1]))
        with pytest.raises(TensorMismatchError, match=r"^CUDA IPC has no op='band' for int32"):
            backend.all_reduce_raw(x.data.ptr, out.data.ptr, 6, "int32", op="band")
        other = 1 - group.rank
        backend.exchange_raw([(x.data.ptr, 24, other)], [(out.data.ptr, 24, other)])
        np.testing.assert_array_equal(cupy.asnumpy(out)[:6], np.arange(6) + other)

    with groups(cupy, 2) as found:
        on_ranks(found, body)


def test_subgroups_and_streams_have_memory_of_their_own_and_all_of_it_is_given_back(cupy: StandIn) -> None:
    one = cupy.asarray(np.ones(5, np.float32))

    def body(group: ProcessGroup) -> None:
        halves = [group.subgroup([0, 1]), group.subgroup([2, 3])]
        half: Any = halves[group.rank // 2]
        np.testing.assert_array_equal(cupy.asnumpy(half.all_reduce(one)), np.full(5, 2.0))
        work = group.stream().all_reduce(one, 0)
        np.testing.assert_array_equal(cupy.asnumpy(work.wait()), np.full(5, 4.0))
        group.barrier()

    with groups(cupy, 4, slot_bytes=SLOT_BYTES) as found:
        assert len(cupy.machine.shared) == 4
        on_ranks(found, body)
        assert len(cupy.machine.shared) == 12
    eventually(lambda: not cupy.machine.shared, "all slabs are freed")


def test_ranks_that_call_different_things_get_both_signatures_instead_of_hanging(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> dict[int, str]:
        with pytest.raises(CollectiveMismatchError) as raised:
            group.all_reduce(cupy.asarray(np.ones(3 + group.rank, np.float32)))
        return raised.value.signatures

    with groups(cupy, 2) as found:
        for signatures in on_ranks(found, body):
            assert signatures == {rank: f"all_reduce(op=sum, float32[{3 + rank}]) by CUDA IPC" for rank in range(2)}


def test_an_operation_whose_peer_never_comes_ends_in_its_deadline_and_names_it(cupy: StandIn) -> None:
    with groups(cupy, 2) as found, pytest.raises(CollectiveTimeoutError) as raised:
        found[0].all_reduce(cupy.asarray(np.ones(3, np.float32)), timeout=0.3)
    assert raised.value.waiting_on == [1]


@pytest.mark.parametrize("cause", [PeerLostError(1, "killed by signal 9 (SIGKILL)"), GroupAbortedError(0, "enough")])
def test_the_end_of_a_generation_frees_who_waits_and_the_memory(cupy: StandIn, cause: FerroError) -> None:
    with ipc_backends(cupy, 2) as backends:
        found = [ProcessGroup(backend, timeout=SECONDS) for backend in backends]
        x = cupy.asarray(np.ones(3, np.float32))
        work = found[0].all_reduce(x, async_op=True)
        for backend in backends:
            backend.latch.trip(cause)
        with pytest.raises(type(cause)):
            work.wait(host=True)
        assert isinstance(end_of(found[0], type(cause)), type(cause))
        del work, x
        eventually(lambda: not cupy.machine.shared, "all slabs are freed")


def test_a_rank_whose_gpu_waits_for_a_killed_rank_for_ever_ends_to_be_started_again(cupy: StandIn) -> None:
    """An event that a process has recorded, and its GPU has not reached, is never reached once the process is killed."""
    killed, codes = [True], list[int]()
    with GrpcWorld(2, transport="shared_memory") as world:

        def make(rank: int) -> CudaIpcBackend:
            lanes, process = world.backends[rank], f"process-{rank}"
            backend = CudaIpcBackend(lanes, device_of(cupy, 0), slot_bytes=SLOT_BYTES, process=process)
            ending = backend.context.ending
            ending._seconds, ending._leave, ending._exit_later = 0.1, codes.append, never
            return backend

        backends: list[Any] = in_threads(2, make)
        found = [ProcessGroup(backend, timeout=SECONDS) for backend in backends]

        def body(group: ProcessGroup) -> None:
            with cupy.cuda.Stream(non_blocking=True) as stream:
                x = cupy.asarray(np.ones(3, np.float32))
                if group.rank == 1:
                    stream.fake.enqueue(lambda: not killed)
                group.all_reduce(x)

        on_ranks(found, body)
        backends[0].latch.trip(PeerLostError(1, "killed by signal 9 (SIGKILL)"))
        eventually(lambda: codes == [EXIT_RETRY], "rank 0 ends")
        killed.clear()
        in_threads(2, lambda rank: found[rank].close())


def test_a_rank_that_cannot_open_the_others_memory_is_named_on_every_rank(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = cupy.cuda.runtime

    def refuse(handle: bytes) -> int:
        raise runtime.CUDARuntimeError(201)

    monkeypatch.setattr(runtime, "ipcOpenMemHandle", refuse)
    said = r"rank 0: cannot open the GPU memory of group rank 1.*rank 1: cannot open"
    with pytest.raises(NcclError, match=said) as raised, ipc_backends(cupy, 2):
        pass
    assert "--ipc=host" in raised.value.hint
    assert not cupy.machine.shared


def test_a_peer_of_which_only_a_part_can_be_opened_is_closed_again(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, events = cupy.cuda.runtime, set(cupy.machine.events)
    memory = cupy.machine.gpus[0].memory
    live_blocks = memory.live_blocks

    def refuse(handle: bytes) -> int:
        raise runtime.CUDARuntimeError(201)

    monkeypatch.setattr(runtime, "ipcOpenEventHandle", refuse)
    with pytest.raises(NcclError, match="cannot open the GPU memory of group rank 1"), ipc_backends(cupy, 2):
        pass
    assert memory.live_blocks == live_blocks
    assert set(cupy.machine.events) == events


def test_memory_that_one_rank_could_open_is_freed_only_when_it_has_closed_it(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA does not say what becomes of it otherwise: the fake calls it a fault."""
    runtime, refused = cupy.cuda.runtime, threading.Lock()
    open_memory, close_memory = runtime.ipcOpenMemHandle, runtime.ipcCloseMemHandle

    def refuse_one(handle: bytes) -> int:
        if refused.acquire(blocking=False):
            raise runtime.CUDARuntimeError(201)
        return open_memory(handle)

    def close_late(address: int) -> None:
        SYSTEM_CLOCK.parker().park(SYSTEM_CLOCK.now() + 0.05)
        close_memory(address)

    monkeypatch.setattr(runtime, "ipcOpenMemHandle", refuse_one)
    monkeypatch.setattr(runtime, "ipcCloseMemHandle", close_late)
    with pytest.raises(NcclError, match="cannot open the GPU memory of group rank"), ipc_backends(cupy, 2):
        pass
    assert not cupy.machine.shared


def test_a_slab_is_freed_at_once_though_its_peers_control_block_is_another_ones_by_then(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that closes a subgroup and makes another gets the same host memory again, before the others have seen the word."""
    monkeypatch.setattr(peers, "POLL_SECONDS", 0.1)

    def body(group: ProcessGroup) -> None:
        backend: Any = group._backend
        pair: Any = group.subgroup([0, 1])
        if group.rank == 0:  # closes when the other one has, and sleeps until it looks again
            communicator = pair._backend.context.program.communicator
            eventually(lambda: communicator._peers[0].has_closed, "the other one has closed its part")
        pair.close()
        if group.rank == 0:
            backend._connector._room(block_bytes(2))

    with groups(cupy, 2, slot_bytes=SLOT_BYTES) as found:
        on_ranks(found, body)
        eventually(lambda: len(cupy.machine.shared) == 2, "the subgroups' slabs are freed", 1.0)


def test_nobody_waits_to_free_its_memory_for_a_rank_whose_gpu_has_failed(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, here = cupy.cuda.runtime, threading.local()
    synchronize = runtime.eventSynchronize

    def fail(event: int) -> None:
        if here.has_failed:
            raise runtime.CUDARuntimeError(700)
        synchronize(event)

    monkeypatch.setattr(runtime, "eventSynchronize", fail)
    with ipc_backends(cupy, 2, apart=False) as backends:
        made = [backend.context.program.communicator for backend in backends]

        def end(rank: int) -> None:
            here.has_failed = rank == 0
            made[rank].abort()

        began = SYSTEM_CLOCK.now()
        failure, _ = in_threads(2, end)
        assert isinstance(failure, NcclError)
        assert SYSTEM_CLOCK.now() - began < ABORT_SECONDS / 2


@pytest.mark.parametrize("call", ["malloc", "ipcGetMemHandle", "ipcGetEventHandle"])
def test_a_gpu_that_has_no_memory_for_it_or_shares_none_is_named_on_every_rank(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(what: int) -> Any:
        raise cupy.cuda.runtime.CUDARuntimeError(2)

    monkeypatch.setattr(cupy.cuda.runtime, call, refuse)
    with pytest.raises(NcclError, match=r"rank 0: cannot share .* MiB of the GPU's memory"), ipc_backends(cupy, 2):
        pass
    assert not cupy.machine.shared


def test_ranks_that_share_no_memory_are_refused_and_told_what_to_do(cupy: StandIn) -> None:
    lanes = host_lanes(2)
    for error in in_threads(2, lambda rank: CudaIpcBackend(lanes[rank], device_of(cupy, 0))):
        assert isinstance(error, BackendUnavailableError)
        assert "these do not" in error.reason
        assert "backend='grpc'" in error.hint


def test_a_world_of_one_runs_on_its_gpu(cupy: StandIn) -> None:
    with ProcessGroup(create("cuda_ipc", Place(sessions(1)[0], None, local_rank=2))) as group:
        assert (group.backend, cupy.cuda.Device().id) == ("cuda_ipc", 2)
        found = group.all_reduce(cupy.asarray(np.arange(3.0)), op="mean")
        np.testing.assert_array_equal(cupy.asnumpy(found), np.arange(3.0))
    cupy.cuda.Device(0).use()


def test_every_operator_that_is_asked_for_has_a_kernel() -> None:
    assert {kernel_of(op, datatype) for op in Op for datatype in DataType} == set(FOLDS)
