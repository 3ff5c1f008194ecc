"""Waiting for a change of shared state, through a Clock: what threading.Condition is to the system's clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from ferrorpc.guard import Clock, Parker

Found = TypeVar("Found")


class Monitor:
    """A lock, and the threads that wait for what it protects to change.

    The lock is only ever held for a few lines and never across a wait, so that one thread can run at a time in a world
    with a virtual clock.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.lock = threading.Lock()
        self._waiting: dict[int, Parker] = {}
        self._tickets = 0

    def changed(self) -> None:
        """Wakes every waiter to look again. The caller holds the lock."""
        for parker in self._waiting.values():
            parker.unpark()

    def wait(self, look: Callable[[], Found | None], until: float) -> Found | None:
        """What `look` finds, as soon as it is not None; None when the clock passes `until` first.

        `look` runs with the lock held. What it raises comes out here.
        """
        parker = self.clock.parker()
        with self.lock:
            self._tickets += 1
            ticket = self._tickets
        try:
            while True:
                with self.lock:
                    found = look()
                    if found is not None or self.clock.now() >= until:
                        return found
                    self._waiting[ticket] = parker
                parker.park(until)
        finally:
            with self.lock:
                self._waiting.pop(ticket, None)
