"""The coordinator's running time: the monotonic clock without the periods in which the coordinator itself was stopped.

A coordinator that was stopped for ten seconds has ten seconds of heartbeats unread in its sockets; by the clock, every lease
would have expired. All deadlines are therefore kept in running time. The coordinator asks to be called at every tick interval;
if two steps are much further apart than that, the gap was its own pause and is removed from the time. Members then have their
whole lease again from the moment it continued.
"""

from __future__ import annotations


class RunningTime:
    """Converts between the clock and running time, both in nanoseconds."""

    __slots__ = ("_last", "_paused", "pause_ns", "tick_interval_ns")

    def __init__(self, now_ns: int, tick_interval_ns: int, pause_ns: int) -> None:
        self.tick_interval_ns = tick_interval_ns
        self.pause_ns = pause_ns
        self._last = now_ns
        self._paused = 0

    def advance(self, now_ns: int, *, tick_requested: bool = True) -> int:
        """Moves to the clock's `now_ns`; returns the running time. If the clock goes backwards, time stands still.

        Args:
            now_ns: the current time on the clock.
            tick_requested: whether the coordinator had asked to be called at every tick interval since the last step. If not,
                a gap is no pause.
        """
        now_ns = max(now_ns, self._last)
        gap = now_ns - self._last
        if tick_requested and gap > self.pause_ns:
            self._paused += gap
        self._last = now_ns
        return now_ns - self._paused

    def next_call(self, running_ns: int) -> int:
        """The clock time of the next call: at this running time, or at the next tick if that is sooner."""
        return min(running_ns + self._paused, self._last + self.tick_interval_ns)
