"""Pinned memory that is lent: never to two at a time, never more than the bound, and again only when the GPU is past it."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest

from ferrorpc.arrays.devices import device_of
from ferrorpc.arrays.pinned import SEGMENT_BYTES_MIN, UNIT_BYTES, Pool, Ring
from ferrorpc.arrays.staging import Staging
from ferrorpc.errors import BackendUnavailableError
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import SYSTEM_CLOCK, Guard, Latch
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.fake_gpu.events import lent_bytes, same, world
from tests.threads import in_threads, results_of

MIB = 1 << 20
COUNT = 100_000
"""Elements of float32: more than a notice brings along."""
BYTES = np.dtype(np.uint8)
FLOATS = np.dtype(np.float32)

Array = np.ndarray[Any, Any]


def lent(pool: Pool, size_bytes: int) -> Array:
    found = pool.lend((size_bytes,), BYTES)
    assert found is not None
    return found


def test_what_is_lent_is_pinned_and_comes_back_with_the_last_view_of_it(cupy: StandIn) -> None:
    pool = Pool(device_of(cupy, 0), 16 * MIB)
    array = pool.lend((3, 5), FLOATS)
    assert array is not None
    assert (array.shape, array.dtype, array.flags.c_contiguous, array.flags.writeable) == ((3, 5), FLOATS, True, True)
    assert cupy.machine.pinned.find(array.ctypes.data, array.nbytes) is not None
    assert pool.holds(array)
    assert not pool.holds(np.empty(3))
    view = array[1:].reshape(-1).view(np.uint8)
    address = array.ctypes.data
    del array
    assert lent_bytes(pool) == UNIT_BYTES
    del view
    assert lent_bytes(pool) == 0
    assert lent(pool, 8).ctypes.data == address


def test_nobody_gets_what_somebody_has(cupy: StandIn) -> None:
    chance, pool = random.Random(5), Pool(device_of(cupy, 0), 32 * MIB)
    live: list[tuple[int, Array]] = []
    for turn in range(400):
        if live and chance.random() < 0.5:
            salt, array = live.pop(chance.randrange(len(live)))
            assert (array == salt).all()
            del array
        found = pool.lend((chance.choice([1, 5000, 300_000, 3 * MIB, 5 * MIB]),), BYTES)
        if found is not None:
            found[:] = turn % 251
            live.append((turn % 251, found))
        del found
        assert pool.pinned_bytes <= 32 * MIB
    assert all((array == salt).all() for salt, array in live)
    live.clear()
    assert lent_bytes(pool) == 0


def test_there_is_a_bound_and_what_was_pinned_stays_so(cupy: StandIn) -> None:
    pool = Pool(device_of(cupy, 0), 16 * MIB)
    assert pool.lend((17 * MIB,), BYTES) is None
    assert pool.lend((0,), BYTES) is None
    arrays = [lent(pool, 8 * MIB) for _ in range(2)]
    assert pool.lend((1,), BYTES) is None
    arrays.clear()
    for size_bytes in (1, 4 * MIB, 8 * MIB):
        lent(pool, size_bytes)
    assert (pool.pinned_bytes, cupy.machine.pinned.live_blocks) == (16 * MIB, 2)


def test_arrays_share_what_is_pinned_and_little_ones_leave_room_for_large_ones(cupy: StandIn) -> None:
    pool = Pool(device_of(cupy, 0), 16 * MIB)
    lent(pool, 8 * MIB)
    little = lent(pool, 100)
    assert pool.pinned_bytes == 8 * MIB, "there was room for it"
    large = lent(pool, 8 * MIB - UNIT_BYTES)
    assert pool.pinned_bytes == 8 * MIB, "beside it, too"
    other = lent(pool, 100)
    assert pool.pinned_bytes == 8 * MIB + SEGMENT_BYTES_MIN
    address = other.ctypes.data
    del little, large, other
    assert lent(pool, 100).ctypes.data == address


def pin_no_more(cupy: StandIn, monkeypatch: pytest.MonkeyPatch, slots: int = 0) -> list[int]:
    """The host can pin only so many more of the slots. Returns the sizes that are asked for."""
    asked: list[int] = []
    pin = cupy.cuda.alloc_pinned_memory

    def pinned(size_bytes: int) -> Any:
        asked.append(size_bytes)
        if len(asked) > slots:
            raise cupy.cuda.runtime.CUDARuntimeError(2)
        return pin(size_bytes)

    monkeypatch.setattr(cupy.cuda, "alloc_pinned_memory", pinned)
    return asked


def test_copies_go_on_with_the_slots_that_could_be_pinned(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = Staging(device_of(cupy, 0), slot_bytes=64, slots=4, pool_bytes=0)
    x = np.arange(1000, dtype=np.float32)
    asked = pin_no_more(cupy, monkeypatch, slots=2)
    np.testing.assert_array_equal(staging.to_host(cupy.asarray(x)), x)
    with pytest.raises(BackendUnavailableError, match="no 64 bytes of the host's memory can be pinned"):
        staging.to_device(x)  # uses slots of its own
    assert len(asked) == 4


def test_a_host_that_can_pin_no_more_is_not_asked_again(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(device_of(cupy, 0), 64 * MIB)
    kept = lent(pool, MIB)
    asked = pin_no_more(cupy, monkeypatch)
    assert pool.lend((8 * MIB,), BYTES) is None
    assert pool.lend((8 * MIB,), BYTES) is None
    assert asked == [8 * MIB]
    assert lent(pool, MIB).ctypes.data != kept.ctypes.data


@pytest.mark.parametrize("way", ["given up", "complete"])
def test_results_on_their_way_up_keep_their_memory_until_the_gpu_is_past_it(cupy: StandIn, way: str) -> None:
    allowed: list[bool] = []
    cupy.machine.copying = lambda direction, gpu, size_bytes: bool(allowed)
    staging = Staging(device_of(cupy, 0), slot_bytes=1000, slots=2)
    data = staging.host_memory((5000,), BYTES)
    data[:] = 7
    upload = staging.start_upload()
    upload.allow(data, 0, 5000 if way == "complete" else 3000)
    upload.advance()
    assert upload.is_complete == (way == "complete")
    there, address = upload.target, data.ctypes.data
    upload.finish()
    del data, upload
    cupy.machine.settle()
    other = staging.host_memory((5000,), BYTES)
    assert other.ctypes.data != address
    other[:] = 1
    allowed.append(True)
    cupy.machine.settle()
    assert cupy.asnumpy(there)[:3000].tobytes() == bytes([7]) * 3000
    assert staging.host_memory((5000,), BYTES).ctypes.data == address


def test_an_array_that_nobody_wants_any_more_keeps_its_place_until_the_gpu_has_written_there(cupy: StandIn) -> None:
    allowed: list[bool] = []
    cupy.machine.copying = lambda direction, gpu, size_bytes: bool(allowed)
    staging = Staging(device_of(cupy, 0), slot_bytes=1000, slots=2)
    download = staging.start_download(cupy.asarray(np.full(5000, 7, np.uint8)))
    for _ in range(10):
        download.advance()
    address = download.data.ctypes.data
    download.finish()
    del download
    other = staging.host_memory((5000,), BYTES)
    assert other.ctypes.data != address
    other[:] = 1
    allowed.append(True)
    cupy.machine.settle()
    assert (other == 1).all()
    assert staging.host_memory((5000,), BYTES).ctypes.data == address


def test_what_is_late_holds_up_its_own_memory_alone(cupy: StandIn) -> None:
    staging = Staging(device_of(cupy, 0))
    stuck = device_of(cupy, 0).new_stream()
    cupy.gpu.stream(stuck.pointer).enqueue(lambda: False)
    late, soon = staging.host_memory((8,), BYTES), staging.host_memory((8,), BYTES)
    address = soon.ctypes.data
    staging.uploads.keep(late, stuck.record())
    staging.uploads.keep(soon, staging.kernels.record())
    del late, soon
    for _ in range(5):
        staging.uploads.let_go()
    assert staging.host_memory((8,), BYTES).ctypes.data == address
    cupy.gpu.stream(stuck.pointer).tasks.clear()


class Reached:
    """An event that the GPU has passed."""

    done = True


class Captured:
    """An event that a graph holds."""

    @property
    def done(self) -> bool:
        raise BackendUnavailableError("a CUDA graph is being captured, or holds the operation")


class LetsGo:
    """Something whose finalizer has the ring let go of what it keeps."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring

    def __del__(self) -> None:
        self.ring.let_go()


