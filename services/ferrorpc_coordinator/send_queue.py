"""What waits to be written to one session's stream: a bounded queue between the driver, which never blocks, and gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

SEND_QUEUE_BYTES_MAX: Final = 8 << 20
"""A client that leaves this much unread is cut off; it can resume and gets what it missed."""
READ_PAUSE_BYTES: Final = SEND_QUEUE_BYTES_MAX // 4
"""While more than this waits for a client, its requests are hardly read: what it asked for does not cut it off."""
ROOM_WAIT_SECONDS: Final = 1.0


class SendQueue:
    """Frames in the order they were decided, as bytes.

    Invariants: 1. `push` and `finish` never block. 2. What was pushed before `finish` is written before `drain` returns, unless
    the limit was passed, in which case everything unwritten is dropped at once.
    """

    __slots__ = (
        "_bytes_max",
        "_finished",
        "_frames",
        "_queued_bytes",
        "_reserved_bytes",
        "_room",
        "_waiter",
        "overflowed",
        "stream",
    )

    def __init__(self, stream: int, bytes_max: int = SEND_QUEUE_BYTES_MAX) -> None:
        self.stream = stream
        self.overflowed = False
        self._frames: deque[bytes] = deque()
        self._queued_bytes = 0
        self._reserved_bytes = 0
        self._bytes_max = bytes_max
        self._finished = False
        self._waiter: asyncio.Future[None] | None = None
        self._room = asyncio.Event()
        self._room.set()

    def __len__(self) -> int:
        return len(self._frames)

    def push(self, frame: bytes) -> bool:
        """Queues one frame. False when the reader is too slow: then nothing more is ever written."""
        if self._finished:
            return not self.overflowed
        self._count(queued=len(frame))
        if self._queued_bytes > self._bytes_max:
            self.overflowed = True
            self._frames.clear()
            self.finish()
            return False
        self._frames.append(frame)
        self._wake()
        return True

    def reserve(self, frame_bytes: int) -> None:
        """A frame of this size will be pushed once it is durable; negative: it is pushed now."""
        self._count(reserved=frame_bytes)

    async def wait_for_room(self) -> None:
        """Returns when so little waits for the client that more may be asked for, when the stream ends, or after a second:
        what it says is read that often however stuck a disk is, so that nobody takes it for silent."""
        if not self._room.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._room.wait(), ROOM_WAIT_SECONDS)

    def finish(self) -> None:
        """Ends the stream after what is queued."""
        self._finished = True
        self._room.set()
        self._wake()

    async def drain(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Writes until `finish`. The one consumer."""
        frames = self._frames
        while True:
            while frames:
                frame = frames.popleft()
                await write(frame)
                self._count(queued=-len(frame))
            if self._finished:
                return
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _count(self, queued: int = 0, reserved: int = 0) -> None:
        self._queued_bytes += queued
        self._reserved_bytes += reserved
        if self._finished or self._queued_bytes + self._reserved_bytes <= READ_PAUSE_BYTES:
            self._room.set()
        else:
            self._room.clear()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
