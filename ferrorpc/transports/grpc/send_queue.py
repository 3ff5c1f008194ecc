"""The queue of messages to be written on one gRPC stream.

The number and bytes of queued frames are limited: their sender can wait and is called back when there is room again. Control
messages have a limit of their own, `control.CONTROL_MAX`, which only a misbehaving peer makes them reach.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Final

from ferrorpc.transports.control import CONTROL_MAX

FRAMES_MAX: Final = 8
FRAME_BYTES_MAX: Final = 4 << 20
"""More in flight is not faster: the next frame to be written would only have left the processor's caches."""

_CONTROL: Final = -1


class SendQueue:
    """A queue with many writers and, at any time, one reader. Only the reader blocks, in `messages`."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[bytes, int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._frames = 0
        self._frame_bytes = 0
        self.sent_bytes = 0
        """Payload bytes of all frames that were ever reserved."""
        self._waiting: list[Callable[[], None]] = []
        self._finished = False

    def reserve(self, size_bytes: int, room: Callable[[], None]) -> bool:
        """Reserves space for one frame; `put_frame` must follow. False when full: `room` is called once there is space."""
        with self._lock:
            full = self._frames >= FRAMES_MAX or self._frame_bytes + size_bytes > FRAME_BYTES_MAX
            if full and self._frames and not self._finished:
                if room not in self._waiting:
                    self._waiting.append(room)
                return False
            self._frames += 1
            self._frame_bytes += size_bytes
            self.sent_bytes += size_bytes
            return True

    def put_frame(self, message: bytes, size_bytes: int) -> None:
        """Appends a frame for which `size_bytes` were reserved; drops it after `finish`."""
        if not self._finished:
            self._queue.put((message, size_bytes))

    def put(self, message: bytes) -> bool:
        """Appends a control message; drops it after `finish`. False, and dropped, where CONTROL_MAX messages are queued."""
        if self._queue.qsize() >= CONTROL_MAX:
            return False
        if not self._finished:
            self._queue.put((message, _CONTROL))
        return True

    def finish(self, last: bytes | None = None, *, discard: bool = False) -> None:
        """Ends `messages` after what is queued (which `discard` drops) and `last`. Calls everybody who waits for room."""
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
        """What was put, in order; blocks for more until `finish`. A message counts as queued until the next is requested."""
        while (item := self._queue.get()) is not None:
            message, size_bytes = item
            yield message
            if size_bytes != _CONTROL:
                self._release(size_bytes)

    def _release(self, size_bytes: int) -> None:
        """Frees the space of a frame that was written. Once the queue is half empty, wakes one waiting sender a frame, in turn.

        The woken sender finds space for several frames; if all were woken, the others would mostly find none. A sender need not
        use the space it is told of, so when the queue is empty everyone who still waits is woken.
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
