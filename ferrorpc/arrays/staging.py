"""GPU arrays to host memory and back, through a bounded ring of pinned slots.

Idea. A GPU copies to and from ordinary memory through small buffers of the driver, while the host waits; pinned memory it
reads and writes itself. So an array goes chunk by chunk through a few pinned slots: while the host moves one chunk between a
slot and the array's place, the GPU moves the next ones. A slot is used again only once the GPU has come past the copy that
used it last. All copies go through one stream a direction, which begins after what the caller's stream holds by then, and
the caller's stream goes on after it; the host waits for nothing else of the caller's.

Cost: one copy on the host, of which all but the first and the last chunk overlap the GPU's; SLOTS pinned slots of SLOT_BYTES a
direction and device.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy as np

from ferrorpc.arrays.device import Device, DeviceArray, Event
from ferrorpc.errors import CollectiveTimeoutError
from ferrorpc.guard import SYSTEM_CLOCK, Clock

SLOT_BYTES: Final = 4 << 20
SLOTS: Final = 4
COPY_SECONDS: Final = 60.0
"""How long a copy may take, what the caller's stream holds before it included, until it is given up."""
NAP_SECONDS: Final = 50e-6
LOOKS: Final = 100
"""How often an event is looked at before the thread sleeps between looks."""

Array = np.ndarray[Any, Any]


class Ring:
    """The slots of one direction. One copy at a time goes through it."""

    def __init__(self, device: Device, clock: Clock, slot_bytes: int, slots: int) -> None:
        self.lock = threading.Lock()
        self.stream = device.new_stream()
        self._device = device
        self._clock = clock
        self._size = slot_bytes
        self._count = slots
        self._slots: list[Array] = []
        self._marks: list[Event | None] = []

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return self._size

    @property
    def slots(self) -> int:
        """How many there are at most."""
        return self._count

    def take(self, number: int) -> Array:
        """Slot `number` modulo their count, as uint8, once the GPU needs it no longer. Memory is pinned when first needed."""
        place = number % self._count
        if place == len(self._slots):
            self._slots.append(self._device.pinned(self._size))
            self._marks.append(None)
        self.wait(number)
        return self._slots[place]

    def mark(self, number: int) -> None:
        """The GPU needs the slot for what is in the stream now."""
        self._marks[number % self._count] = self.stream.record()

    def wait(self, number: int) -> None:
        """Returns once the GPU has come past the slot's mark."""
        mark = self._marks[number % self._count]
        if mark is not None:
            wait_for(mark, self._clock, COPY_SECONDS)
            self._marks[number % self._count] = None


class Staging:
    """Both directions of one device.

    Args:
        device: the GPU.
        clock: what waits go through.
        slot_bytes, slots: of the ring of each direction.
    """

    def __init__(self, device: Device, clock: Clock = SYSTEM_CLOCK, slot_bytes: int = SLOT_BYTES, slots: int = SLOTS) -> None:
        self._device = device
        self._down = Ring(device, clock, slot_bytes, slots)
        self._up = Ring(device, clock, slot_bytes, slots)

    def down(self, source: DeviceArray) -> Array:
        """A copy of a C-contiguous device array on the host, in storage dtype. Complete when it returns.

        Raises:
            CollectiveTimeoutError: the GPU did not come to it within COPY_SECONDS.
        """
        target = np.empty(source.shape, source.dtype)
        there, here = _flat_bytes(source), target.reshape(-1).view(np.uint8)
        ring = self._down
        with ring.lock:
            ring.stream.wait(self._device.current().record())
            spans = _spans(target.nbytes, ring.slot_bytes)
            for number, (start, stop) in enumerate(spans):
                if number >= ring.slots:
                    self._land(ring, here, spans, number - ring.slots)
                slot = ring.take(number)[: stop - start]
                self._device.download(slot, there[start:stop], ring.stream)
                ring.mark(number)
            for number in range(max(0, len(spans) - ring.slots), len(spans)):
                self._land(ring, here, spans, number)
        return target

    def _land(self, ring: Ring, here: Array, spans: list[tuple[int, int]], number: int) -> None:
        start, stop = spans[number]
        here[start:stop] = ring.take(number)[: stop - start]

    def up(self, source: Array) -> DeviceArray:
        """A copy of a C-contiguous host array on the device; the caller's current stream goes on after it.

        When it returns `source` may change. Raises as `down`.
        """
        current = self._device.current()
        target = self._device.empty(source.shape, source.dtype)
        there, here = _flat_bytes(target), source.reshape(-1).view(np.uint8)
        ring = self._up
        with ring.lock:
            # The memory of `target` may still be in use by what the caller's stream holds: it was allocated in its order.
            ring.stream.wait(current.record())
            for number, (start, stop) in enumerate(_spans(source.nbytes, ring.slot_bytes)):
                slot = ring.take(number)[: stop - start]
                slot[:] = here[start:stop]
                self._device.upload(there[start:stop], slot, ring.stream)
                ring.mark(number)
            current.wait(ring.stream.record())
        return target


def wait_for(event: Event, clock: Clock, seconds: float) -> None:
    """Returns once the GPU has come past an event.

    Raises:
        CollectiveTimeoutError: it did not within `seconds`.
    """
    for _ in range(LOOKS):
        if event.done:
            return
    parker, until = clock.parker(), clock.now() + seconds
    while not event.done:
        now = clock.now()
        if now >= until:
            message = f"the GPU did not come to a copy within {seconds:g} s"
            raise CollectiveTimeoutError([], message, hint="look at what the caller's stream holds")
        parker.park(min(until, now + NAP_SECONDS))


def _flat_bytes(array: DeviceArray) -> DeviceArray:
    return array.reshape(-1).view(np.uint8)


def _spans(size_bytes: int, slot_bytes: int) -> list[tuple[int, int]]:
    return [(start, min(start + slot_bytes, size_bytes)) for start in range(0, size_bytes, slot_bytes)]
