"""The pipes that the launcher reads: one selector, and a consumer for each pipe."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable
from typing import IO, Final

_CHUNK_BYTES: Final = 1 << 16
_DRAIN_CHUNKS_MAX: Final = 256
"""More than any pipe holds. Bounded so that an endless writer cannot keep the launcher from its other work."""
_WAIT_SECONDS_MAX: Final = 86_400.0
"""Longest wait for one event. The system call refuses more than 24 days."""
Consumer = Callable[[bytes, float], None]
"""Takes bytes and the time; b"", once, is the end of the stream."""


class Pipes:
    """Waits for data on pipes and passes it to their consumers."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._consumers: dict[IO[bytes], Consumer] = {}

    def call(self, descriptor: int, action: Callable[[], None]) -> None:
        """Runs `action` whenever a descriptor is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, action)

    def listen(self, pipe: IO[bytes], consumer: Consumer) -> None:
        """Passes what is read from `pipe` to `consumer`, until its end."""
        os.set_blocking(pipe.fileno(), False)
        self._consumers[pipe] = consumer
        self._selector.register(pipe, selectors.EVENT_READ, lambda: self._read(pipe))

    def wait(self, seconds: float) -> None:
        """Waits until something is readable, at most `seconds` (and a day), and handles everything that is."""
        for key, _ in self._selector.select(min(seconds, _WAIT_SECONDS_MAX)):
            key.data()

    def drain(self, pipe: IO[bytes]) -> None:
        """Reads what is in the pipe now, without waiting for more."""
        for _ in range(_DRAIN_CHUNKS_MAX):
            if not self._read(pipe):
                return

    def finish(self, *pipes: IO[bytes]) -> None:
        """Reads what is in the pipes now and stops listening to them, even if a process still has their other ends open."""
        for pipe in pipes:
            self.drain(pipe)
            if pipe in self._consumers:
                self._end(pipe)

    def close(self) -> None:
        """Stops listening to all pipes."""
        self._consumers.clear()
        self._selector.close()

    def _read(self, pipe: IO[bytes]) -> bool:
        """Reads once. False if there was nothing to read, or the pipe has ended."""
        if pipe not in self._consumers:
            return False
        try:
            data = os.read(pipe.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._consumers[pipe](data, time.monotonic())
        else:
            self._end(pipe)
        return bool(data)

    def _end(self, pipe: IO[bytes]) -> None:
        self._selector.unregister(pipe)
        self._consumers.pop(pipe)(b"", time.monotonic())
