"""Streams whose caller has not said yet whose they are.

Each holds a thread, and whoever reaches the port may begin one. So they may wait for a while only, and only so many at a time:
past that the one that has waited longest makes room, because a peer says who it is in the moment it dials.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any, Final

from ferrorpc.guard import Clock

STRANGERS_MAX: Final = 256


class Doorstep:
    """Where they wait. One thread watches the time, and only while somebody waits.

    Args:
        patience_seconds: how long each may.
    """

    def __init__(self, clock: Clock, patience_seconds: float) -> None:
        self._clock = clock
        self._patience_seconds = patience_seconds
        self._parker = clock.parker()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[Any, float]] = {}
        """The call and when its patience is over, by the order in which they came."""
        self._watched = False

    @contextlib.contextmanager
    def holding(self, context: Any) -> Iterator[None]:
        """As long as it lasts, the call of this context may be cancelled."""
        with self._lock:
            number = next(self._numbers)
            pushed_off = self._oldest() if len(self._waiting) >= STRANGERS_MAX else None
            self._waiting[number] = context, self._clock.now() + self._patience_seconds
            is_first, self._watched = not self._watched, True
        if pushed_off is not None:
            pushed_off.cancel()
        if is_first:
            self._clock.start(self._watch, "ferrorpc-doorstep")
        try:
            yield
        finally:
            with self._lock:
                self._waiting.pop(number, None)
                is_last = not self._waiting
            if is_last:
                self._parker.unpark()

    def _oldest(self) -> Any:
        return self._waiting.pop(next(iter(self._waiting)))[0]

    def _watch(self) -> None:
        while (until := self._next()) is not None:
            self._parker.park(until)

    def _next(self) -> float | None:
        """Sends away whose patience is over. When to look again; None where nobody waits any more."""
        over = []
        with self._lock:
            while self._waiting:
                until = next(iter(self._waiting.values()))[1]
                if until > self._clock.now():
                    break
                over.append(self._oldest())
            else:
                self._watched = False
                until = None
        for context in over:
            context.cancel()
        return until