def test_an_event_that_never_comes_keeps_its_own_memory_alone(cupy: StandIn) -> None:
    ring, kept = Staging(device_of(cupy, 0)).uploads, [LetsGo(Staging(device_of(cupy, 0)).uploads) for _ in range(2)]
    late, gone = (weakref.ref(each) for each in kept)
    ring.keep(kept[0], Captured())
    ring.keep(kept[1], Reached())
    kept.clear()
    ring.let_go()
    assert late() is not None
    assert gone() is None


def test_what_is_let_go_of_may_let_go_of_more(cupy: StandIn) -> None:
    ring = Staging(device_of(cupy, 0)).uploads
    ring.keep(LetsGo(ring), Reached())
    results_of(in_threads(1, lambda _: ring.let_go()))


def test_copies_for_those_who_may_keep_them_are_not_lent(cupy: StandIn) -> None:
    staging = Staging(device_of(cupy, 0))
    found = staging.to_host(cupy.asarray(np.arange(10)))
    assert (found.flags.owndata, staging.pool.pinned_bytes) == (True, 0)
    assert staging.pool.holds(staging.to_pinned(cupy.asarray(np.arange(10)), Guard(SYSTEM_CLOCK, Latch(), 10.0)))


def test_a_sum_takes_the_place_of_what_came_down(cupy: StandIn) -> None:
    """So half of the pinned memory is enough, and no slot is needed."""
    for index in range(2):
        device = device_of(cupy, index)
        vars(device)["staging"] = Staging(device, pool_bytes=SEGMENT_BYTES_MIN)

    def body(group: ProcessGroup) -> None:
        x = np.arange(MIB, dtype=np.float32) * (group.rank + 1)
        there = cupy.asarray(x)
        for _ in range(3):
            same(cupy, group.all_reduce(there), np.arange(MIB, dtype=np.float32) * 3, "all_reduce")
            same(cupy, there, x, "the input")
            group.barrier()  # until then the other rank may still look at what came down here
            gc.collect()

    world(2, cupy, body)
    assert cupy.machine.pinned.live_blocks == 2


def test_results_lie_in_pinned_memory_whatever_brings_them(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> None:
        me, other = group.rank, 1 - group.rank
        x = cupy.asarray(np.full(COUNT, me, np.float32))
        same(cupy, group.all_gather(x)[other], np.full(COUNT, other, np.float32), "all_gather")
        out = cupy.asarray(np.zeros(COUNT, np.float32))
        same(cupy, group.broadcast(x, root=1, out=out), np.ones(COUNT, np.float32), "broadcast")
        work = group.send(x, other, async_op=True)
        same(cupy, group.recv(other, out=out), np.full(COUNT, other, np.float32), "recv")
        work.wait()

    world(2, cupy, body)
    assert cupy.machine.pinned.live_blocks == 2, "no slots, but what is lent"
