"""Counts what peers read from this rank's memory, which no lane sends and so no lane counts."""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Protocol
from weakref import WeakSet


class Readable(Protocol):
    """A prepared call whose runs let peers read this rank's memory."""

    def given_bytes(self) -> dict[int, int]:
        """World rank of a peer -> bytes it has read in all runs so far."""


class Calls:
    """Counts the bytes that peers have read from this rank's memory, by prepared calls that exist and those that are gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: WeakSet[Readable] = WeakSet()
        self._gone: Counter[int] = Counter()
        self._going: deque[dict[int, int]] = deque()

    def add(self, call: Readable) -> None:
        """Counts the runs of a prepared call from now on."""
        with self._lock:
            self._live.add(call)

    def forget(self, call: Readable) -> None:
        """A prepared call is dropped. Takes no lock, because its finaliser may run at any point of any thread."""
        self._going.append(call.given_bytes())

    def taken_bytes(self) -> dict[int, int]:
        """World rank of a peer -> payload bytes that it has read, or is about to."""
        with self._lock:
            live = list(self._live)
            while self._going:
                self._gone.update(self._going.popleft())
            total = self._gone.copy()
        for call in live:
            total.update(call.given_bytes())
        return total
