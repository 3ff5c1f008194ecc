"""GPU arrays to host memory and back, so that the host can begin with an array's first bytes while the last are on their way.

Idea. A GPU copies to and from ordinary memory through small buffers of the driver, while the host waits; pinned memory it
reads and writes itself. So an array's place on the host is pinned memory, as long as there is some (pinned.py): the GPU fills
it piece by piece, and takes results from it, and nothing is copied on the host. What lies in ordinary memory goes through a few
pinned slots: while the host moves one piece between a slot and the array's place, the GPU moves the next ones. Nothing here
blocks: a `Descent` or an `Ascent` does what can be done at once whenever it is looked at, and says how far it is, so that
whoever needs the array can begin with its first piece and give back results whose last piece is not there yet. `Staging.down`
and `up` look until all of it is through.

Streams. All copies of a direction go through one stream. A copy to the host is queued once the caller's stream has come to
where it was when the copy was asked for: so that stream never waits for anything but copies, and what is abandoned is over
soon. Copies to the device are queued at once, behind the caller's stream, which goes on after them.

Life. A descent keeps its array until the GPU has read it. The memory of an ascent belongs to the caller's stream, which waits
for the copies before it may give that memory to anyone else. Pinned memory is lent again once the GPU is past it.

Cost: on the host a few tens of microseconds for every SLOT_BYTES, and for arrays in ordinary memory a copy, of which all but
the first and the last piece overlap the GPU's. Pinned on every device: at most POOL_BYTES, and SLOTS slots of SLOT_BYTES a
direction, whoever uses them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ferrorpc.arrays.device import Device, DeviceArray, Event
from ferrorpc.arrays.pinned import Pool, Ring
from ferrorpc.errors import CollectiveTimeoutError
from ferrorpc.guard import SYSTEM_CLOCK, Clock

POOL_BYTES: Final = 256 << 20
SLOT_BYTES: Final = 4 << 20
SLOTS: Final = 4
COPY_SECONDS: Final = 60.0
"""How long a copy may take, what the caller's stream holds before it included, until it is given up."""
ABANDON_SECONDS: Final = 0.2
"""How long the host waits for what the GPU still reads of an array that nobody wants any more: a few pieces at most."""
NAP_SECONDS: Final = 50e-6
LOOKS: Final = 100
"""How often it is looked before the thread sleeps between looks."""

Array = np.ndarray[Any, Any]


class _Piece(NamedTuple):
    """Bytes [start, stop) of an array, which the GPU has brought once it has come past the mark: into a slot, or into their
    place where that is None."""

    slot: Array | None
    start: int
    stop: int
    mark: Event


class Descent:
    """A device array on its way to host memory, from its first byte to its last, in storage dtype.

    Args:
        source: C-contiguous.
        data: its place on the host.
        is_pinned: whether the GPU writes there itself.

    Attributes:
        data: its place there; the first `here` bytes of it hold.
    """

    def __init__(
        self, device: Device, ring: Ring, clock: Clock, source: DeviceArray, data: Array, is_pinned: bool = False
    ) -> None:
        self.data = data
        self.here = 0
        self.device = device
        self._ring = ring
        self._clock = clock
        self._source: DeviceArray | None = source
        self._is_pinned = is_pinned
        self._place = data.reshape(-1).view(np.uint8)
        self._begins = device.current().record()
        self._begun = False
        self._queued = 0
        self._flying: deque[_Piece] = deque()

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
            if slot is not None:
                self._place[start:stop] = slot[: stop - start]
                self._ring.give_back(slot)
            self.here = stop
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
            elif len(self._flying) == ring.slots:
                return  # so that other arrays come between, and what is abandoned is over soon
            target = self._place[start:stop] if slot is None else slot[: stop - start]
            self.device.download(target, _flat_bytes(self._source)[start:stop], ring.stream)
            self._flying.append(_Piece(slot, start, stop, ring.stream.record()))
            self._queued = stop

    def finish(self) -> None:
        """Nobody wants it any more: frees what it holds, once the GPU is past it."""
        until = self._clock.now() + ABANDON_SECONDS
        while self._flying:
            slot, _, _, mark = self._flying.popleft()
            try:
                wait_for(mark, self._clock, max(0.0, until - self._clock.now()))
                mark_left = None
            except CollectiveTimeoutError:
                mark_left = mark
                self._ring.keep((self._source, self.data), mark)
            if slot is not None:
                self._ring.give_back(slot, mark_left)
        self._source = None


