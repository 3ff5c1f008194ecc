"""Time as the coordinator lived it: the clock without the stretches in which the coordinator itself stood still.

A coordinator that was stopped for ten seconds did not hear ten seconds of beats; they lie unread in its sockets. Measured
by the clock every lease would be over. So all deadlines are kept in lived time: when two steps are further apart than the
coordinator, which asks to be called at every pulse, can have wanted, the gap is taken out of time. The fault is then the
coordinator's own and nobody else's; members get their whole lease again from the moment it woke.
"""

from __future__ import annotations


class RunningTime:
    """Translates between the clock and lived time, both in nanoseconds."""

    __slots__ = ("_last", "_paused", "pause_ns", "tick_interval_ns")

    def __init__(self, now_ns: int, tick_interval_ns: int, pause_ns: int) -> None:
        self.tick_interval_ns = tick_interval_ns
        self.pause_ns = pause_ns
        self._last = now_ns
        self._paused = 0

    @property
    def paused(self) -> int:
        """All that was taken out of time so far."""
        return self._paused

    def advance(self, now_ns: int, *, tick_requested: bool = True) -> int:
        """The present in lived time. A clock that goes backwards stands still here.

        Args:
            now_ns: the present on the clock.
            tick_requested: whether a call at every pulse had been asked for since the step before.
        """
        now_ns = max(now_ns, self._last)
        gap = now_ns - self._last
        if tick_requested and gap > self.pause_ns:
            self._paused += gap
        self._last = now_ns
        return now_ns - self._paused

    def next_call(self, lived: int) -> int:
        """When to call next, on the clock: at this moment of lived time, or at the next pulse if that is sooner."""
        return min(lived + self._paused, self._last + self.tick_interval_ns)
