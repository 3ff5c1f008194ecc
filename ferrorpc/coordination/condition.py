"""threading.Condition for any Clock, so that waits also work on virtual time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from ferrorpc.guard import Clock, Parker

Found = TypeVar("Found")


class Condition:
    """A lock, and the threads that wait for a change of what it protects.

    The lock is held for a few lines only and never across a wait: on virtual time one thread runs at a time.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.lock = threading.Lock()
        self._waiting: dict[Parker, None] = {}
        """Those that wait, in the order in which they began."""

    def notify_all(self) -> None:
        """Wakes every waiter, which then calls its `find` again. The caller holds the lock."""
        for parker in self._waiting:
            parker.unpark()

    def wait_for(self, find: Callable[[], Found | None], until: float) -> Found | None:
        """Waits until `find` returns something other than None, and returns that; None at clock time `until`.

        `find` runs with the lock held. What it raises is raised here.
        """
        parker = self.clock.parker()
        try:
            while True:
                with self.lock:
                    found = find()
                    if found is not None or self.clock.now() >= until:
                        return found
                    self._waiting[parker] = None
                parker.park(until)
        finally:
            with self.lock:
                self._waiting.pop(parker, None)
