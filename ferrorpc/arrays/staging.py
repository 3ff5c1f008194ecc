"""Copies GPU arrays to host memory and back in pieces, so that the host can use the first bytes while the last are in transfer.

Idea. A GPU copies to and from pageable memory through small buffers of the driver, while the host waits; pinned memory it reads
and writes by DMA. So the host side of an array is pinned memory while some is free (pinned.py): the GPU fills it piece by
piece, and reads results from it, without a copy on the host. An array in pageable memory goes through a few pinned slots:
while the host copies one piece between a slot and the array, the GPU transfers the next ones. Nothing here blocks. A `Download`
(GPU to host) or an `Upload` (host to GPU) does what can be done at once on each `advance`, and says how far it is. So the user
of an array can begin with its first piece, and give back a result whose last piece is not there yet. `Staging.to_host` and
`to_device` advance until all of it is copied.

Streams. All copies of one direction use one CUDA stream, which never waits for anything but copies: what is late in one stream
must not delay the copies of others. So a copy to the host is queued only once the caller's stream has reached the point at
which it was asked for, and an abandoned copy ends soon. Copies to the device are queued at once, as long as the caller's stream
is not there in a stream of their own; but those through slots, which others need, only when it is there. Streams that use what
was uploaded wait for it on the GPU. Nothing is queued in the caller's stream later, because a CUDA graph may be captured from
it by then.

Lifetimes. Arrays and pinned memory are kept until the GPU has finished with them, whatever stream they were allocated in.

Cost: on the host some tens of microseconds for every SLOT_BYTES, and for arrays in pageable memory a copy, of which all but
the first and the last piece overlap the GPU's. Pinned on each device: at most POOL_BYTES, and for each direction SLOTS slots
of SLOT_BYTES, shared by all users.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

import numpy as np

from ferrorpc.arrays.device import Device, DeviceArray, Stream
from ferrorpc.arrays.event import Event
from ferrorpc.arrays.pinned import Pool, Ring
from ferrorpc.errors import BackendUnavailableError, CollectiveTimeoutError
from ferrorpc.guard import SYSTEM_CLOCK, Clock, Guard, Latch

POOL_BYTES: Final = 256 << 20
SLOT_BYTES: Final = 4 << 20
SLOTS: Final = 4
COPY_SECONDS: Final = 60.0
"""How long a copy may take, including what the caller's stream holds before it."""
ABANDON_SECONDS: Final = 0.2
"""How long the host waits for pieces in transfer, a few at most, when a copy is abandoned."""
NAP_SECONDS: Final = 50e-6
SPINS: Final = 100
"""How often the GPU is queried before the thread sleeps between queries."""

Array = np.ndarray[Any, Any]


class _Piece(NamedTuple):
    """Bytes [start, stop) of an array, copied once the GPU has reached the event: to a slot, or where that is None to their
    place."""

    slot: Array | None
    start: int
    stop: int
    end_event: Event


class Download:
    """A copy of a device array to host memory, from its first byte to its last, in storage dtype.

    Args:
        source: C-contiguous.
        data: the array on the host to copy to.
        is_pinned: whether `data` is pinned memory, which the GPU writes directly.

    Attributes:
        data: the array on the host; its first `valid_bytes` bytes are valid.
    """

    def __init__(self, device: Device, ring: Ring, source: DeviceArray, data: Array, is_pinned: bool = False) -> None:
        self.data = data
        self.valid_bytes = 0
        self.device = device
        self._ring = ring
        self._source: DeviceArray | None = source
        self._is_pinned = is_pinned
        self._place = data.reshape(-1).view(np.uint8)
        self._begins = device.current().record()
        self._begun = False
        self._queued = 0
        self._in_transfer: deque[_Piece] = deque()

    @property
    def is_complete(self) -> bool:
        """Whether all of it is on the host."""
        return self.valid_bytes == self._place.size

    def advance(self) -> bool:
        """Does what can be done at once. Returns whether more of it is on the host."""
        before = self.valid_bytes
        if not self.is_complete:
            self._collect()
            self._queue()
        return self.valid_bytes > before

    def _collect(self) -> None:
        while self._in_transfer and self._in_transfer[0].end_event.done:
            slot, start, stop, _ = self._in_transfer[0]
            if slot is not None:
                self._place[start:stop] = slot[: stop - start]
            self._in_transfer.popleft()  # only now: an interrupt before that must not lose the slot
            if slot is not None:
                self._ring.give_back(slot)
            self.valid_bytes = stop
        if self.is_complete:
            self._source = None

    def _queue(self) -> None:
        self._begun = self._begun or self._begins.done
        size, ring = self._place.size, self._ring
        while self._begun and self._source is not None and self._queued < size:
            start, stop = self._queued, min(self._queued + ring.slot_bytes, size)
            slot = None
            if not self._is_pinned:
                slot = ring.take()
                if slot is None:
                    return
            elif len(self._in_transfer) == ring.slots:
                return  # so that other arrays get their turn, and an abandoned copy ends soon
            target = self._place[start:stop] if slot is None else slot[: stop - start]
            try:
                self.device.download(target, _flat_bytes(self._source)[start:stop], ring.stream)
                self._queued = stop
            finally:  # interrupted: a piece without bytes, whose slot comes back once the GPU has written to it
                self._in_transfer.append(_Piece(slot, start, self._queued, ring.stream.record()))

    def finish(self) -> None:
        """Ends the copy, complete or not: frees what it holds once the GPU has finished with it."""
        pieces, self._in_transfer = self._in_transfer, deque()
        pending = bool(pieces)
        try:
            if pieces:
                wait_for(pieces[-1].end_event, SYSTEM_CLOCK, ABANDON_SECONDS)
                pending = False
        except (CollectiveTimeoutError, BackendUnavailableError):  # of a GPU that has failed, or is captured: not ready either
            pass
        finally:  # also where the wait is interrupted
            if pending:
                self._ring.keep((self._source, self.data), pieces[-1].end_event)
            for slot, _, _, end_event in pieces:
                if slot is not None:
                    self._ring.give_back(slot, end_event if pending else None)
            self._source = None


