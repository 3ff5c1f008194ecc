"""Memory of the host that a GPU reads and writes itself: lent as arrays, and as slots to copy through.

Idea. An array that lies in pinned memory needs no copy on the host on its way to a GPU or from there. But to pin memory costs
more than to copy what is in it, and to let go of it waits for all that the GPU is at, which may be waiting for other ranks. So
what was pinned once is kept, and lent again and again: a `Pool` cuts it as it is needed. That saves page faults, too, of which
new memory has one a page. Where there is no room, arrays lie in ordinary memory and go through the few slots of a `Ring`.

Life. What is lent comes back when nobody refers to it any more. While a GPU has something to do with it, `Ring.keep` refers to
it, as to everything else that the GPU alone still needs.

Cost: a few microseconds a loan; to pin, once, about as long as it takes to touch the memory for the first time.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ferrorpc.arrays.device import Device, Event

UNIT_BYTES: Final = 4 << 10
"""Loans begin and end at multiples of it, so no two of them share what processors fetch at a time."""
SEGMENT_BYTES_MIN: Final = 4 << 20

Array = np.ndarray[Any, Any]


class _Segment:
    """Memory that was pinned at a time, and which bytes of it are lent, in order."""

    __slots__ = ("address", "lent", "memory")

    def __init__(self, memory: Array) -> None:
        self.memory = memory
        self.address: int = memory.ctypes.data
        self.lent: list[tuple[int, int]] = []

    def find(self, size_bytes: int) -> int | None:
        """Where so many bytes are free, which are lent from now on."""
        start = 0
        for place, (first, last) in enumerate((*self.lent, (self.memory.size, self.memory.size))):
            if first - start >= size_bytes:
                self.lent.insert(place, (start, start + size_bytes))
                return start
            start = last
        return None


class _Loan:
    """Lent bytes. NumPy's arrays of them refer to this."""

    __slots__ = ("__array_interface__", "_returned", "_segment", "_span")

    def __init__(self, segment: _Segment, span: tuple[int, int], returned: deque[tuple[_Segment, tuple[int, int]]]) -> None:
        start, stop = span
        place = (segment.address + start, False)
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (stop - start,), "data": place}
        self._segment = segment
        self._span = span
        self._returned = returned

    def __del__(self) -> None:
        # It may run within any method of the pool: no lock is taken.
        self._returned.append((self._segment, self._span))


class Pool:
    """Pinned memory that is lent. Threads may share it.

    Args:
        most_bytes: never more than that is pinned.
    """

    def __init__(self, device: Device, most_bytes: int) -> None:
        self._device = device
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._segments: tuple[_Segment, ...] = ()
        """The small ones first, so that little arrays leave the room of large ones alone."""
        self._returned: deque[tuple[_Segment, tuple[int, int]]] = deque()

    @property
    def pinned_bytes(self) -> int:
        """How much is pinned."""
        return sum(segment.memory.size for segment in self._segments)

    @property
    def lent_bytes(self) -> int:
        """How much of it somebody has."""
        with self._lock:
            self._take_back()
            return sum(stop - start for segment in self._segments for start, stop in segment.lent)

    def holds(self, array: Array) -> bool:
        """Whether an array is on loan from here."""
        address: int = array.ctypes.data
        return any(0 <= address - segment.address < segment.memory.size for segment in self._segments)

    def lend(self, shape: Sequence[int], storage: np.dtype[Any]) -> Array | None:
        """An array, its contents undefined; None where there is no room, and for one that has no elements."""
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
        except (MemoryError, RuntimeError):  # CuPy's own error class is a RuntimeError
            # The host has no more to give: what there is has to do, as where the bound is reached.
            self._most_bytes = self.pinned_bytes
            return None
        self._segments = tuple(sorted((*self._segments, found), key=lambda segment: segment.memory.size))
        return found


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
        self._kept: deque[tuple[Event, Any]] = deque()

    def take(self) -> Array | None:
        """A slot that nobody needs, as uint8; None while there is none. Memory is pinned when first needed."""
        self.let_go()
        with self._lock:
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
        self._kept.append((mark, array))

    def let_go(self) -> None:
        """Of what was kept, what the GPU is past by now."""
        with self._lock:
            for _ in range(len(self._kept)):
                if self._kept[0][0].done:
                    self._kept.popleft()
                else:
                    self._kept.rotate(-1)  # one that is late holds up its own memory alone

    @property
    def taken(self) -> int:
        """How many slots somebody has."""
        return self._made - len(self._free)
