"""GPU arrays to host memory and back, through a bounded ring of pinned slots.

Idea. A GPU copies to and from ordinary memory through small buffers of the driver, while the host waits; pinned memory it
reads and writes itself. So an array goes chunk by chunk through a few pinned slots: while the host moves one chunk between a
slot and the array's place, the GPU moves the next ones. Nothing here blocks: a `Descent` or an `Ascent` does what can be done
at once whenever it is looked at, and says how far it is, so that whoever needs the array can begin with its first chunk and
give back results whose last chunk is not there yet. `Staging.down` and `up` look until all of it is through.

Streams. All copies of a direction go through one stream. A copy to the host is queued once the caller's stream has come to
where it was when the copy was asked for: so that stream never waits for anything but copies, and what is abandoned is over
soon. Copies to the device are queued at once, behind the caller's stream, which goes on after them.

Life. A descent keeps its array until the GPU has read it. The memory of an ascent belongs to the caller's stream, which waits
for the copies before it may give that memory to anyone else.

Cost: one copy on the host, of which all but the first and the last chunk overlap the GPU's; SLOTS pinned slots of SLOT_BYTES a
direction and device, whoever uses them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from ferrorpc.arrays.device import Device, DeviceArray, Event
from ferrorpc.errors import CollectiveTimeoutError
from ferrorpc.guard import SYSTEM_CLOCK, Clock

SLOT_BYTES: Final = 4 << 20
SLOTS: Final = 4
COPY_SECONDS: Final = 60.0
"""How long a copy may take, what the caller's stream holds before it included, until it is given up."""
ABANDON_SECONDS: Final = 0.2
"""How long the host waits for what the GPU still reads of an array that nobody wants any more: a few chunks at most."""
NAP_SECONDS: Final = 50e-6
LOOKS: Final = 100
"""How often it is looked before the thread sleeps between looks."""

Array = np.ndarray[Any, Any]


class Ring:
    """The slots of one direction. Copies take them as they come free, several of them at a time if need be."""

    def __init__(self, device: Device, slot_bytes: int, slots: int) -> None:
        self.stream = device.new_stream()
        self.slot_bytes = slot_bytes
        self.slots = slots
        self._device = device
        self._lock = threading.Lock()
        self._made = 0
        self._free: deque[tuple[Array, Event | None]] = deque()
        self._abandoned: deque[tuple[Event, Any]] = deque()

    def take(self) -> Array | None:
        """A slot that nobody needs, as uint8; None while there is none. Memory is pinned when first needed."""
        with self._lock:
            while self._abandoned and self._abandoned[0][0].done:
                self._abandoned.popleft()
            if self._free and (self._free[0][1] is None or self._free[0][1].done):
                return self._free.popleft()[0]
            if self._made == self.slots:
                return None
            self._made += 1
            return self._device.pinned(self.slot_bytes)

    def give_back(self, slot: Array, mark: Event | None = None) -> None:
        """The slot is free once the GPU has come past the mark, which is in this ring's stream."""
        with self._lock:
            if mark is None:
                self._free.appendleft((slot, None))
            else:
                self._free.append((slot, mark))

    def keep(self, array: Any, mark: Event) -> None:
        """The GPU needs something that nobody else has any more, until it has come past the mark: an array, its own or pinned,
        or a stream. For finalizers, too, which may run within any of these methods: no lock is taken."""
        self._abandoned.append((mark, array))

    @property
    def taken(self) -> int:
        """How many slots somebody has."""
        return self._made - len(self._free)


class _Chunk(NamedTuple):
    """A chunk that the GPU is to bring: bytes [start, stop) are in the slot once it has come past the mark."""

    slot: Array
    start: int
    stop: int
    mark: Event


