"""Limits how often a broadcast to all members is sent.

If each of n members makes a change, such as leaving, and all others are told at once, n² frames are sent: a thousand ranks that
finished together kept a coordinator busy for 20 s. So after a broadcast to many members the next one waits for a time
proportional to their number, and carries all changes made in between. In small jobs every change is sent at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ferrorpc_coordinator.state.context import JobContext

IMMEDIATE_RECIPIENTS_MAX: Final = 32
"""Broadcasts to at most this many members are never delayed."""
PAUSE_PER_RECIPIENT_NS: Final = 200_000
"""Pause after a larger broadcast, per recipient: a multiple of what sending to one costs."""


class BroadcastThrottle:
    """One kind of broadcast of one job.

    Args:
        name: of this kind, unique in the job.
        broadcast: sends all changes that are still current, if there are any; returns the number of recipients.
    """

    def __init__(self, context: JobContext, name: str, broadcast: Callable[[], int]) -> None:
        self._context = context
        self._key = ("throttle", name)
        self._broadcast = broadcast
        self._is_paused = False

    def notify(self) -> None:
        """Reports a change. It is sent at once, or after the pause together with later changes."""
        if self._is_paused:
            return
        recipients = self._broadcast()
        if recipients > IMMEDIATE_RECIPIENTS_MAX:
            self._is_paused = True
            self._context.arm(self._key, self._context.now + recipients * PAUSE_PER_RECIPIENT_NS, self._resume)

    def _resume(self) -> None:
        self._is_paused = False
        self.notify()
