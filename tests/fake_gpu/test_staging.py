"""Pinned staging over fake GPUs: what arrives, in which order things happen, and how long memory lives."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import numpy as np
import pytest

from ferrorpc.arrays import staging as staging_module
from ferrorpc.arrays.device import Device
from ferrorpc.arrays.devices import device_of
from ferrorpc.arrays.staging import Staging, until_true, wait_for
from ferrorpc.collectives.device_transfers import transfers_for
from ferrorpc.errors import CollectiveTimeoutError, GroupAbortedError
from ferrorpc.guard import SYSTEM_CLOCK, Guard, Latch
from ferrorpc.testing.gpu.machine import FREED, Machine
from ferrorpc.testing.gpu.stand_in import StandIn, stand_in
from tests.fake_gpu.events import taken

SLOT = 64


def small(cupy: StandIn) -> Staging:
    return Staging(device_of(cupy, 0), slot_bytes=SLOT, slots=3)


def of_slots_alone(cupy: StandIn) -> Staging:
    return Staging(device_of(cupy, 0), slot_bytes=SLOT, slots=3, pool_bytes=0)


@pytest.mark.parametrize("size_bytes", [0, 1, SLOT - 1, SLOT, SLOT + 1, 3 * SLOT, 10 * SLOT + 7])
def test_what_goes_down_and_up_again_is_the_same_whatever_its_size(cupy: StandIn, size_bytes: int) -> None:
    values = np.random.default_rng(size_bytes).integers(0, 255, size_bytes, np.uint8)
    staging = of_slots_alone(cupy)
    there = staging.to_device(values)
    values_then, values[:] = values.copy(), 0  # `up` has read it when it returns
    assert staging.to_host(there).tobytes() == values_then.tobytes()


def test_pinned_memory_is_bounded_by_the_slots_and_used_again(cupy: StandIn) -> None:
    staging = of_slots_alone(cupy)
    for _ in range(3):
        staging.to_host(staging.to_device(np.arange(1000.0)))
    assert cupy.machine.pinned.live_blocks == 2 * 3


def test_a_copy_to_the_host_waits_for_the_callers_stream_alone(cupy: StandIn) -> None:
    staging = small(cupy)
    with cupy.cuda.Stream(non_blocking=True):
        x = cupy.asarray(np.arange(100, dtype=np.float32))
        y = x * 2 + 1
        stuck = cupy.cuda.Stream(non_blocking=True)
        stuck.fake.enqueue(lambda: False)
        np.testing.assert_array_equal(staging.to_host(y), np.arange(100, dtype=np.float32) * 2 + 1)
        stuck.fake.tasks.clear()


def test_the_callers_stream_goes_on_after_the_upload_and_the_host_does_not_wait(cupy: StandIn) -> None:
    staging = small(cupy)
    there = staging.to_device(np.arange(8.0))
    assert cupy.machine.gpus[0].bytes_at(there.data.ptr, 8).tolist() == [FREED] * 8, "it is still in the queue"
    np.testing.assert_array_equal(cupy.asnumpy(there + 1), np.arange(8.0) + 1)


def test_an_array_dropped_at_once_and_its_memory_used_again_does_no_harm(cupy: StandIn) -> None:
    staging = small(cupy)
    for turn in range(20):
        there = staging.to_device(np.full(50, turn, np.int64))
        found = staging.to_host(there * 3)
        del there
        np.testing.assert_array_equal(found, np.full(50, 3 * turn, np.int64))


def test_what_takes_memory_without_holding_it_is_found_by_the_fake() -> None:
    """The fake is worth something only if it shows such a bug: a copy in another stream of an array that is dropped."""
    machine = Machine()

    def forget_too_early() -> None:
        with stand_in(machine) as cupy:
            device = device_of(cupy, 0)
            x = cupy.asarray(np.arange(10.0))
            pinned = device.pinned(80)
            late = device.new_stream()
            late.wait(device.current().record())
            device.download(pinned, x, late)
            del x
            cupy.cuda.get_current_stream().synchronize()

    with pytest.raises(RuntimeError, match="illegal address"):
        forget_too_early()


def test_a_copy_that_the_gpu_never_comes_to_ends_in_its_deadline(cupy: StandIn) -> None:
    stream = device_of(cupy, 0).new_stream()
    cupy.gpu.stream(stream.pointer).enqueue(lambda: False)
    event = stream.record()
    with pytest.raises(CollectiveTimeoutError, match=r"within 0\.02 s"):
        wait_for(event, SYSTEM_CLOCK, 0.02)
    cupy.gpu.stream(stream.pointer).tasks.clear()


def test_a_copy_for_an_operation_ends_with_its_deadline_or_its_generation(cupy: StandIn) -> None:
    x, stuck, staging = cupy.asarray(np.ones(4)), cupy.cuda.Stream(non_blocking=True), small(cupy)
    stuck.fake.enqueue(lambda: False)
    for seconds in (0.05, 0.0):  # the second one has passed when the copy begins
        with stuck, pytest.raises(CollectiveTimeoutError, match=r"within 0(\.0\d*)? s"):
            staging.to_pinned(x, Guard(SYSTEM_CLOCK, Latch(), seconds))
    latch = Latch()
    SYSTEM_CLOCK.call_at(SYSTEM_CLOCK.now() + 0.05, lambda: latch.trip(GroupAbortedError(1, "it was asked to")))
    with stuck, pytest.raises(GroupAbortedError):
        staging.to_pinned(x, Guard(SYSTEM_CLOCK, latch, 10.0))
    stuck.fake.tasks.clear()


def test_no_copy_begins_for_an_operation_whose_generation_is_over(cupy: StandIn) -> None:
    x, staging, latch, begun = cupy.asarray(np.ones(4)), small(cupy), Latch(), list[int]()
    cupy.machine.copying = lambda direction, gpu, size_bytes: begun.append(size_bytes) is None
    latch.trip(GroupAbortedError(1, "it was asked to"))
    with pytest.raises(GroupAbortedError):
        staging.to_pinned(x, Guard(SYSTEM_CLOCK, latch, 10.0))
    assert not begun


def test_slots_that_could_not_be_pinned_are_not_counted(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    staging, x = small(cupy), cupy.asarray(np.arange(100))

    def refused(device: Device, size_bytes: int) -> None:
        raise MemoryError("no memory can be pinned")

    with monkeypatch.context() as patch:
        patch.setattr(Device, "pinned", refused)
        for _ in range(staging.downloads.slots):
            with pytest.raises(MemoryError):
                staging.to_host(x)
    np.testing.assert_array_equal(staging.to_host(x), np.arange(100))


def test_an_interrupted_end_loses_no_slots_and_frees_nothing_that_the_gpu_still_uses(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging, x, allowed = small(cupy), cupy.asarray(np.arange(100)), list[bool]()
    cupy.machine.settle()
    cupy.machine.copying = lambda direction, gpu, size_bytes: bool(allowed)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    download = staging.start_download(x)
    download._is_pinned = False
    cupy.machine.settle()
    download.advance()
    assert taken(staging.downloads) == 3
    with monkeypatch.context() as patch:
        patch.setattr(staging_module, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            download.finish()
    del x, download
    assert staging.downloads.take() is None, "the GPU still writes to all of them"
    allowed.append(True)
    cupy.machine.settle()
    np.testing.assert_array_equal(staging.to_host(cupy.asarray(np.arange(50))), np.arange(50))
    assert taken(staging.downloads) == 0


@pytest.mark.parametrize("strikes", ["download", "upload"])
def test_a_copy_that_is_interrupted_as_it_is_queued_loses_no_slot(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, strikes: str
) -> None:
    staging, x, values = small(cupy), cupy.asarray(np.arange(100)), np.arange(100)
    queue = getattr(Device, strikes)

    def interrupted(*arguments: Any) -> None:
        queue(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Device, strikes, interrupted)
        for _ in range(2 * staging.downloads.slots):
            with pytest.raises(KeyboardInterrupt):
                staging.to_host(x) if strikes == "download" else staging.to_device(values)
            cupy.machine.settle()
    np.testing.assert_array_equal(staging.to_host(staging.to_device(values)), values)
    cupy.machine.settle()
    assert (taken(staging.downloads), taken(staging.uploads)) == (0, 0)


def test_a_slot_to_which_the_gpu_writes_after_an_interrupt_is_not_free_before(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging, x, allowed = Staging(device_of(cupy, 0), SLOT, slots=1), cupy.asarray(np.arange(100)), list[bool]()
    cupy.machine.settle()
    cupy.machine.copying = lambda direction, gpu, size_bytes: bool(allowed)
    download = Device.download

    def interrupted(*arguments: Any) -> None:
        download(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Device, "download", interrupted)
        with pytest.raises(KeyboardInterrupt):
            staging.to_host(x)
    assert staging.downloads.take() is None
    allowed.append(True)
    cupy.machine.settle()
    assert staging.downloads.take() is not None


def test_a_copy_that_is_interrupted_as_the_host_reads_a_slot_loses_none_and_no_bytes(cupy: StandIn) -> None:
    class Interrupting(np.ndarray[Any, Any]):
        left = 1

        def __setitem__(self, *arguments: Any) -> None:
            super().__setitem__(*arguments)
            Interrupting.left -= 1
            if Interrupting.left == 0:
                raise KeyboardInterrupt

    staging, values = small(cupy), np.arange(100)
    download = staging.start_download(cupy.asarray(values))
    download._is_pinned, download._place = False, download._place.view(Interrupting)
    with pytest.raises(KeyboardInterrupt):
        until_true(lambda: download.advance() and download.is_complete, SYSTEM_CLOCK, 10.0)
    until_true(lambda: download.advance() and download.is_complete, SYSTEM_CLOCK, 10.0)  # as another thread may do
    np.testing.assert_array_equal(download.data, values)
    assert taken(staging.downloads) == 0


def test_parts_of_a_result_go_up_in_whatever_order_they_are_ready(cupy: StandIn) -> None:
    staging = small(cupy)
    values = np.random.default_rng(3).integers(0, 255, 7 * SLOT + 9, np.uint8)
    cuts = [0, 5, SLOT, 3 * SLOT + 1, 3 * SLOT + 2, 7 * SLOT, values.size]
    parts = list(itertools.pairwise(cuts))
    upload = staging.start_upload()
    for start, stop in (*parts[3:], *parts[:2], parts[2]):
        assert not upload.is_complete
        upload.allow(values, start, stop)
        for _ in range(100):
            upload.advance()
            cupy.machine.step()
    assert upload.is_complete
    upload.make_stream_wait()
    assert cupy.asnumpy(upload.target).tobytes() == values.tobytes()


def test_two_arrays_share_the_slots_and_come_down_side_by_side(cupy: StandIn) -> None:
    staging = small(cupy)
    arrays = [np.arange(10 * SLOT, dtype=np.uint8) + salt for salt in range(2)]
    downloads = [staging.start_download(cupy.asarray(array)) for array in arrays]
    looks = 0
    while not all(download.is_complete for download in downloads):
        for download, array in zip(downloads, arrays, strict=True):
            download.advance()
            assert download.data[: download.valid_bytes].tobytes() == array[: download.valid_bytes].tobytes()
        looks += 1
        assert looks < 1000
    assert taken(staging.downloads) == 0
    assert cupy.machine.pinned.live_blocks <= 3


def test_an_array_that_is_late_leaves_the_slots_to_others(cupy: StandIn) -> None:
    staging = small(cupy)
    x, y = (cupy.asarray(np.full(10 * SLOT, salt, np.uint8)) for salt in range(2))
    stuck = cupy.cuda.Stream(non_blocking=True)
    stuck.fake.enqueue(lambda: False)
    with stuck:
        late = staging.start_download(x)
    for _ in range(20):
        assert not late.advance()
    assert staging.to_host(y).tobytes() == bytes([1]) * 10 * SLOT
    stuck.fake.tasks.popleft()
    while not late.is_complete:
        late.advance()
    assert late.data.tobytes() == bytes(10 * SLOT)


@pytest.mark.parametrize(
    ("is_pinned", "way"),
    [(True, "complete"), (True, "given up"), (True, "interrupted"), (False, "complete"), (False, "given up")],
)
def test_a_result_on_its_way_up_keeps_its_memory_although_its_stream_goes(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, is_pinned: bool, way: str
) -> None:
    """As where a step that used a stream of its own fails. Memory of a destroyed stream goes back in another's order."""
    staging, values, allowed = small(cupy), np.arange(4 * SLOT, dtype=np.uint8), list[bool]()
    cupy.machine.copying = lambda direction, gpu, size_bytes: bool(allowed)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    def failed_step() -> Any:
        data = values
        if is_pinned:
            data = staging.host_memory(values.shape, values.dtype)
            data[:] = values
        with cupy.cuda.Stream(non_blocking=True):
            out = cupy.empty(values.shape, values.dtype)
            upload = staging.start_upload(out)
        upload.allow(data, 0, SLOT if way == "given up" else 3 * SLOT if way == "interrupted" else 4 * SLOT)
        if way == "interrupted":
            with monkeypatch.context() as patch:
                patch.setattr(type(staging.uploads.stream), "record", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    upload.advance()
        else:
            upload.advance()
        upload.finish()
        return out

    out = failed_step()
    gc.collect()
    del out
    for _ in range(20):
        cupy.machine.step()
    other = cupy.asarray(np.ones(4 * SLOT, np.uint8))
    allowed.append(True)
    cupy.machine.settle()
    assert (cupy.asnumpy(other) == 1).all()
    assert not cupy.machine.faults
    staging.uploads.let_go()
    cupy.machine.settle()
    assert cupy.machine.gpus[0].memory.live_blocks == 1, "it is given back in the end"


def test_transfers_of_a_gpu_that_has_failed_end_without_an_error_of_their_own(cupy: StandIn) -> None:
    staging, allowed = small(cupy), list[bool]()
    vars(device_of(cupy, 0))["staging"] = staging
    cupy.machine.copying = lambda direction, gpu, size_bytes: bool(allowed)
    x = cupy.asarray(np.ones(4 * SLOT, np.uint8))
    cupy.machine.settle()
    transfers = transfers_for([x], [x], 1)
    assert transfers is not None
    cupy.machine.settle()
    transfers.advance_downloads()
    transfers.allow_upload(0, np.ones(4 * SLOT, np.uint8), 0, SLOT)
    transfers.advance_uploads()
    cupy.machine.failure = 700
    transfers.finish()
    cupy.machine.failure = 0
    allowed.append(True)
    cupy.machine.settle()
    assert not cupy.machine.faults


def test_an_interrupted_end_of_one_transfer_ends_the_others_too(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    staging, allowed = small(cupy), list[bool]()
    vars(device_of(cupy, 0))["staging"] = staging
    cupy.machine.copying = lambda direction, gpu, size_bytes: bool(allowed)
    arrays = [cupy.asarray(np.full(4 * SLOT, salt, np.uint8)) for salt in (1, 2)]
    cupy.machine.settle()
    transfers = transfers_for(arrays, arrays, 2)
    assert transfers is not None
    cupy.machine.settle()
    transfers.advance_downloads()
    places = [each.data.ctypes.data for each in transfers.sources]

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(staging_module, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            transfers.finish()
    del transfers
    gc.collect()
    others = [staging.host_memory((4 * SLOT,), np.dtype(np.uint8)) for _ in places]
    assert not {each.ctypes.data for each in others} & set(places), "the GPU still writes there"
    allowed.append(True)
    cupy.machine.settle()
