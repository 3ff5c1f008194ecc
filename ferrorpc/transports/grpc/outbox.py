"""What waits to be written on one stream: frames up to a limit, and control messages up to one that none of ours reaches.

Frames are bounded because whoever sends them can wait (and is told when there is room again); for control messages see
`control.CONTROL_MAX`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Final

from ferrorpc.transports.control import CONTROL_MAX

FRAMES_MAX: Final = 8
FRAME_BYTES_MAX: Final = 4 << 20
"""More under way makes nothing faster: what is written next would only be out of the caches."""

_CONTROL: Final = -1


class Outbox:
    """One queue with many writers and, at any time, one reader. Nothing here blocks but the reader, in `messages`."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[bytes, int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._frames = 0
        self._frame_bytes = 0
        self.carried_bytes = 0
        """Payload of every frame for which room was ever made."""
        self._waiting: list[Callable[[], None]] = []
        self._finished = False

    def reserve(self, size_bytes: int, room: Callable[[], None]) -> bool:
        """Makes room for one frame, which `put_frame` must follow. False when full: `room` is called once there is some."""
        with self._lock:
            full = self._frames >= FRAMES_MAX or self._frame_bytes + size_bytes > FRAME_BYTES_MAX
            if full and self._frames and not self._finished:
                if room not in self._waiting:
                    self._waiting.append(room)
                return False
            self._frames += 1
            self._frame_bytes += size_bytes
            self.carried_bytes += size_bytes
            return True

    def put_frame(self, message: bytes, size_bytes: int) -> None:
        """Appends a frame for which `size_bytes` were reserved; drops it when nothing may follow any more."""
        if not self._finished:
            self._queue.put((message, size_bytes))

    def put(self, message: bytes) -> bool:
        """Appends a control message; drops it when nothing may follow any more. False, and dropped, where too many wait."""
        if self._queue.qsize() >= CONTROL_MAX:
            return False
        if not self._finished:
            self._queue.put((message, _CONTROL))
        return True

    def finish(self, last: bytes | None = None, *, discard: bool = False) -> None:
        """Nothing follows but `last`: `messages` ends after what is queued, which `discard` drops. Wakes who waits for room."""
        with self._lock:
            self._finished = True
            woken, self._waiting = self._waiting, []
        if discard:
            self._drop_all()
        if last is not None:
            self._queue.put((last, _CONTROL))
        self._queue.put(None)
        for room in woken:
            room()

    def messages(self) -> Iterator[bytes]:
        """What was put, in order; waits for more until `finish`. A message counts as queued until the next is asked for."""
        while (item := self._queue.get()) is not None:
            message, size_bytes = item
            yield message
            if size_bytes != _CONTROL:
                self._release(size_bytes)

    def _release(self, size_bytes: int) -> None:
        """From half of the limit on, wakes one of the waiting for each frame that goes, so that all have their turn.

        One finds room for several frames; were all woken, all but it would look in vain. Nobody is bound to use the room it is
        told of, so when the last frame has gone everyone who is left is woken.
        """
        woken: list[Callable[[], None]] = []
        with self._lock:
            self._frames -= 1
            self._frame_bytes -= size_bytes
            if self._frames <= FRAMES_MAX // 2 and self._frame_bytes <= FRAME_BYTES_MAX // 2:
                count = 1 if self._frames else len(self._waiting)
                woken, self._waiting = self._waiting[:count], self._waiting[count:]
        for room in woken:
            room()

    def _drop_all(self) -> None:
        try:
            while True:
                self._queue.get_nowait()
        except queue.Empty:
            pass
