"""Incoming streams that have not sent their Open message yet.

Each of them occupies a thread, and anybody who reaches the port can start one. So both their number and the time they may wait
are limited. Where there are too many, the oldest is cancelled: a real peer sends its Open as soon as it dials.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Final

from ferrorpc.guard import Clock

PENDING_MAX: Final = 256


class PendingStreams:
    """The streams that wait for their Open. A thread enforces the timeout; it runs only while a stream waits.

    Args:
        timeout_seconds: how long each stream may wait.
    """

    def __init__(self, clock: Clock, timeout_seconds: float) -> None:
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        self._parker = clock.parker()
        self._lock = threading.Lock()
        self._waiting: dict[Any, float] = {}
        """Each call and the clock time of its timeout, in order of arrival."""
        self._watched = False

    @contextlib.contextmanager
    def wait_for_open(self, context: Any) -> Iterator[None]:
        """While inside, the call of this context is pending and may be cancelled."""
        with self._lock:
            if not self._watched:
                self._clock.start(self._watch, "ferrorpc-pending-streams")
                self._watched = True
            evicted = self._pop_oldest() if len(self._waiting) >= PENDING_MAX else None
            self._waiting[context] = self._clock.now() + self._timeout_seconds
        if evicted is not None:
            evicted.cancel()
        try:
            yield
        finally:
            with self._lock:
                self._waiting.pop(context, None)
                is_last = not self._waiting
            if is_last:
                self._parker.unpark()

    def _pop_oldest(self) -> Any:
        oldest = next(iter(self._waiting))
        del self._waiting[oldest]
        return oldest

    def _watch(self) -> None:
        while (until := self._cancel_expired()) is not None:
            self._parker.park(until)

    def _cancel_expired(self) -> float | None:
        """Cancels the calls that have timed out. Returns the next timeout; None where no call waits any more."""
        expired = []
        with self._lock:
            while self._waiting:
                until = next(iter(self._waiting.values()))
                if until > self._clock.now():
                    break
                expired.append(self._pop_oldest())
            else:
                self._watched = False
                until = None
        for context in expired:
            context.cancel()
        return until
