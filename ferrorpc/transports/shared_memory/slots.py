"""Where this rank puts parcels for one host_peer: a few slots in its own segment, each large enough for any frame.

A slot is taken for one frame and given back when the host_peer's receipt has come. What was given back last is taken first,
because the processor's cache still knows it; so a lane that never has much under way touches few pages.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from ferrorpc.errors import CodecError
from ferrorpc.transports.credit import CHUNK_BYTES
from ferrorpc.transports.shared_memory.segment import Bytes, Segment
from ferrorpc.wire.frames import SIGNATURE_BYTES_MAX

SLOT_BYTES: Final = CHUNK_BYTES + 2 * SIGNATURE_BYTES_MAX
"""A chunk, and the longest header that any frame has."""
SLOTS_MAX: Final = 8
SLOTS_MIN: Final = 2
PARCEL_SHARE: Final = 4
"""At most this part of the segment is for parcels, as long as every host_peer has SLOTS_MIN."""


class Slot(NamedTuple):
    """One place."""

    offset: int
    """In the segment."""
    array: Bytes
    """Its bytes, shape (SLOT_BYTES,)."""


class Slots:
    """The slots for one host_peer. Nothing is allocated before the first is taken.

    Args:
        segment: this rank's.
        host_peers: how many have such slots in it.
    """

    def __init__(self, segment: Segment, host_peers: int) -> None:
        self._segment = segment
        self._count = min(max(segment.size_bytes // PARCEL_SHARE // (host_peers * SLOT_BYTES), SLOTS_MIN), SLOTS_MAX)
        self._lock = threading.Lock()
        self._free: list[Slot] | None = None
        self._taken: dict[int, Slot] = {}
        self._waiting: list[Callable[[], None]] = []
        self._over = False

    def take(self, room: Callable[[], None]) -> Slot | None:
        """A free slot; None where there is none, and then `room` is called once when it makes sense to try again.

        Raises:
            LimitExceededError: the segment is full.
        """
        with self._lock:
            if self._free is None:
                self._free = self._allocate()
            if not self._free:
                if room not in self._waiting and not self._over:
                    self._waiting.append(room)
                return None
            slot = self._free.pop()
            self._taken[slot.offset] = slot
            return slot

    def release(self, offset: int) -> None:
        """The host_peer needs this slot no more. Wakes the waiting at half of all, so that each wake is worth several frames.

        Raises:
            CodecError: no such slot is taken.
        """
        woken: list[Callable[[], None]] = []
        with self._lock:
            if self._over:
                return
            slot = self._taken.pop(offset, None)
            if slot is None or self._free is None:
                raise CodecError(f"a receipt for a parcel at {offset}, where none is under way")
            self._free.append(slot)
            if len(self._free) * 2 >= self._count:
                woken, self._waiting = self._waiting, []
        for room in woken:
            room()

    def end(self) -> None:
        """No receipt comes any more: wakes who waits for one, and forgets the memory, which others may still read."""
        with self._lock:
            self._over = True
            self._free = []
            self._taken.clear()
            woken, self._waiting = self._waiting, []
        for room in woken:
            room()

    def _allocate(self) -> list[Slot]:
        block = self._segment.allocate(self._count * SLOT_BYTES, mmap.PAGESIZE)
        places = range(0, block.nbytes, SLOT_BYTES)
        return [Slot(block.offset + place, block.array[place : place + SLOT_BYTES]) for place in reversed(places)]
