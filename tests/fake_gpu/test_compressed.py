"""Compressed reductions of CuPy arrays: encoded, decoded and added on the GPU, with the bits that host arrays have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ferrorpc.arrays.device import Device
from ferrorpc.arrays.devices import device_of
from ferrorpc.collectives import compressed_on_device
from ferrorpc.errors import PeerLostError, TensorMismatchError
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.kernels.cuda.codecs import DEVICE_CODECS
from ferrorpc.testing.gpu.stand_in import StandIn
from ferrorpc.testing.reference import check_same
from ferrorpc.wire import codecs
from ferrorpc.wire.codecs import CODEC_NAMES, codec
from tests.fake_gpu.added_codec import Scaled
from tests.fake_gpu.events import SECONDS, Events, same, with_small_slots, world
from tests.fake_gpu.host_kernels import HostKernels
from tests.fake_gpu.test_launcher import RawModule

SLOT = 192 << 10
SLOTS = 3
CODED = compressed_on_device.CODED_VALUES

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """A codec that has no kernels."""
    monkeypatch.setitem(codecs._CODECS, Scaled.name, Scaled())


@pytest.fixture(autouse=True)
def small_slots(cupy: StandIn) -> Iterator[None]:
    """Slots smaller than an encoded chunk."""
    yield from with_small_slots(cupy, SLOT, SLOTS)


class Traffic:
    """Bytes that went through pinned memory, by direction and GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes: dict[tuple[str, int], int] = {}
        for name in ("upload", "download"):
            monkeypatch.setattr(Device, name, self._counted(name, getattr(Device, name)))

    def _counted(self, name: str, copy: Callable[..., None]) -> Callable[..., None]:
        def counted(device: Device, target: Any, source: Any, stream: Any) -> None:
            key = (name, device.index)
            self.bytes[key] = self.bytes.get(key, 0) + source.nbytes
            copy(device, target, source, stream)

        return counted


def floats(count: int, rank: int) -> Array:
    """Of very different sizes, zeros and subnormals among them."""
    chance = np.random.default_rng([rank, count])
    values = chance.standard_normal(count) * 10.0 ** chance.integers(-44, 30, count)
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


@pytest.mark.parametrize("wire", [*CODEC_NAMES, Scaled.name])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_reduction_has_the_bits_it_has_with_host_arrays(cupy: StandIn, size: int, wire: str) -> None:
    def body(group: ProcessGroup) -> None:
        for count in (0, 1, 257, size * CODED + 5):
            x = floats(count, group.rank)
            there = cupy.asarray(x)
            for op in ("sum", "mean", "max"):
                total = group.all_reduce(x, op=op, wire=wire)
                what = f"{op} of {count}"
                same(cupy, group.all_reduce(there, op=op, wire=wire), total, what)
                same(cupy, group.all_reduce(there.copy(), op=op, wire=wire, async_op=True).wait(), total, f"{what} in flight")
                same(cupy, group.reduce(there, op=op, wire=wire), group.reduce(x, op=op, wire=wire), f"{what} on rank 0")
            part = group.reduce_scatter(x, wire=wire)
            same(cupy, group.reduce_scatter(there, wire=wire), part, f"parts of {count}")
            total = group.all_reduce(x, wire=wire)
            strided = cupy.asarray(np.zeros(2 * count, np.float32))[::2]
            assert group.all_reduce(there, wire=wire, out=strided) is strided
            same(cupy, strided.copy(), total, f"{count} into strided memory")
            assert group.all_reduce(there, wire=wire, out=there) is there
            same(cupy, there, total, f"{count} in place")

    world(size, cupy, body)


@pytest.mark.parametrize("wire", DEVICE_CODECS)
def test_the_kernels_own_text_has_these_bits(cupy: StandIn, kernels: HostKernels, wire: str) -> None:
    """As C++ on the host, in place of the reference that the fake computes."""
    cupy.RawModule = type("RawModule", (RawModule,), {"kernels": kernels, "cupy": cupy})

    def body(group: ProcessGroup) -> None:
        x = floats(1000, group.rank)
        for op in ("sum", "mean"):
            total = group.all_reduce(x, op=op, wire=wire)
            same(cupy, group.all_reduce(cupy.asarray(x), op=op, wire=wire), total, op)

    world(3, cupy, body)


@pytest.mark.parametrize("wire", [*CODEC_NAMES, Scaled.name])
def test_ranks_with_host_arrays_and_ranks_with_gpu_arrays_agree(cupy: StandIn, wire: str) -> None:
    """Also about what is not finite: which values are NaN, and all others bit for bit."""

    def body(group: ProcessGroup) -> Array:
        x = floats(3 * CODED + 7, group.rank)
        x[[5, CODED, -1]] = np.array([np.inf, np.nan, -np.inf], np.float32)
        found = group.all_reduce(cupy.asarray(x) if group.rank else x, wire=wire)
        return found if isinstance(found, np.ndarray) else cupy.asnumpy(found)

    here, there = world(2, cupy, body)
    np.testing.assert_array_equal(np.isnan(here), np.isnan(there))
    assert np.isnan(here).any()
    whole = ~np.isnan(here)
    check_same(here[whole], there[whole], wire)


