"""Timeouts and limits for connections to the HTTP port that send no request, or do not read their response.

uvicorn limits the number of requests, and how long a connection may idle after one. It has no limit for connections that never
send a whole request, or never read their event stream: a few hundred of those would block all others.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS: Final = 15.0
"""How long a connection may take until its next request is complete."""
UNREAD_SECONDS: Final = 30.0
"""How long a response may stay unread."""
IDLE_MAX: Final = 128
"""Connections without a request. Past this number the one idle for longest is closed."""


class LimitedHttpProtocol(H11Protocol):
    """One connection, on the event loop."""

    _waiting: ClassVar[dict[LimitedHttpProtocol, None]] = {}
    """Connections of this process that wait for a request, those idle for longest first."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._request_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_busy():
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and not self._is_busy():
            self._start_waiting()

    def send_400_response(self, msg: str) -> None:
        if self._is_busy():  # the body of a valid head is malformed: drop its response
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
        """Whether a complete request has not been answered yet."""
        cycle: Any = self.cycle  # None before the first
        return cycle is not None and not cycle.response_complete

    def _start_waiting(self) -> None:
        """Starts to wait for a request."""
        self._stop_waiting()
        self._waiting[self] = None
        self._request_timer = self.loop.call_later(REQUEST_SECONDS, self._close)
        if len(self._waiting) > IDLE_MAX:
            next(iter(self._waiting))._close()

    def _stop_waiting(self) -> None:
        """Stops waiting for a request."""
        self._waiting.pop(self, None)
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _close(self) -> None:
        self._stop_waiting()
        self.transport.abort()