class Upload:
    """A copy of a host array to a device, whose parts may become ready in any order.

    It is made on the caller's thread, and its target belongs to that thread's current stream. Adjacent parts are copied
    together: the GPU copies SLOT_BYTES in about the time that the host needs to queue one copy.

    Args:
        pool: pinned memory in which the array may be, if it stays unchanged until the GPU has read it; None if it may change.
        target: the array to copy to, C-contiguous; None for a new one.
        is_prompt: whether the current stream never waits long, so that the copies of others may wait for it, too.
    """

    def __init__(
        self, device: Device, ring: Ring, pool: Pool | None, target: DeviceArray | None = None, is_prompt: bool = False
    ) -> None:
        self.target = target
        self.device = device
        self._ring = ring
        self._stream = ring.stream
        self._own_stream: Stream | None = None
        self._pool = pool
        self._is_prompt = is_prompt
        self._caller = device.current()
        self._begins: Event | None = None if target is None else self._caller.record()
        self._data: Array | None = None
        self._is_opened = False
        self._is_pinned = False
        self._begun = False
        self._allowed: deque[tuple[int, int]] = deque()
        self._ready: dict[int, int] = {}
        """Parts that are ready and not queued: end -> start."""
        self._ready_bytes = 0
        """The size of all parts that have become ready so far."""
        self._queued_bytes = 0
        self._mark: Event | None = None

    def allow(self, data: Array, start: int, stop: int) -> None:
        """Says that bytes [start, stop) of the array are final. May be called from any thread.

        Args:
            data: the whole array, C-contiguous, in storage dtype; the same one each time.
        """
        self._data = data
        self._allowed.append((start, stop))

    @property
    def is_complete(self) -> bool:
        """Whether all of it is queued."""
        return self._is_opened and self._data is not None and self._queued_bytes == self._data.nbytes

    def advance(self) -> bool:
        """Queues what is ready, as far as slots are free. Returns whether to call it again soon, when more are."""
        before, data = self._queued_bytes, self._data
        if data is None or not (self._allowed or self._ready) or not (self._is_opened or self._open(data)):
            return False
        while self._allowed:
            start, stop = self._allowed.popleft()
            if start < stop:
                self._ready_bytes += stop - start
                self._ready[stop] = self._ready.pop(start, start)
        if self._ready and self._begin():
            self._queue(data.reshape(-1).view(np.uint8), _flat_bytes(self.target))
        return self._queued_bytes > before and not self._is_pinned

    @property
    def waits_for_gpu(self) -> bool:
        """Whether it has something to copy, and the host waits until the caller's stream is there."""
        return bool(self._allowed or self._ready) and not self._begun

    def _open(self, data: Array) -> bool:
        """Finds out where to copy to. Returns False while a graph is captured from the caller's stream: none of its memory can
        be had then."""
        if self.target is None or self.target.shape != data.shape or self.target.dtype != data.dtype:
            if self.device.is_captured(self._caller):
                return False
            self.target = self.device.empty(data.shape, data.dtype, self._caller)
            # What the caller's stream holds now may still use that memory.
            self._begins = self._caller.record()
        self._is_pinned = self._pool is not None and self._pool.holds(data)
        self._is_opened = True
        return True

    def _queue(self, here: Array, there: DeviceArray) -> None:
        least_bytes = 1 if self._ready_bytes == here.size else self._ring.slot_bytes
        before = self._queued_bytes
        for stop, start in list(self._ready.items()):
            if stop - start >= least_bytes:
                del self._ready[stop]
                copy = self._copy if self._is_pinned else self._copy_through_slots
                last = copy(here, there, start, stop)
                self._queued_bytes += last - start
                if last < stop:
                    self._ready[stop] = last
                    break
        if self._queued_bytes > before and self._is_pinned:
            self._mark = self._stream.record()

    def _begin(self) -> bool:
        """Sees to it that copies come after the caller's stream. Returns whether they may be queued."""
        if self._begun or self._begins is None:
            return self._begun
        if self._begins.done:
            self._begun = True
        elif self._is_prompt or self._is_pinned:
            if not self._is_prompt:
                self._own_stream = self._stream = self._ring.lend_stream()
            self._stream.wait(self._begins)
            self._begun = True
        return self._begun

    def _copy(self, here: Array, there: DeviceArray, start: int, stop: int) -> int:
        """Queues a part that is in pinned memory. Returns its end."""
        for first in range(start, stop, self._ring.slot_bytes):
            last = min(first + self._ring.slot_bytes, stop)
            self.device.upload(there[first:last], here[first:last], self._stream)
        return stop

    def _copy_through_slots(self, here: Array, there: DeviceArray, start: int, stop: int) -> int:
        """As `_copy`, through slots. Returns the end of what there were slots for."""
        ring = self._ring
        while start < stop and (slot := ring.take()) is not None:
            size_bytes = min(stop - start, ring.slot_bytes)
            try:
                slot[:size_bytes] = here[start : start + size_bytes]
                self.device.upload(there[start : start + size_bytes], slot[:size_bytes], self._stream)
            finally:  # also where it is interrupted
                self._mark = self._stream.record()
                ring.give_back(slot, self._mark)
            start += size_bytes
        return start

    def make_stream_wait(self) -> None:
        """Makes the calling thread's current stream wait for what is queued."""
        if self._mark is not None:
            self.device.current().wait(self._mark)

    def hold_caller(self) -> None:
        """Makes the caller's stream wait for what is queued, where the operation has failed: what the caller then writes to the
        target must come later."""
        with suppress(BackendUnavailableError):  # a GPU that has failed writes nothing any more
            if self._mark is not None and not self.device.is_captured(self._caller):
                self._caller.wait(self._mark)

    def finish(self) -> None:
        """Ends the copy, complete or not. What the GPU may still use is kept until it is past what is queued."""
        with suppress(BackendUnavailableError):  # a GPU that has failed uses no memory any more
            self._keep()
        self._allowed.clear()
        self._ready.clear()
        self.target = self._data = None

    def _keep(self) -> None:
        if not self._begun:
            return
        if self._mark is None or not self.is_complete:
            self._mark = self._stream.record()  # also behind what an interruption has left without a mark
        # Memory of a destroyed stream is reused in no order, so the caller's is kept as well.
        self._ring.keep((self._caller, self.target, self._data if self._is_pinned else None), self._mark)
        if self._own_stream is not None:
            self._ring.take_back_stream(self._own_stream, self._mark)
            self._own_stream = None