class Ascent:
    """A host array on its way to a device, in whatever order its parts are ready.

    Made on the caller's thread, in whose stream's order its memory is. Parts that follow each other go together: a copy of
    SLOT_BYTES takes the GPU no longer than it takes the host to ask for one.

    Args:
        pool: where the array may lie pinned, and stays as it is until the GPU is past it; None where it may change before.
        target: where it is to go, C-contiguous; None for a new array.
    """

    def __init__(self, device: Device, ring: Ring, pool: Pool | None, target: DeviceArray | None = None) -> None:
        self.target = target
        self.device = device
        self._ring = ring
        self._pool = pool
        self._caller = device.current()
        self._begins: Event | None = None if target is None else self._caller.record()
        self._data: Array | None = None
        self._is_opened = False
        self._is_pinned = False
        self._begun = False
        self._allowed: deque[tuple[int, int]] = deque()
        self._ready: dict[int, int] = {}
        """Where parts that are ready end -> where they begin."""
        self._ready_bytes = 0
        """How much was ever ready."""
        self._queued_bytes = 0
        self._mark: Event | None = None

    def allow(self, data: Array, start: int, stop: int) -> None:
        """Bytes [start, stop) of what goes there are as they shall be, and stay so. From any thread.

        Args:
            data: the whole of it, C-contiguous, in storage dtype; the same array each time.
        """
        self._data = data
        self._allowed.append((start, stop))

    @property
    def is_complete(self) -> bool:
        """Whether all of it is queued."""
        return self._is_opened and self._data is not None and self._queued_bytes == self._data.nbytes

    def advance(self) -> bool:
        """Queues what is ready, as far as there are slots. Whether it should soon be looked at again: slots come free."""
        before, data = self._queued_bytes, self._data
        if data is None or not (self._allowed or self._ready):
            return False
        if not self._is_opened:
            self._open(data)
        while self._allowed:
            self._note(*self._allowed.popleft())
        self._queue(data.reshape(-1).view(np.uint8), _flat_bytes(self.target))
        return self._queued_bytes > before and not self._is_pinned

    def _open(self, data: Array) -> None:
        self._is_opened = True
        self._is_pinned = self._pool is not None and self._pool.holds(data)
        if self.target is None or self.target.shape != data.shape or self.target.dtype != data.dtype:
            self.target = self.device.empty(data.shape, data.dtype, self._caller)
            # What the caller's stream holds by now may still use that memory.
            self._begins = self._caller.record()

    def _note(self, start: int, stop: int) -> None:
        if start < stop:
            self._ready_bytes += stop - start
            self._ready[stop] = self._ready.pop(start, start)

    def _queue(self, here: Array, there: DeviceArray) -> None:
        least_bytes = 1 if self._ready_bytes == here.size else self._ring.slot_bytes
        before = self._queued_bytes
        for stop, start in list(self._ready.items()):
            if stop - start >= least_bytes:
                del self._ready[stop]
                last = self._copy(here, there, start, stop) if self._is_pinned else self._carry(here, there, start, stop)
                self._queued_bytes += last - start
                if last < stop:
                    self._ready[stop] = last
                    break
        if self._queued_bytes > before:
            if self._is_pinned:
                self._mark = self._ring.stream.record()
            if self.is_complete and self._mark is not None:
                self._caller.wait(self._mark)

    def _begin(self) -> None:
        if not self._begun and self._begins is not None:
            self._begun = True
            self._ring.stream.wait(self._begins)

    def _copy(self, here: Array, there: DeviceArray, start: int, stop: int) -> int:
        """Queues a part that is in pinned memory; up to where."""
        self._begin()
        for first in range(start, stop, self._ring.slot_bytes):
            last = min(first + self._ring.slot_bytes, stop)
            self.device.upload(there[first:last], here[first:last], self._ring.stream)
        return stop

    def _carry(self, here: Array, there: DeviceArray, start: int, stop: int) -> int:
        """As `_copy`, through slots, as far as there are any."""
        ring = self._ring
        while start < stop and (slot := ring.take()) is not None:
            self._begin()
            size_bytes = min(stop - start, ring.slot_bytes)
            slot[:size_bytes] = here[start : start + size_bytes]
            self.device.upload(there[start : start + size_bytes], slot[:size_bytes], ring.stream)
            self._mark = ring.stream.record()
            ring.give_back(slot, self._mark)
            start += size_bytes
        return start

    def arrive(self) -> None:
        """The calling thread's current stream goes on after what is queued."""
        if self._mark is not None:
            self.device.current().wait(self._mark)

    def finish(self) -> None:
        """Nobody wants it any more. The caller's stream gives its memory away only after what is queued."""
        if self._mark is not None:
            if not self.is_complete:
                self._caller.wait(self._mark)
            if self._is_pinned:
                self._ring.keep(self._data, self._mark)
        self._allowed.clear()
        self._ready.clear()
        self.target = self._data = None