class Descent:
    """A device array on its way to host memory, from its first byte to its last, in storage dtype.

    Args:
        source: C-contiguous.

    Attributes:
        data: its place there; the first `here` bytes of it hold.
    """

    def __init__(self, device: Device, ring: Ring, clock: Clock, source: DeviceArray) -> None:
        self.data: Array = np.empty(source.shape, source.dtype)
        self.here = 0
        self.device = device
        self._ring = ring
        self._clock = clock
        self._source: DeviceArray | None = source
        self._place = self.data.reshape(-1).view(np.uint8)
        self._begins = device.current().record()
        self._begun = False
        self._queued = 0
        self._flying: deque[_Chunk] = deque()

    @property
    def is_complete(self) -> bool:
        """Whether all of it is here."""
        return self.here == self._place.size

    def advance(self) -> bool:
        """Does what can be done at once; whether more of it is here."""
        before = self.here
        if not self.is_complete:
            self._land()
            self._queue()
        return self.here > before

    def _land(self) -> None:
        while self._flying and self._flying[0].mark.done:
            slot, start, stop, _ = self._flying.popleft()
            self._place[start:stop] = slot[: stop - start]
            self._ring.give_back(slot)
            self.here = stop
        if self.is_complete:
            self._source = None

    def _queue(self) -> None:
        self._begun = self._begun or self._begins.done
        size, ring = self._place.size, self._ring
        while self._begun and self._source is not None and self._queued < size:
            slot = ring.take()
            if slot is None:
                return
            start, stop = self._queued, min(self._queued + ring.slot_bytes, size)
            self.device.download(slot[: stop - start], _flat_bytes(self._source)[start:stop], ring.stream)
            self._flying.append(_Chunk(slot, start, stop, ring.stream.record()))
            self._queued = stop

    def finish(self) -> None:
        """Nobody wants it any more: frees what it holds, once the GPU is past it."""
        until = self._clock.now() + ABANDON_SECONDS
        while self._flying:
            slot, _, _, mark = self._flying.popleft()
            try:
                wait_for(mark, self._clock, max(0.0, until - self._clock.now()))
                self._ring.give_back(slot)
            except CollectiveTimeoutError:
                self._ring.give_back(slot, mark)
                self._ring.keep(self._source, mark)
        self._source = None


class Ascent:
    """A host array on its way to a device, in whatever order its parts are ready.

    Made on the caller's thread, in whose stream's order its memory is.

    Args:
        target: where it is to go, C-contiguous; None for a new array.
    """

    def __init__(self, device: Device, ring: Ring, target: DeviceArray | None = None) -> None:
        self.target = target
        self.device = device
        self._ring = ring
        self._caller = device.current()
        self._begins = self._caller.record()
        self._data: Array | None = None
        self._opened = False
        self._begun = False
        self._ready: deque[tuple[int, int]] = deque()
        self._queued = 0
        self._mark: Event | None = None

    def allow(self, data: Array, start: int, stop: int) -> None:
        """Bytes [start, stop) of what goes there are as they shall be. From any thread.

        Args:
            data: the whole of it, C-contiguous, in storage dtype; the same array each time.
        """
        self._data = data
        self._ready.append((start, stop))

    @property
    def is_complete(self) -> bool:
        """Whether all of it is queued, so that the data may change."""
        return self._opened and self._data is not None and self._queued == self._data.nbytes

    def advance(self) -> bool:
        """Queues what is ready, as far as there are slots; whether that was anything."""
        before, data = self._queued, self._data
        if data is not None and self._ready:
            if not self._opened:
                self._open(data)
            self._queue(data.reshape(-1).view(np.uint8), _flat_bytes(self.target))
        return self._queued > before

    def _open(self, data: Array) -> None:
        self._opened = True
        if self.target is None or self.target.shape != data.shape or self.target.dtype != data.dtype:
            self.target = self.device.empty(data.shape, data.dtype, self._caller)
            # What the caller's stream holds by now may still use that memory.
            self._begins = self._caller.record()

    def _queue(self, here: Array, there: DeviceArray) -> None:
        ring = self._ring
        while self._ready and self._ready[0][0] == self._ready[0][1]:
            self._ready.popleft()
        while self._ready and (slot := ring.take()) is not None:
            if not self._begun:
                self._begun = True
                ring.stream.wait(self._begins)
            start, stop = self._next(ring.slot_bytes)
            slot[: stop - start] = here[start:stop]
            self.device.upload(there[start:stop], slot[: stop - start], ring.stream)
            self._mark = ring.stream.record()
            ring.give_back(slot, self._mark)
            self._queued += stop - start
        if self.is_complete and self._mark is not None:
            self._caller.wait(self._mark)

    def _next(self, most: int) -> tuple[int, int]:
        """The next bytes to go; parts that follow each other go together."""
        start, stop = self._ready.popleft()
        while self._ready and stop - start < most and self._ready[0][0] == stop:
            stop = self._ready.popleft()[1]
        if stop - start > most:
            self._ready.appendleft((start + most, stop))
            stop = start + most
        return start, stop

    def arrive(self) -> None:
        """The calling thread's current stream goes on after what is queued."""
        if self._mark is not None:
            self.device.current().wait(self._mark)

    def finish(self) -> None:
        """Nobody wants it any more. The caller's stream gives its memory away only after what is queued."""
        if self._mark is not None and not self.is_complete:
            self._caller.wait(self._mark)
        self._ready.clear()
        self.target = self._data = None