class Staging:
    """Both directions of one device.

    Args:
        device: the GPU.
        slot_bytes, slots: of the ring of each direction.
        pool_bytes: the most that may be pinned besides.
    """

    def __init__(
        self,
        device: Device,
        slot_bytes: int = SLOT_BYTES,
        slots: int = SLOTS,
        pool_bytes: int = POOL_BYTES,
    ) -> None:
        self.device = device
        self.kernels = device.new_stream()
        """The stream of kernels that compute what is downloaded, or use what was uploaded."""
        self.downloads = Ring(device, slot_bytes, slots)
        self.uploads = Ring(device, slot_bytes, slots)
        self.pool = Pool(device, pool_bytes)

    def host_memory(self, shape: Sequence[int], storage: np.dtype[Any]) -> Array:
        """A new array on the host, in pinned memory while some is free. Callers must not keep it long."""
        self.let_go()
        found = self.pool.lend(shape, storage)
        return np.empty(shape, storage) if found is None else found

    def start_download(self, source: DeviceArray) -> Download:
        """Begins to copy a C-contiguous device array to the host, into memory that `host_memory` allocates."""
        data = self.host_memory(source.shape, source.dtype)
        return Download(self.device, self.downloads, source, data, self.pool.holds(data))

    def start_upload(self, target: DeviceArray | None = None, is_prompt: bool = False) -> Upload:
        """Begins to copy a result to the device; to `target` where its shape and dtype fit. `is_prompt` as for `Upload`."""
        return Upload(self.device, self.uploads, self.pool, target, is_prompt)

    @contextmanager
    def landing_context(self) -> Iterator[None]:
        """A context for any thread, in which the current stream is one in which nothing is left, whatever is being captured."""
        with self.device.beside_captures():
            stream = self.uploads.lend_stream()
            try:
                with self.device.on(stream):
                    yield
            finally:
                self.uploads.take_back_stream(stream, stream.record())

    def let_go(self) -> None:
        """Drops what was kept for the GPU and is not needed any more."""
        self.downloads.let_go()
        self.uploads.let_go()

    def keep(self, things: object) -> None:
        """Keeps arrays alive until the GPU is past what the calling thread's current stream holds now. They may have been
        allocated in other streams, which could reuse their memory sooner."""
        self.let_go()
        self.uploads.keep(things, self.device.current().record())

    def to_host(self, source: DeviceArray, guard: Guard | None = None) -> Array:
        """A copy of a C-contiguous device array on the host, in storage dtype. Blocks until it is complete.

        Args:
            guard: limits the wait; None where no group waits with it, for COPY_SECONDS.

        Raises:
            CollectiveTimeoutError: it was not complete in time.
            FerroError: the cause for which the guard's generation has ended.
        """
        self.let_go()
        download = Download(self.device, self.downloads, source, np.empty(source.shape, source.dtype))
        return self._downloaded(download, guard)

    def to_pinned(self, source: DeviceArray, guard: Guard) -> Array:
        """As `to_host`, in memory that `host_memory` allocates, and for an operation with this guard.

        Raises:
            CollectiveTimeoutError: it was not complete by the operation's deadline.
            FerroError: the generation's first cause.
        """
        return self._downloaded(self.start_download(source), guard)

    def _downloaded(self, download: Download, guard: Guard | None) -> Array:
        try:
            _complete(download, guard)
        finally:
            download.finish()
        return download.data

    def to_device(self, source: Array, guard: Guard | None = None) -> DeviceArray:
        """A copy of a C-contiguous host array on the device, for which the caller's current stream waits.

        `source` may change when it returns. The host does not wait for the GPU while pinned memory is free. `guard` and errors
        as for `to_host`.
        """
        target = self.device.empty(source.shape, source.dtype, self.device.current())
        self.write(target, source, guard)
        return target

    def write(self, target: DeviceArray, source: Array, guard: Guard | None = None) -> None:
        """target[:] = source, for a host array of equal size, as `to_device`."""
        if not source.nbytes:
            return
        self.let_go()
        copy = self.pool.lend(source.shape, source.dtype)
        if copy is None:
            self._uploaded(Upload(self.device, self.uploads, None, target), source, guard)
            return
        copy[...] = source
        stream = self.device.current()
        try:
            self.device.upload(target, copy, stream)
        finally:  # also where it is interrupted
            self.uploads.keep((target, copy), stream.record())

    def _uploaded(self, upload: Upload, source: Array, guard: Guard | None) -> None:
        upload.allow(source, 0, source.nbytes)
        try:
            _complete(upload, guard)
            upload.make_stream_wait()
        finally:
            upload.finish()


