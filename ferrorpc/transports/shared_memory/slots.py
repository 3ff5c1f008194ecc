"""The slots in this rank's segment for frames to one host peer. Each slot is large enough for any frame.

A slot is taken for one frame (a *parcel*) and released when the peer's receipt arrives. The slot that was released last is
taken first, because it is still in the processor's cache. So a lane with few frames in flight touches few pages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from ferrorpc.errors import CodecError
from ferrorpc.transports.credit import CHUNK_BYTES
from ferrorpc.transports.shared_memory.segment import Bytes, Segment
from ferrorpc.wire.frames import SIGNATURE_BYTES_MAX

SLOT_BYTES: Final = CHUNK_BYTES + 2 * SIGNATURE_BYTES_MAX
"""Size of a chunk and of the longest header."""
SLOTS_MAX: Final = 8
SLOTS_MIN: Final = 2
PARCEL_SHARE: Final = 4
"""All slots together take at most one part in PARCEL_SHARE of the segment, but every peer has SLOTS_MIN."""


class Slot(NamedTuple):
    """Memory for one frame."""

    offset: int
    """Where it begins in the segment."""
    array: Bytes
    """Its bytes, shape (SLOT_BYTES,)."""


class Slots:
    """The slots for one host peer. They are allocated when the first one is taken.

    Args:
        segment: this rank's own.
        peers: how many host peers have slots in it.
    """

    def __init__(self, segment: Segment, peers: int) -> None:
        self._segment = segment
        self._count = min(max(segment.size_bytes // PARCEL_SHARE // (peers * SLOT_BYTES), SLOTS_MIN), SLOTS_MAX)
        self._lock = threading.Lock()
        self._free: list[Slot] | None = None
        self._taken: dict[int, Slot] = {}
        self._waiting: list[Callable[[], None]] = []
        self._over = False

    def take(self, room: Callable[[], None]) -> Slot | None:
        """A free slot. None where there is none; then `room` is called once when it is worth another try.

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
        """Frees a slot. Wakes waiting senders once half of the slots are free, so that each wake is good for several frames.

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
        """No more receipts will arrive: wakes waiting senders. The memory is not freed, because the peer may still read it."""
        with self._lock:
            self._over = True
            self._free = []
            self._taken.clear()
            woken, self._waiting = self._waiting, []
        for room in woken:
            room()

    def _allocate(self) -> list[Slot]:
        block = self._segment.allocate(self._count * SLOT_BYTES)
        places = range(0, block.array.size, SLOT_BYTES)
        return [Slot(block.offset + place, block.array[place : place + SLOT_BYTES]) for place in reversed(places)]