class Staging:
    """Both directions of one device.

    Args:
        device: the GPU.
        clock: what waits go through.
        slot_bytes, slots: of the ring of each direction.
    """

    def __init__(self, device: Device, clock: Clock = SYSTEM_CLOCK, slot_bytes: int = SLOT_BYTES, slots: int = SLOTS) -> None:
        self.device = device
        self.kernels = device.new_stream()
        """Where kernels run that make what goes down, or take what came up."""
        self._clock = clock
        self.descents = Ring(device, slot_bytes, slots)
        self.ascents = Ring(device, slot_bytes, slots)

    def descent(self, source: DeviceArray) -> Descent:
        """A C-contiguous device array, on its way to the host."""
        return Descent(self.device, self.descents, self._clock, source)

    def ascent(self, target: DeviceArray | None = None) -> Ascent:
        """The way of a result to the device; to `target` where that fits it."""
        return Ascent(self.device, self.ascents, target)

    def settle(self, clock: Clock, until: float) -> None:
        """Waits until the GPU has done what the calling thread's current stream holds, or clock time `until`.

        Raises:
            CollectiveTimeoutError: it has not, or not within COPY_SECONDS.
        """
        wait_for(self.device.current().record(), clock, min(until - clock.now(), COPY_SECONDS))

    def down(self, source: DeviceArray) -> Array:
        """A copy of a C-contiguous device array on the host, in storage dtype. Complete when it returns.

        Raises:
            CollectiveTimeoutError: the GPU did not come to it within COPY_SECONDS.
        """
        descent = self.descent(source)

        def through() -> bool:
            descent.advance()
            return descent.is_complete

        try:
            until_true(through, self._clock, COPY_SECONDS)
        finally:
            descent.finish()
        return descent.data

    def up(self, source: Array) -> DeviceArray:
        """A copy of a C-contiguous host array on the device; the caller's current stream goes on after it.

        When it returns `source` may change. Raises as `down`.
        """
        ascent = self.ascent()
        ascent.allow(source, 0, source.nbytes)

        def through() -> bool:
            ascent.advance()
            return ascent.is_complete

        until_true(through, self._clock, COPY_SECONDS)
        ascent.arrive()
        return ascent.target


def wait_for(event: Event, clock: Clock, seconds: float) -> None:
    """Returns once the GPU has come past an event. Raises as `until_true`."""
    until_true(lambda: event.done, clock, seconds)


def until_true(look: Callable[[], bool], clock: Clock, seconds: float) -> None:
    """Returns once a look at the GPU is true.

    Raises:
        CollectiveTimeoutError: it was not within `seconds`.
    """
    for _ in range(LOOKS):
        if look():
            return
    parker, until = clock.parker(), clock.now() + seconds
    while not look():
        now = clock.now()
        if now >= until:
            message = f"the GPU did not come to the end of a copy within {seconds:g} s"
            raise CollectiveTimeoutError([], message, hint="look at what the caller's stream holds")
        parker.park(min(until, now + NAP_SECONDS))


def _flat_bytes(array: DeviceArray) -> DeviceArray:
    return array.reshape(-1).view(np.uint8)