@pytest.mark.parametrize("wire", DEVICE_CODECS)
def test_only_encoded_bytes_go_through_pinned_memory(cupy: StandIn, monkeypatch: pytest.MonkeyPatch, wire: str) -> None:
    traffic = Traffic(monkeypatch)
    count = 4 * CODED

    def body(group: ProcessGroup) -> None:
        group.all_reduce(cupy.asarray(floats(count, group.rank)), wire=wire)

    world(2, cupy, body)
    encoded = codec(wire).encoded_bytes(count)
    for rank in range(2):
        # Down: the other's slice, and this rank's sum. Up: the other's part of this rank's slice, and the other's sum.
        assert traffic.bytes == {**traffic.bytes, ("download", rank): encoded, ("upload", rank): encoded}
    assert encoded <= count * 2


@pytest.mark.parametrize(("op", "wire"), [("max", "bf16"), ("sum", Scaled.name)])
def test_what_has_no_kernel_goes_through_the_host(cupy: StandIn, monkeypatch: pytest.MonkeyPatch, op: str, wire: str) -> None:
    traffic = Traffic(monkeypatch)

    def body(group: ProcessGroup) -> None:
        group.all_reduce(cupy.asarray(floats(100, group.rank)), op=op, wire=wire)
        with pytest.raises(TensorMismatchError, match="float32"):
            group.all_reduce(cupy.asarray(np.zeros(3)), wire="bf16")

    world(2, cupy, body)
    assert traffic.bytes["download", 0] == 400


def test_a_late_stream_holds_up_its_own_operation_alone(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> None:
        count = 2 * CODED
        release = threading.Event()
        zeros = cupy.asarray(np.zeros(count, np.float32))
        cupy.cuda.get_current_stream().synchronize()
        stuck = cupy.cuda.Stream(non_blocking=True)
        stuck.fake.enqueue(release.is_set)
        with stuck:
            late = zeros + (group.rank + 1.0)
            work = group.all_reduce(late, wire="bf16", async_op=True)
            del late
        same(cupy, group.all_reduce(zeros + 2, wire="bf16"), np.full(count, 4, np.float32), "meanwhile")
        assert not work.done()
        release.set()
        with stuck:
            same(cupy, work.wait(), np.full(count, 3, np.float32), "what came late")

    world(2, cupy, body)


@pytest.mark.parametrize("held", ["down 0", "up 0", "down 1"])
def test_a_peer_that_dies_leaves_nothing_behind(cupy: StandIn, monkeypatch: pytest.MonkeyPatch, held: str) -> None:
    """Whether the GPU is still at copies to the host, at kernels that wait for copies from there, or at nothing."""
    events = Events(cupy, monkeypatch)
    blocks: list[int] = []

    def body(group: ProcessGroup) -> None:
        memory = cupy.machine.gpus[0].memory
        x = cupy.asarray(floats(4 * CODED, group.rank))
        cupy.cuda.get_current_stream().synchronize()
        group.barrier()
        if group.rank == 0:
            cupy.machine.settle()
            blocks.append(memory.live_blocks - 1)
            # Of what rank 1 sends, its own chunks come, in whatever order their slots do, and none of what it has added.
            events.clear({"down 1": (4, "released"), held: (1, "released")})
        group.barrier()
        if group.rank == 1:
            group.all_reduce(x, wire="int8", async_op=True)
            events.wait_until_put_off(held)
            return group.session.leave("ValueError: bad batch")
        cause = ""
        try:  # not pytest.raises, which refers to what it caught in a circle
            group.all_reduce(x, wire="int8")
        except PeerLostError as error:
            cause = error.message
        assert "bad batch" in cause
        del x
        cupy.machine.settle()
        events.clear({})
        parker, until = SYSTEM_CLOCK.parker(), SYSTEM_CLOCK.now() + SECONDS
        while memory.live_blocks > blocks[0] and SYSTEM_CLOCK.now() < until:
            parker.park(SYSTEM_CLOCK.now() + 0.01)
            device_of(cupy, 0).staging.to_host(cupy.asarray(floats(8, 0)))  # what is still read is let go of by the next copy
            cupy.machine.settle()
        blocks.append(memory.live_blocks)
        return None

    world(2, cupy, body)
    assert blocks[1] <= blocks[0]  # the other rank may have let go of its own array, too
