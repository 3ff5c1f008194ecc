"""How many bytes of large frames are given to gRPC at once, over all sessions.

An answer for a thousand sessions is one body in memory, until it is written: then each has a copy, and gRPC one more. So large
frames take their turn, of all jobs in one order. Others are written at once, since together they are little.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

LARGE_FRAME_BYTES: Final = 64 << 10
"""Frames beyond this take their turn."""
WRITING_BYTES_MAX: Final = 32 << 20
"""The next large frame begins while fewer bytes than this are being written."""
TURN_SECONDS: Final = 0.5
"""A large frame waits at most this long, then it is written beyond the budget, so that clients that read nothing, however many,
hold up those of other jobs only for a while. And a write that takes longer goes on, but gives back its bytes, so that they hold
up nobody for ever. What such a client costs beyond the budget is this one frame: its others stay queued, where they share their
bodies with those of other sessions, and count against the bound of its stream."""


class WriteBudget:
    """Writes frames; the large ones in the order in which they come, within the budget."""

    __slots__ = ("_room_bytes", "_waiting")

    def __init__(self) -> None:
        self._room_bytes = WRITING_BYTES_MAX
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    async def write(self, write: Callable[[bytes], Awaitable[None]], shared: bytes, overlay: bytes) -> None:
        """Writes one frame, whose parts are concatenated only when its turn has come."""
        size_bytes = len(shared) + len(overlay)
        if size_bytes <= LARGE_FRAME_BYTES:
            await write(shared + overlay)
            return
        await self._take(size_bytes)

        def end_turn() -> None:
            nonlocal size_bytes
            self._give_back(size_bytes)
            size_bytes = 0

        timer = asyncio.get_running_loop().call_later(TURN_SECONDS, end_turn)
        try:
            frame = shared + overlay
            del shared, overlay  # which would be kept as long as it is written
            await write(frame)
        finally:
            timer.cancel()
            end_turn()

    async def _take(self, size_bytes: int) -> None:
        if self._room_bytes > 0:
            self._room_bytes -= size_bytes
            return
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append((turn, size_bytes))
        timer = loop.call_later(TURN_SECONDS, self._begin, turn, size_bytes)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had just been given its bytes
                self._give_back(size_bytes)
            raise
        finally:
            timer.cancel()

    def _give_back(self, size_bytes: int) -> None:
        self._room_bytes += size_bytes
        while self._waiting and (self._room_bytes > 0 or self._waiting[0][0].done()):
            self._begin(*self._waiting.popleft())

    def _begin(self, turn: asyncio.Future[None], size_bytes: int) -> None:
        if not turn.done():
            self._room_bytes -= size_bytes
            turn.set_result(None)