def _complete(copy: Download | Upload, guard: Guard | None) -> None:
    """Advances a copy until it is complete. `guard` and errors as for `Staging.to_host`."""
    limits = Guard(SYSTEM_CLOCK, Latch(), COPY_SECONDS) if guard is None else guard

    def is_complete() -> bool:
        limits.latch.check()
        copy.advance()
        return copy.is_complete

    until_true(is_complete, limits.clock, max(limits.deadline - limits.clock.now(), 0.0))


def wait_for(event: Event, clock: Clock, seconds: float) -> None:
    """Returns once the GPU has reached an event. Raises as `until_true`."""
    until_true(lambda: event.done, clock, seconds)


def wait_within(event: Event, guard: Guard) -> None:
    """Returns once the GPU has reached an event. Raises as `Staging.to_host`."""

    def is_reached() -> bool:
        if not event.done:
            guard.latch.check()
            return False
        return True

    until_true(is_reached, guard.clock, max(guard.deadline - guard.clock.now(), 0.0))


def until_true(is_reached: Callable[[], bool], clock: Clock, seconds: float) -> None:
    """Returns once a query of the GPU is true.

    Raises:
        CollectiveTimeoutError: it was not within `seconds`.
    """
    for _ in range(SPINS):
        if is_reached():
            return
    parker, until = clock.parker(), clock.now() + seconds
    while not is_reached():
        now = clock.now()
        if now >= until:
            message = f"the GPU did not come to the end of a copy within {seconds:.3g} s"
            raise CollectiveTimeoutError([], message, hint="look at what the caller's stream holds")
        parker.park(min(until, now + NAP_SECONDS))


def _flat_bytes(array: DeviceArray) -> DeviceArray:
    return array.reshape(-1).view(np.uint8)
