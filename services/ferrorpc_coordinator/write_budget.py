"""How many bytes of large frames are given to gRPC at once, over all sessions.

An answer for a thousand sessions is one body in memory, until it is written: then each has a copy, and gRPC one more. So large
frames take their turn. Others are written at once, since together they are little.
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
"""A write that takes longer goes on, but gives back its bytes, so that clients that read nothing hold up nobody for long. What
such a client costs beyond the budget is this one frame: its others stay queued, where they share their bodies with those of
other sessions, and count against the bound of its stream."""


class WriteBudget:
    """Writes frames, the large ones within the budget: those of a job in the order in which they come, and jobs in turns. So a
    job with many frames, or with many clients that read nothing, holds up itself."""

    __slots__ = ("_room_bytes", "_waiting")

    def __init__(self) -> None:
        self._room_bytes = WRITING_BYTES_MAX
        self._waiting: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}
        """By job; the one whose turn it is comes first."""

    async def write(self, write: Callable[[bytes], Awaitable[None]], job: str, shared: bytes, overlay: bytes) -> None:
        """Writes one frame of a job, whose parts are concatenated only when its turn has come."""
        size_bytes = len(shared) + len(overlay)
        if size_bytes <= LARGE_FRAME_BYTES:
            await write(shared + overlay)
            return
        await self._take(job, size_bytes)

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

    async def _take(self, job: str, size_bytes: int) -> None:
        if self._room_bytes > 0:
            self._room_bytes -= size_bytes
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(job, deque()).append((turn, size_bytes))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had just been given its bytes
                self._give_back(size_bytes)
            raise

    def _give_back(self, size_bytes: int) -> None:
        self._room_bytes += size_bytes
        while self._room_bytes > 0 and self._waiting:
            job = next(iter(self._waiting))
            waiting = self._waiting.pop(job)
            turn, wanted_bytes = waiting.popleft()
            if waiting:
                self._waiting[job] = waiting  # behind the others
            if not turn.done():
                self._room_bytes -= wanted_bytes
                turn.set_result(None)
