"""The memory of a bucket on a GPU. The host only queues work, and waits once a step: for the bucket's reduced header.

Idea. Every use of a bucket, in whichever stream is current, waits on the GPU for the use before it (`StreamOrder`). So a bucket
is reduced after its last gradient was written, is not written again before its means were read, and its memory returns to the
pool after all of that. The header is made and read on the host; it is copied through a few bytes of pinned memory, in the same
order. Gradients that do not change before the bucket is complete are packed by one kernel for the whole bucket, which also
multiplies and casts. Means that are copied out are unpacked likewise.

Cost: on the host one copy to queue for each gradient, or one kernel for each bucket; on the GPU one pass over the gradients,
none for those that were computed in their slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ferrorpc.arrays.base import Kind, View
from ferrorpc.arrays.cupy_kind import CupyKind
from ferrorpc.arrays.device import Device, DeviceArray, Stream
from ferrorpc.arrays.event import Event
from ferrorpc.arrays.kinds import NUMPY
from ferrorpc.arrays.staging import wait_within
from ferrorpc.ddp.bucket import Bucket, Slot
from ferrorpc.ddp.bucket_memory import Array, BucketMemory, ReducedHeader, is_divisor, reals_of
from ferrorpc.ddp.stream_order import StreamOrder
from ferrorpc.guard import Guard
from ferrorpc.kernels.cuda.program import NAMES
from ferrorpc.shared_property import shared_property
from ferrorpc.types import DType, TensorSpec


class DeviceContext:
    """What the buckets on one GPU share.

    Args:
        kind: of CuPy arrays there.
        guard: makes the guard of a wait for the GPU that begins now.
    """

    def __init__(self, kind: CupyKind, guard: Callable[[], Guard]) -> None:
        self.kind = kind
        self.guard = guard
        self.device: Device = kind.device
        self.kernels = self.device.kernels

    @shared_property
    def hook_stream(self) -> Stream:
        """The stream of communication hooks."""
        return self.device.new_stream()


class DeviceBucketMemory(BucketMemory):
    """A bucket on a GPU."""

    def __init__(self, bucket: Bucket, context: DeviceContext) -> None:
        super().__init__(bucket)
        self._context = context
        self._device, self._kernels = context.device, context.kernels
        self._is_packed = bucket.dtype in NAMES
        """Whether the kernels know the dtype."""
        self._itemsize = bucket.dtype.itemsize
        self._order = StreamOrder(self._device, "gradients' last")
        self.array: DeviceArray = self._zeros(bucket.dtype)
        self._storage: DeviceArray = self.array.view(bucket.dtype.storage)
        self._address = self._device.pointer(self._storage)
        self._pinned = self._device.pinned(bucket.header * self._accumulator_dtype.itemsize)
        self._unweighted, self._weighted = (self._header_of(dtype) for dtype in (bucket.dtype, self._accumulator_dtype))
        self._deferred: list[tuple[Slot, DeviceArray]] = []
        """Gradients that `pack` copies. They are kept until the GPU has done that."""
        self._fetched: Event
        """Behind the copy of the reduced header to the host."""

    def __del__(self) -> None:
        order = getattr(self, "_order", None)
        if order is not None:
            order.release(dict(vars(self)))

    def _zeros(self, dtype: DType) -> DeviceArray:
        self._order.allocating()
        with self._device.here():
            found = self._context.kind.empty((self.bucket.count,), dtype)
            found.view(dtype.storage)[...] = 0
            return found

    @property
    def _accumulator_dtype(self) -> DType:
        return DType.FLOAT32 if self.bucket.dtype.is_half else self.bucket.dtype

    @property
    def _target(self) -> tuple[DeviceArray, DType]:
        """The array that is reduced, in its storage dtype, and its dtype."""
        return (self._storage, self.bucket.dtype) if self._weight is None else (self.accumulator, self._accumulator_dtype)

    def _header_of(self, dtype: DType) -> tuple[Array, Array]:
        """The pinned memory as `_header` in this dtype."""
        flat = self._pinned[: self.bucket.header * dtype.itemsize].view(dtype.storage)
        return NUMPY.typed(flat, TensorSpec(dtype, flat.shape)), flat

    @property
    def _header(self) -> tuple[Array, Array]:
        """The header on the host: in the dtype that is reduced, and in its storage dtype. The GPU does not access it between
        steps."""
        return self._unweighted if self._weight is None else self._weighted

    def begin(self, weight: float | None, follows: bool) -> None:
        self._order.enter()  # raises before the step has begun
        self._order.release_late()
        self._weight = weight
        self._deferred = []
        self._summed.clear()
        header, _ = self._header
        header[...] = 0
        header[: self.bucket.weight] = 1
        header[self.bucket.takers] = not follows

    def write(self, slot: Slot, gradient: View | None, used: bool, deferrable: bool) -> None:
        if not used:
            self._header[0][slot.flag] = 0
        if slot.start == slot.stop:
            return
        if gradient is None:
            self._order.enter()
            with self._device.here():
                self._target[0][slot.start : slot.stop] = 0
        elif not (deferrable and self._is_packed) or self._is_in_place(slot, gradient.data):
            self._write_now(slot, gradient.data, self._order.enter())
        else:
            self._deferred.append((slot, gradient.data))

    def written_in_place(self) -> None:
        if not self._order.is_in_last:  # autograd runs each part of a backward pass in the stream of its forward pass
            self._order.enter()

    def _is_in_place(self, slot: Slot, data: DeviceArray) -> bool:
        """Whether an array is the slot itself."""
        return self._device.pointer(data) == self._address + slot.start * self._itemsize

    def _write_now(self, slot: Slot, data: DeviceArray, stream: Stream) -> None:
        """Copies one gradient to its slot, times the weight."""
        if slot.name in self._summed:
            sums = self.accumulator[slot.start : slot.stop]
            with self._device.here():
                if self._weight is None:
                    self._kernels.pack([sums], [slot.start], self._storage, DType.FLOAT32, self.bucket.dtype)
                elif self._weight != 1:
                    self._multiply(sums, self._weight)
            return
        if self._weight is not None and self._is_packed:
            with self._device.here():
                self._pack([(slot, data)])
                self._device.staging.keep(data)  # the caller may drop it, and its own stream reuse the memory before this one
            return
        place = self._target[0][slot.start : slot.stop]
        if not self._is_in_place(slot, data):
            self._device.copy(place, data, stream)
            with self._device.here():
                self._device.staging.keep(data)
        if self._weight is not None and self._weight != 1:
            with self._device.here():
                self._multiply(place, self._weight)

    def _pack(self, gradients: Sequence[tuple[Slot, DeviceArray]]) -> None:
        """As `_write_now`, for several gradients in one kernel."""
        (target, to), scale = self._target, 1.0 if self._weight is None else self._weight
        arrays, starts = [data for _, data in gradients], [slot.start for slot, _ in gradients]
        self._kernels.pack(arrays, starts, target, self.bucket.dtype, to, scale)

    def add(self, slot: Slot, part: View, is_first: bool) -> None:
        total, given, dtype = self.place(slot), part.data.reshape(-1), self.bucket.dtype
        with self._device.here():
            if is_first:
                total[...] = given
            elif dtype.is_half:
                self._add_in_float32(slot, given)
            elif dtype in (DType.FLOAT32, DType.COMPLEX64):
                total, given = reals_of(total), reals_of(given)
                self._kernels.sum_peers([total, given], total, DType.FLOAT32)
            else:
                total += given
            self._device.staging.keep(part.data)

    def _add_in_float32(self, slot: Slot, given: DeviceArray) -> None:
        sums, dtype = self.accumulator[slot.start : slot.stop], self.bucket.dtype
        if slot.name not in self._summed:
            self._kernels.unpack([sums], [slot.start], self._storage, dtype, DType.FLOAT32)
            self._summed.add(slot.name)
        term = self._device.empty(sums.shape, sums.dtype)
        self._kernels.unpack([term], [0], given, dtype, DType.FLOAT32)
        self._kernels.sum_peers([sums, term], sums, DType.FLOAT32)

    def pack(self) -> DeviceArray:
        header, flat = self._header
        self._write_weight(header)
        stream = self._order.enter()
        with self._device.here():
            if self._deferred:
                self._pack(self._deferred)
            self._device.upload(self._target[0][: self.bucket.header], flat, stream)
        return self._operand

    @contextmanager
    def hook_context(self) -> Iterator[None]:
        with self._device.on(self._context.hook_stream):
            self._order.enter()
            yield

    def fetch(self) -> None:
        stream, (_, flat) = self._order.enter(), self._header
        self._device.download(flat, self._target[0][: self.bucket.header], stream)
        self._fetched = stream.record()

    def finish(self) -> ReducedHeader:
        start, body = self.bucket.header, slice(self.bucket.header, None)
        wait_within(self._fetched, self._context.guard())
        self._deferred = []
        header = self._reduced(self._header[0])
        if is_divisor(header.total_weight) and self.bucket.count > start:
            self._order.enter()
            with self._device.here():
                self._divide(self.accumulator[body], header.total_weight)
                if self.bucket.dtype.is_half:
                    self._kernels.unpack([self._storage[body]], [start], self.accumulator, DType.FLOAT32, self.bucket.dtype)
        return header

    def place(self, slot: Slot) -> DeviceArray:
        self._order.enter()
        return self._storage[slot.start : slot.stop]

    def copied(self, part: DeviceArray) -> DeviceArray:
        self._order.enter()
        with self._device.here():
            return part.copy()

    def alias(self, slot: Slot, kind: Kind) -> Any | None:
        return kind.wrap(self.place(slot), slot.spec) if kind.device_kind is self._context.kind else None

    def read(self, slots: Sequence[Slot], targets: Sequence[Any]) -> None:
        filled = [(slot, target) for slot, target in zip(slots, targets, strict=True) if slot.start < slot.stop]
        dtype, stream = self.bucket.dtype, self._order.enter()
        with self._device.here():
            if self._is_packed and len(filled) > 1:
                arrays, starts = [target for _, target in filled], [slot.start for slot, _ in filled]
                self._kernels.unpack(arrays, starts, self._storage, dtype, dtype)
                return
            for slot, target in filled:
                self._device.copy(target, self._storage[slot.start : slot.stop], stream)

    def copies(self, slots: Sequence[Slot], kinds: Mapping[str, Kind]) -> list[Any]:
        found = self._device.empty_each([slot.spec.shape for slot in slots], self.bucket.dtype.storage)
        self.read(slots, found)
        return [kinds[slot.name].wrap(each, slot.spec) for each, slot in zip(found, slots, strict=True)]

    def restore(self, slot: Slot, saved: DeviceArray) -> None:
        with self._device.here():
            self.place(slot)[...] = saved

    # float32 goes through the library's own kernels: CuPy's flush subnormal numbers to zero.

    def _multiply(self, array: DeviceArray, factor: float) -> None:
        """array *= factor."""
        reals = reals_of(array)
        if reals.dtype == np.float32:
            self._kernels.pack([reals], [0], reals, DType.FLOAT32, DType.FLOAT32, factor)
        else:
            reals *= reals.dtype.type(factor)

    def _divide(self, array: DeviceArray, divisor: float) -> None:
        """array /= divisor."""
        reals = reals_of(array)
        if reals.dtype == np.float32:
            self._kernels.sum_peers([reals], reals, DType.FLOAT32, divisor)
        else:
            reals /= reals.dtype.type(divisor)
