"""A clock that a test moves by hand, for code that depends on time but needs no simulated world."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable

from ferrorpc.errors import UsageError
from ferrorpc.guard import SYSTEM_CLOCK


class ManualClock:
    """A clock whose time changes only by `advance`. Threads are real, and wait for its time, or for a permit.

    Args:
        start: its first time, in seconds.
    """

    one_at_a_time = False

    def __init__(self, start: float = 0.0) -> None:
        self.changed = threading.Condition()
        self._now = start
        self._parked = 0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_count = 0

    def now(self) -> float:
        """The time in seconds."""
        return self._now

    def parker(self) -> ManualParker:
        """A new parker."""
        return ManualParker(self)

    def start(self, body: Callable[[], None], name: str) -> None:
        """Runs `body` on a daemon thread of its own."""
        SYSTEM_CLOCK.start(body, name)

    def call_at(self, when: float, action: Callable[[], None]) -> None:
        """Runs `action` on the thread that moves the time to `when` or beyond; at once if that time has passed."""
        with self.changed:
            self._timer_count += 1
            heapq.heappush(self._timers, (when, self._timer_count, action))
        self._fire()

    def give_way(self) -> None:
        """As `SystemClock.give_way`: its threads are real."""
        SYSTEM_CLOCK.give_way()

    def advance(self, seconds: float) -> None:
        """Moves the time forward. Runs the actions that are due, in order of their times, and ends waits that are due."""
        if not seconds >= 0:
            raise UsageError(f"seconds={seconds!r}: time goes forward", hint="pass 0 or more")
        with self.changed:
            self._now += seconds
            self.changed.notify_all()
        self._fire()

    def wait_for_parked(self, count: int, wall_seconds: float = 10.0) -> None:
        """Blocks until `count` threads wait on this clock.

        Raises:
            AssertionError: they do not, within `wall_seconds` of real time.
        """
        with self.changed:
            if not self.changed.wait_for(lambda: self._parked >= count, wall_seconds):
                raise AssertionError(f"{self._parked} threads wait on the clock, not {count}, after {wall_seconds:g} s")

    def hold(self, ready: Callable[[], bool]) -> None:
        """For parkers: waits, with `changed` held, until `ready`."""
        self._parked += 1
        self.changed.notify_all()
        self.changed.wait_for(ready)
        self._parked -= 1

    def _fire(self) -> None:
        while True:
            with self.changed:
                if not self._timers or self._timers[0][0] > self._now:
                    return
                action = heapq.heappop(self._timers)[2]
            action()


class ManualParker:
    """What a thread waits on: for a permit, or for a time of the clock."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._permit = False

    def park(self, until: float) -> bool:
        """Waits for the permit, or until clock time `until`. Consumes the permit; returns whether there was one."""
        clock = self._clock
        with clock.changed:
            if not self._permit and clock.now() < until:
                clock.hold(lambda: self._permit or clock.now() >= until)
            permit, self._permit = self._permit, False
        return permit

    def unpark(self) -> None:
        """Gives the permit, and wakes the thread that waits."""
        with self._clock.changed:
            self._permit = True
            self._clock.changed.notify_all()
