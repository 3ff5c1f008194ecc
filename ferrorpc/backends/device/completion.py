"""Watches operations whose callers have gone on, until the GPU has finished them."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from typing import Final

from ferrorpc.arrays.device import Device
from ferrorpc.backends.device.in_flight import InFlightExecution, notify
from ferrorpc.collectives.driver import PROBE_SECONDS
from ferrorpc.collectives.execution import Execution
from ferrorpc.errors import FerroError
from ferrorpc.guard import FOREVER, Guard, wake_nobody
from ferrorpc.work import Work

IDLE_SECONDS: Final = 1e-3
"""The least interval between two polls where nobody asks for the completions: buffers wait to be released."""
NOTIFY_SECONDS: Final = 200e-6
"""The least interval where somebody waits for a completion, or has asked for one. After a long wait without any, both grow
(`nap_seconds`)."""
LINGER_SECONDS: Final = 5e-3
"""How long an idle watcher goes on, so that the next operation can join it."""
LONG_SECONDS: Final = 4 * PROBE_SECONDS
"""After waiting so long a watcher does not go on: its next timer may be due later than the next operation's deadline."""
EMPTY_SECONDS: Final = 3600.0
"""The deadline of an idle watcher, which ends long before."""


class CompletionWatcher(Execution):
    """Completes the operations of one launch queue, one after the other. Later ones may join while it runs.

    The thread that queries events takes the GIL whenever it wakes. The thread that launches the next operation releases the GIL
    in many of CUDA's calls, and waits to get it back, which takes longer than the rest of the launch. So a watcher polls seldom
    and queries few events: the GPU reaches end events in the order of their stream, so a binary search finds the last one that
    it has reached. A watcher also lingers when nothing is left in flight, so that the next small operation wakes no thread.
    """

    def __init__(self, first: InFlightExecution, device: Device) -> None:
        self.guard = first.guard
        self.wake = wake_nobody
        self.polling = first.polling
        self.device = device
        self.results, self.specs = [], []
        self._lock = threading.Lock()
        self._is_over = False
        self._in_flight = deque([first])
        self._empty_since = FOREVER

    def join(self, execution: InFlightExecution) -> bool:
        """Watches one more operation, launched after the others. Returns False if this watcher has ended, or if the operation's
        deadline is earlier than that of the one before it."""
        with self._lock:
            in_flight = self._in_flight
            if self._is_over or (in_flight and execution.guard.deadline < in_flight[-1].guard.deadline):
                return False
            if not in_flight:
                self.guard = execution.guard
            in_flight.append(execution)
        return True

    @property
    def label(self) -> str:
        return self._in_flight[0].label if self._in_flight else "nothing in flight"

    @property
    def nap_seconds(self) -> float:
        with self._lock:
            return NOTIFY_SECONDS if any(execution.is_awaited for execution in self._in_flight) else IDLE_SECONDS

    def advance(self) -> bool:
        self._find_reached()
        while self._in_flight:
            first = self._in_flight[0]
            if not first.try_complete():
                return False
            notify(first, None)
            self.position += 1
            self._drop_first()
        with self._lock:
            if not self._in_flight and self.guard.clock.now() >= self._empty_since + LINGER_SECONDS:
                self._is_over = True
            return self._is_over

    def _find_reached(self) -> None:
        """Finds by binary search which end events the GPU has reached."""
        with self._lock:
            ordered = [each for each in self._in_flight if each.in_launch_order and not each.released]
        for each in ordered[: bisect_left(ordered, True, key=lambda each: each.end_event is None or not each.end_event.done)]:
            each.end_reached = True

    def _drop_first(self) -> None:
        """Stops watching the first operation, which is complete."""
        with self._lock:
            self._in_flight.popleft()
            if self._in_flight:
                self.guard = self._in_flight[0].guard
            else:
                began = self.guard.started
                self.guard = Guard(self.guard.clock, self.guard.latch, EMPTY_SECONDS)
                self._empty_since = self.guard.started
                self._is_over = self._empty_since - began > LONG_SECONDS

    def waiting_on(self) -> list[int]:
        return self._in_flight[0].waiting_on() if self._in_flight else []

    def probe(self) -> None:
        if self._in_flight:
            self._in_flight[0].probe()

    def explain(self) -> str:
        return self._in_flight[0].explain() if self._in_flight else self.label

    def timeout_error(self) -> FerroError:
        return self._in_flight[0].timeout_error()

    def finish(self) -> None:
        with self._lock:
            self._is_over = True
        for execution in self._in_flight:
            execution.release()

    def fail(self, error: FerroError) -> bool:
        """Ends the operations that are left with this error, except those that another thread has completed.

        Returns whether the error needs no further report: somebody was notified of it, or no operation was lost.
        """
        left, self._in_flight = self._in_flight, deque()
        notified = [notify(execution, None if execution.has_completed else error.again()) for execution in left]
        return any(notified) or all(execution.has_completed for execution in left)


class WatcherWork(Work[None]):
    """The Work of a watcher. It passes an error on to each operation that the watcher has left."""

    def __init__(self, watcher: CompletionWatcher) -> None:
        super().__init__(watcher.guard.clock, watcher.label)
        self._watcher = watcher

    def fail(self, error: BaseException) -> None:
        self._label = self._watcher.label
        if not isinstance(error, FerroError) or not self._watcher.fail(error):
            super().fail(error)
