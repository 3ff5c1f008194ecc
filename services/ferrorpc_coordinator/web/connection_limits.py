"""Connections to the HTTP port that ask for nothing, or do not read what they asked for, are not held for long.

uvicorn bounds how many requests are served at a time, and how long a connection may idle after one. What never sends a whole
request, or leaves a stream of states unread, it would keep for ever; a few hundred of those, and nobody else is answered.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS: Final = 15.0
"""How long a connection may take to its next whole request."""
UNREAD_SECONDS: Final = 30.0
"""How long what was sent may be left unread."""
IDLE_MAX: Final = 128
"""Connections without a request. Past that, the one that has idled longest makes room."""


class LimitedHttpProtocol(H11Protocol):
    """One connection, on the event loop."""

    _waiting: ClassVar[dict[LimitedHttpProtocol, None]] = {}
    """Connections of this process without a request, the longest first."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._request_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stir()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_busy():
            self._stir()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and not self._is_busy():
            self._idle()

    def send_400_response(self, msg: str) -> None:
        if self._is_busy():  # what follows a sound head is no body: its answer is not wanted any more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        super().send_400_response(msg)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _is_busy(self) -> bool:
        """Whether a whole request is here that is not answered yet."""
        cycle: Any = self.cycle  # None before the first
        return cycle is not None and not cycle.response_complete

    def _idle(self) -> None:
        """Begins to wait for a request."""
        self._stir()
        self._waiting[self] = None
        self._request_timer = self.loop.call_later(REQUEST_SECONDS, self._hang_up)
        if len(self._waiting) > IDLE_MAX:
            next(iter(self._waiting))._hang_up()

    def _stir(self) -> None:
        """It waits no more."""
        self._waiting.pop(self, None)
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _hang_up(self) -> None:
        self._stir()
        self.transport.abort()