class Staging:
    """Both directions of one device.

    Args:
        device: the GPU.
        clock: what waits go through.
        slot_bytes, slots: of the ring of each direction.
        pool_bytes: how much may be pinned besides.
    """

    def __init__(
        self,
        device: Device,
        clock: Clock = SYSTEM_CLOCK,
        slot_bytes: int = SLOT_BYTES,
        slots: int = SLOTS,
        pool_bytes: int = POOL_BYTES,
    ) -> None:
        self.device = device
        self.kernels = device.new_stream()
        """Where kernels run that make what goes down, or take what came up."""
        self._clock = clock
        self.descents = Ring(device, slot_bytes, slots)
        self.ascents = Ring(device, slot_bytes, slots)
        self.pool = Pool(device, pool_bytes)

    def room(self, shape: Sequence[int], storage: np.dtype[Any]) -> Array:
        """A new array on the host for what comes down, or for what is to go up. In pinned memory as long as there is some, so
        not for those who may keep it."""
        self.descents.let_go()
        self.ascents.let_go()
        found = self.pool.lend(shape, storage)
        return np.empty(shape, storage) if found is None else found

    def descent(self, source: DeviceArray) -> Descent:
        """A C-contiguous device array, on its way to the host, in memory as `room` gives it."""
        data = self.room(source.shape, source.dtype)
        return Descent(self.device, self.descents, self._clock, source, data, self.pool.holds(data))

    def ascent(self, target: DeviceArray | None = None) -> Ascent:
        """The way of a result to the device; to `target` where that fits it."""
        return Ascent(self.device, self.ascents, self.pool, target)

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
        return self._through(Descent(self.device, self.descents, self._clock, source, np.empty(source.shape, source.dtype)))

    def lent(self, source: DeviceArray) -> Array:
        """As `down`, in memory as `room` gives it."""
        return self._through(self.descent(source))

    def _through(self, descent: Descent) -> Array:
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
        return self._raised(Ascent(self.device, self.ascents, None), source)

    def write(self, target: DeviceArray, source: Array) -> None:
        """target[:] = source, a small host array of as many bytes. As `up`, but the host does not wait for the GPU as long as
        there is pinned memory."""
        copy = self.room(source.shape, source.dtype)
        copy[...] = source
        self._raised(self.ascent(target), copy)

    def _raised(self, ascent: Ascent, source: Array) -> DeviceArray:
        ascent.allow(source, 0, source.nbytes)

        def through() -> bool:
            ascent.advance()
            return ascent.is_complete

        try:
            until_true(through, self._clock, COPY_SECONDS)
            return ascent.target
        finally:
            ascent.finish()


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
