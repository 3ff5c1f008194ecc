"""Pinned host memory, which a GPU reads and writes by DMA: lent as arrays, and as slots to copy through.

Idea. An array in pinned memory needs no copy on the host on its way to or from a GPU. But pinning memory costs more than
copying its contents, and unpinning waits for everything that the GPU is doing, which may be waiting for other ranks. So memory
that was pinned once is kept and lent again: a `Pool` divides it as needed. That also saves page faults, of which new memory has
one a page. Where the pool has no room, arrays are in pageable memory and go through the few slots of a `Ring`.

Lifetimes. A loan ends when nobody refers to the array any more. While a GPU still uses it, `Ring.keep` holds a reference, as to
everything else that only the GPU still needs.

Cost: a few microseconds a loan; pinning, once, takes about as long as touching the memory for the first time.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ferrorpc.arrays.device import Device, Stream
from ferrorpc.arrays.event import Event
from ferrorpc.errors import BackendUnavailableError

UNIT_BYTES: Final = 4 << 10
"""Loans begin and end at multiples of this, so that no two of them share a cache line."""
SEGMENT_BYTES_MIN: Final = 4 << 20

Array = np.ndarray[Any, Any]


class _Segment:
    """Memory that was pinned in one call, and the spans of it that are lent, in order."""

    __slots__ = ("address", "lent", "memory")

    def __init__(self, memory: Array) -> None:
        self.memory = memory
        self.address: int = memory.ctypes.data
        self.lent: list[tuple[int, int]] = []

    def find(self, size_bytes: int) -> int | None:
        """Lends so many bytes. Returns their offset; None where there is no room."""
        start = 0
        for place, (first, last) in enumerate((*self.lent, (self.memory.size, self.memory.size))):
            if first - start >= size_bytes:
                self.lent.insert(place, (start, start + size_bytes))
                return start
            start = last
        return None


class _Loan:
    """Lent bytes, to which the NumPy arrays over them refer."""

    __slots__ = ("__array_interface__", "_returned", "_segment", "_span")

    def __init__(self, segment: _Segment, span: tuple[int, int], returned: deque[tuple[_Segment, tuple[int, int]]]) -> None:
        start, stop = span
        place = (segment.address + start, False)
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (stop - start,), "data": place}
        self._segment = segment
        self._span = span
        self._returned = returned

    def __del__(self) -> None:
        # A finalizer may run within any method of the pool, so it takes no lock.
        self._returned.append((self._segment, self._span))


class Pool:
    """Pinned memory that is lent. Thread-safe.

    Args:
        most_bytes: the most that is pinned.
    """

    def __init__(self, device: Device, most_bytes: int) -> None:
        self._device = device
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._segments: tuple[_Segment, ...] = ()
        """The small ones first, so that small arrays leave the large ones free."""
        self._returned: deque[tuple[_Segment, tuple[int, int]]] = deque()

    @property
    def pinned_bytes(self) -> int:
        """How many bytes are pinned."""
        return sum(segment.memory.size for segment in self._segments)

    def holds(self, array: Array) -> bool:
        """Whether an array is on loan from here."""
        address: int = array.ctypes.data
        return any(0 <= address - segment.address < segment.memory.size for segment in self._segments)

    def lend(self, shape: Sequence[int], storage: np.dtype[Any]) -> Array | None:
        """A new array, its contents undefined; None where there is no room, and for an array without elements."""
        size_bytes = math.prod(shape) * storage.itemsize
        if not 0 < size_bytes <= self._most_bytes:
            return None
        room_bytes = -(-size_bytes // UNIT_BYTES) * UNIT_BYTES
        with self._lock:
            self._take_back()
            for segment in (*self._segments, None):
                segment = segment or self._more(room_bytes)
                start = None if segment is None else segment.find(room_bytes)
                if segment is not None and start is not None:
                    loan = _Loan(segment, (start, start + room_bytes), self._returned)
                    return np.asarray(loan)[:size_bytes].view(storage).reshape(shape)
        return None

    def _take_back(self) -> None:
        while self._returned:
            segment, span = self._returned.popleft()
            segment.lent.remove(span)

    def _more(self, size_bytes: int) -> _Segment | None:
        """A new segment for so many bytes. A power of two, since CuPy pins no other sizes."""
        size_bytes = max(SEGMENT_BYTES_MIN, 1 << (size_bytes - 1).bit_length())
        if self.pinned_bytes + size_bytes > self._most_bytes:
            return None
        try:
            found = _Segment(self._device.pinned(size_bytes))
        except BackendUnavailableError:  # the host can pin no more: go on with what there is, as when the bound is reached
            self._most_bytes = self.pinned_bytes
            return None
        self._segments = tuple(sorted((*self._segments, found), key=lambda segment: segment.memory.size))
        return found


class Ring:
    """The slots of one direction. A copy takes them as they come free, several at a time if it needs them."""

    def __init__(self, device: Device, slot_bytes: int, slots: int) -> None:
        self.stream = device.new_stream()
        self.slot_bytes = slot_bytes
        self.slots = slots
        self._device = device
        self._lock = threading.Lock()
        self._made = 0
        self._free: deque[tuple[Array, Event | None]] = deque()
        self._kept: deque[tuple[Event, Any]] = deque()
        self._spare_streams: deque[tuple[Stream, Event]] = deque()

    def take(self) -> Array | None:
        """A free slot, as uint8; None while there is none. Memory is pinned when first needed.

        Raises:
            BackendUnavailableError: the host has no memory for a single one.
        """
        self.let_go()
        with self._lock:
            if self._free and (self._free[0][1] is None or self._free[0][1].done):
                return self._free.popleft()[0]
            if self._made == self.slots:
                return None
            try:
                slot = self._device.pinned(self.slot_bytes)
            except BackendUnavailableError:
                if not self._made:
                    raise
                self.slots = self._made  # go on with these
                return None
            self._made += 1
            return slot

    def give_back(self, slot: Array, event: Event | None = None) -> None:
        """Frees a slot once the GPU has reached the event, which is in this ring's stream; None: at once."""
        with self._lock:
            if event is None:
                self._free.appendleft((slot, None))
            else:
                self._free.append((slot, event))

    def lend_stream(self) -> Stream:
        """A stream in which nothing is left, for copies that may have to wait long."""
        with self._lock:
            for _ in range(len(self._spare_streams)):
                stream, event = self._spare_streams.popleft()
                if event.done:
                    return stream
                self._spare_streams.append((stream, event))
        return self._device.new_stream()

    def take_back_stream(self, stream: Stream, event: Event) -> None:
        """Takes a stream back, whose last copy ends at the event."""
        with self._lock:
            self._spare_streams.append((stream, event))

    def keep(self, array: Any, event: Event) -> None:
        """Keeps an array or a stream alive until the GPU has reached the event. It takes no lock, because finalizers call it,
        which may run within any of these methods."""
        self._kept.append((event, array))

    def let_go(self) -> None:
        """Drops what was kept for events that the GPU has reached. Threads that receive messages call it, too."""
        if not self._kept:
            return
        past = []  # dropped without the lock: finalizers may call this
        with self._lock:
            for _ in range(len(self._kept)):
                if _is_past(self._kept[0][0]):
                    past.append(self._kept.popleft())
                else:
                    self._kept.rotate(-1)  # so that a late one keeps only its own memory


def _is_past(event: Event) -> bool:
    """Whether the GPU has reached an event; False also where it never will, which ends only the operations that need it."""
    try:
        return event.done
    except BackendUnavailableError:
        return False
