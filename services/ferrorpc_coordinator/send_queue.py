"""The send queue of one session's stream: a bounded queue between the driver, which never blocks, and gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from ferrorpc.errors import CoordinatorUnavailableError, FerroError

SEND_QUEUE_BYTES_MAX: Final = 8 << 20
"""A client that leaves more than this unread is disconnected; it can resume and gets what it missed."""
READ_PAUSE_BYTES: Final = SEND_QUEUE_BYTES_MAX // 4
"""While more than this is queued or reserved for a client, its requests are read slowly, so that their answers do not get it
disconnected."""
ROOM_WAIT_SECONDS: Final = 1.0
END_SECONDS: Final = 5.0
"""What is queued for a stream that has ended is dropped after this long."""


class SendQueue:
    """Encoded frames, in order, each as the body that it shares with those of other streams, and its overlay.

    Invariants: 1. `push` and `finish` never block. 2. What was pushed before `finish` is written before `drain` returns, unless
    the limit was exceeded, in which case everything unwritten is dropped at once, or the client does not read it within
    END_SECONDS.
    """

    __slots__ = (
        "_finished",
        "_frames",
        "_greeted",
        "_left_bytes",
        "_news",
        "_queued_bytes",
        "_reserved_bytes",
        "_room",
        "left",
        "problem",
        "stream",
    )

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.problem: FerroError | None = None
        """The error with which the stream ends, for its client."""
        self.left: Callable[[int], None] = _nobody
        """Called with the growth of what the client leaves unread of this stream after its end."""
        self._left_bytes = 0
        self._greeted = False
        """Whether the first frame was read: if it was a refusal, it was the only one, and the client may be a stranger."""
        self._frames: deque[tuple[bytes, bytes]] = deque()
        self._queued_bytes = 0
        self._reserved_bytes = 0
        self._finished = False
        self._news = asyncio.Event()
        """There is a frame, or an end, that `drain` has not seen yet."""
        self._room = asyncio.Event()
        self._room.set()

    def push(self, shared: bytes, overlay: bytes = b"") -> bool:
        """Queues one frame, or drops that of a stream that is over. False if the client reads too slowly: the stream ends."""
        if self._finished:
            return True
        self._frames.append((shared, overlay))
        self._count(queued=len(shared) + len(overlay))
        if self._queued_bytes > SEND_QUEUE_BYTES_MAX:
            self.problem = CoordinatorUnavailableError(
                f"the coordinator closed this session because it left more than {SEND_QUEUE_BYTES_MAX >> 20} MiB unread",
                hint="nothing to do if this process was only busy: the session resumes by itself",
            )
            self.finish()
            self._drop()
            return False
        self._news.set()
        return True

    def reserve(self, frame_bytes: int) -> None:
        """Reserves room for a frame that will be pushed once it is durable; a negative size releases it."""
        self._count(reserved=frame_bytes)

    async def wait_for_room(self) -> None:
        """Waits until little is queued for the client, the stream ends, or a second has passed.

        The client is read at least once a second even if the disk is stuck, so that it is not taken for silent.
        """
        if not self._room.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ROOM_WAIT_SECONDS):  # wait_for of Python 3.11 may swallow a cancellation
                    await self._room.wait()

    def finish(self) -> None:
        """Ends the stream after what is queued."""
        if not self._finished and self._queued_bytes:
            asyncio.get_running_loop().call_later(END_SECONDS, self._drop)
        self._finished = True
        self._count()
        self._news.set()

    async def drain(self, write: Callable[[bytes, bytes], Awaitable[None]]) -> None:
        """Writes frames until `finish`. There is only one consumer."""
        frames = self._frames
        try:
            while True:
                while frames:
                    size_bytes = sum(map(len, frames[0]))
                    await write(*frames.popleft())  # kept by nobody here, as `write` concatenates its parts
                    self._greeted = True
                    self._count(queued=-size_bytes)
                if self._finished:
                    return
                self._news.clear()
                await self._news.wait()
        finally:
            frames.clear()
            self._count(queued=-self._queued_bytes)

    def _drop(self) -> None:
        """Drops what is not being written. gRPC does not give back what it was given to write."""
        self._count(queued=-sum(len(shared) + len(overlay) for shared, overlay in self._frames))
        self._frames.clear()

    def _count(self, queued: int = 0, reserved: int = 0) -> None:
        self._queued_bytes += queued
        self._reserved_bytes += reserved
        if self._finished or self._queued_bytes + self._reserved_bytes <= READ_PAUSE_BYTES:
            self._room.set()
        else:
            self._room.clear()
        left_bytes = self._queued_bytes if self._finished and self._greeted else 0
        if left_bytes != self._left_bytes:
            self.left(left_bytes - self._left_bytes)
            self._left_bytes = left_bytes


def _nobody(_: int) -> None:
    """Where nobody asks what a client leaves unread."""
