"""The memory of buckets on a GPU: the host only queues what is done to it, and waits for nothing before a bucket has come home.

Idea. Every use of a bucket, by whatever stream is current, waits on the GPU for the use before it (`Order`). So a bucket leaves
after its last gradient, is not written again before its means were read, and its memory goes back to the pool after all of
that. The header is made and read on the host: it goes there and back through a few bytes of pinned memory, in the same order.
Gradients that do not change meanwhile are packed by one kernel for each bucket, which also multiplies and casts; so are
means when they are copied out.

Cost: on the host a copy to queue for each gradient, or one kernel for each bucket; on the GPU one pass over the gradients,
none for those that are computed in their places. The host waits once a bucket, for its header, when the sum has come home.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from ferrorpc.arrays.base import Kind, View
from ferrorpc.arrays.cupy_kind import CupyKind
from ferrorpc.arrays.device import Device, DeviceArray, Event, Stream
from ferrorpc.arrays.kinds import NUMPY
from ferrorpc.arrays.staging import COPY_SECONDS, wait_for
from ferrorpc.ddp.bucket import Bucket, Slot
from ferrorpc.ddp.memory import Array, Home, Memory, is_share, real_type
from ferrorpc.guard import Clock
from ferrorpc.kernels.cuda.reference import NAMES
from ferrorpc.types import DType, TensorSpec


class Gpu:
    """What the buckets on one GPU have in common.

    Args:
        kind: of CuPy arrays there.
        clock: what waits for the GPU go through.
    """

    def __init__(self, kind: CupyKind, clock: Clock) -> None:
        self.kind = kind
        self.clock = clock
        self.device: Device = kind.device
        self.kernels = self.device.kernels

    @cached_property
    def hooks(self) -> Stream:
        """The stream of communication hooks."""
        return self.device.new_stream()


class Order:
    """Makes the streams that use some memory do so one after the other, the current one first.

    Until the memory has gone back its streams are kept, from outside: in a circle of garbage a stream's own finalizer, which
    destroys it, may come before that of the memory.
    """

    _kept: ClassVar[set[Order]] = set()

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last = device.current()
        self._homes: list[Stream] = []
        self._kept.add(self)

    def enter(self) -> Stream:
        """The current stream: what it is given from now on comes after all earlier uses."""
        stream = self._device.current()
        if stream.pointer != self._last.pointer:
            stream.wait(self._last.record())
        self._last = stream
        return stream

    def extend(self) -> None:
        """Some of the memory is made now, in the current stream."""
        self._homes.append(self.enter())

    def leave(self) -> None:
        """The memory goes back to the streams in which it was made: after all uses."""
        for home in self._homes:
            if home.pointer != self._last.pointer:
                home.wait(self._last.record())
        self._kept.discard(self)

    def mark(self) -> Event:
        """A mark after all uses."""
        return self._last.record()


class DeviceMemory(Memory):
    """A bucket on a GPU."""

    def __init__(self, bucket: Bucket, gpu: Gpu) -> None:
        super().__init__(bucket)
        self._gpu = gpu
        self._order = Order(gpu.device)
        self.array: DeviceArray = self._zeros(bucket.dtype)
        self._storage: DeviceArray = self.array.view(bucket.dtype.storage)
        self._address = gpu.device.pointer(self._storage)
        self._pinned = gpu.device.pinned(bucket.header * self._wide_dtype.itemsize)
        self._even, self._weighted = (self._header_of(dtype) for dtype in (bucket.dtype, self._wide_dtype))
        self._pending: list[tuple[Slot, DeviceArray]] = []
        """Gradients that are packed when the bucket leaves, and kept until the GPU is past that."""

    def __del__(self) -> None:
        order = getattr(self, "_order", None)
        if order is not None and not sys.is_finalizing():
            order.leave()
            # Of a round that was given up the header may still be on its way; and memory goes back in a stream's order only
            # while that stream is there.
            self._gpu.device.staging.uploads.keep((getattr(self, "_pinned", None), order), order.mark())

    def _zeros(self, dtype: DType) -> DeviceArray:
        self._order.extend()
        with self._gpu.device.here():
            found = self._gpu.kind.empty((self.bucket.count,), dtype)
            found.view(dtype.storage)[...] = 0
            return found

    @property
    def _wide_dtype(self) -> DType:
        """The dtype that sums are kept in."""
        return DType.FLOAT32 if self.bucket.dtype.is_half else self.bucket.dtype

    @property
    def _target(self) -> tuple[DeviceArray, DType]:
        """The same in storage dtype, and which dtype that is."""
        return (self._storage, self.bucket.dtype) if self._weight is None else (self.wide, self._wide_dtype)

    def _header_of(self, dtype: DType) -> tuple[Array, Array]:
        """As `_header`, for rounds that travel in this dtype."""
        flat = self._pinned[: self.bucket.header * dtype.itemsize].view(dtype.storage)
        return NUMPY.typed(flat, TensorSpec(dtype, flat.shape)), flat

    @property
    def _header(self) -> tuple[Array, Array]:
        """The header on the host, in the dtype that travels; and in its storage dtype. The GPU does not look at it between
        rounds."""
        return self._even if self._weight is None else self._weighted

    def begin(self, weight: float | None) -> None:
        self._weight = weight
        self._pending = []
        header, _ = self._header
        header[...] = 0
        header[: self.bucket.weight] = 1

    def write(self, slot: Slot, gradient: View | None, used: bool, stays: bool) -> None:
        if not used:
            self._header[0][slot.flag] = 0
        if slot.start == slot.stop:
            return
        if gradient is not None and stays and self.bucket.dtype in NAMES and not self._lies(slot, gradient.data):
            self._pending.append((slot, gradient.data))
            return
        stream = self._order.enter()
        with self._gpu.device.here():
            if gradient is None:
                self._target[0][slot.start : slot.stop] = 0
            else:
                self._move_in(slot, gradient.data, stream)

    def _lies(self, slot: Slot, data: DeviceArray) -> bool:
        """Whether an array is in its place, which is its own."""
        return self._gpu.device.pointer(data) == self._address + slot.start * self.bucket.dtype.itemsize

    def _move_in(self, slot: Slot, data: DeviceArray, stream: Stream) -> None:
        """One gradient to where it travels, times the weight."""
        if self._weight is not None and self.bucket.dtype in NAMES:
            self._pack([(slot, data)])
            return
        place = self._target[0][slot.start : slot.stop]
        if not self._lies(slot, data):
            self._gpu.device.copy(place, data, stream)
        if self._weight not in (None, 1):
            self._multiply(place, float(self._weight or 0))

    def _pack(self, gradients: Sequence[tuple[Slot, DeviceArray]]) -> None:
        """As `_move_in`, of many, by one kernel."""
        (target, to), scale = self._target, 1.0 if self._weight is None else self._weight
        arrays, starts = [data for _, data in gradients], [slot.start for slot, _ in gradients]
        self._gpu.kernels.pack(arrays, starts, target, self.bucket.dtype, to, scale)

    def add(self, slot: Slot, part: View, is_first: bool) -> None:
        total, given, dtype = self.place(slot), part.data.reshape(-1), self.bucket.dtype
        with self._gpu.device.here():
            if is_first:
                total[...] = given
            elif dtype.is_half:
                self._gpu.kernels.sum_peers([total, given], total, dtype)
            elif real_type(dtype.storage) == np.float32:
                singles = _singles(total)
                self._gpu.kernels.sum_peers([singles, _singles(given)], singles, DType.FLOAT32)
            else:
                total += given

    def leave(self) -> DeviceArray:
        header, flat = self._header
        header[self.bucket.weight] = 0 if self._weight is None else self._weight
        stream = self._order.enter()
        with self._gpu.device.here():
            if self._pending:
                self._pack(self._pending)
            self._gpu.device.upload(self._target[0][: self.bucket.header], flat, stream)
        return self._travelling

    @contextmanager
    def apart(self) -> Iterator[None]:
        with self._gpu.device.on(self._gpu.hooks):
            self._order.enter()
            yield

    def settle(self) -> Home:
        header, body = self.bucket.header, slice(self.bucket.header, None)
        stream, (said, flat) = self._order.enter(), self._header
        self._gpu.device.download(flat, self._target[0][:header], stream)
        wait_for(stream.record(), self._gpu.clock, COPY_SECONDS)
        self._pending = []
        home = self._home(said)
        if is_share(home.total) and self.bucket.count > header:
            with self._gpu.device.here():
                self._divide(self.wide[body], home.total)
                if self.bucket.dtype.is_half:
                    self._gpu.kernels.unpack([self._storage[body]], [header], self.wide, DType.FLOAT32, self.bucket.dtype)
        return home

    def place(self, slot: Slot) -> DeviceArray:
        self._order.enter()
        return self._storage[slot.start : slot.stop]

    def alias(self, slot: Slot, kind: Kind) -> Any | None:
        return kind.wrap(self.place(slot), slot.spec) if kind.near is self._gpu.kind else None

    def read(self, slots: Sequence[Slot], targets: Sequence[Any]) -> None:
        filled = [(slot, target) for slot, target in zip(slots, targets, strict=True) if slot.start < slot.stop]
        dtype, stream = self.bucket.dtype, self._order.enter()
        with self._gpu.device.here():
            if dtype in NAMES and len(filled) > 1:
                arrays, starts = [target for _, target in filled], [slot.start for slot, _ in filled]
                self._gpu.kernels.unpack(arrays, starts, self._storage, dtype, dtype)
                return
            for slot, target in filled:
                self._gpu.device.copy(target, self._storage[slot.start : slot.stop], stream)

    def copies(self, slots: Sequence[Slot], kinds: Mapping[str, Kind]) -> list[Any]:
        found = [self._gpu.device.empty(slot.spec.shape, slot.spec.dtype.storage) for slot in slots]
        self.read(slots, found)
        return [kinds[slot.name].wrap(each, slot.spec) for each, slot in zip(found, slots, strict=True)]

    def keep(self, slot: Slot) -> DeviceArray:
        with self._gpu.device.here():
            return self.place(slot).copy()

    def restore(self, slot: Slot, kept: DeviceArray) -> None:
        with self._gpu.device.here():
            self.place(slot)[...] = kept

    # Single floats by the library's own kernels: to CuPy's, those that are subnormal are zero.

    def _multiply(self, array: DeviceArray, factor: float) -> None:
        """array *= factor, with NumPy's bits: complex numbers times a real one by their parts."""
        real = real_type(array.dtype)
        reals = array.view(real)
        if real is np.float32:
            self._gpu.kernels.pack([reals], [0], reals, DType.FLOAT32, DType.FLOAT32, factor)
        else:
            reals *= real(factor)

    def _divide(self, array: DeviceArray, divisor: float) -> None:
        """array /= divisor, with NumPy's bits, which are complex numbers' times the reciprocal."""
        real = real_type(array.dtype)
        if array.dtype != real:
            self._multiply(array, float(real(1) / real(divisor)))
        elif real is np.float32:
            self._gpu.kernels.sum_peers([array], array, DType.FLOAT32, divisor)
        else:
            array /= real(divisor)


def _singles(array: DeviceArray) -> DeviceArray:
    """float32 and complex64 as float32."""
    return array.view(np.float32)
