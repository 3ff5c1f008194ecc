"""News for everybody, which comes less often the more there are to broadcast.

Idea. A change that each of n members makes, such as leaving, and that all others are told of at once, is n² frames: a thousand
ranks that finish together kept a coordinator busy for 20 s. So after news went to many, the next waits for a time in proportion
to how many they were, and goes out as one then. In a small world everything is told at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ferrorpc_coordinator.state.context import JobContext

IMMEDIATE_RECIPIENTS_MAX: Final = 32
"""Up to so many are told of everything at once."""
PAUSE_PER_RECIPIENT_NS: Final = 200_000
"""Time for each member told until the next news: a multiple of what it takes to broadcast one."""


class BroadcastThrottle:
    """One kind of news of one job.

    Args:
        name: of the kind, unique in the job.
        broadcast: tells what is new, if anything still is; returns how many were told.
    """

    def __init__(self, context: JobContext, name: str, broadcast: Callable[[], int]) -> None:
        self._context = context
        self._key = ("throttle", name)
        self._broadcast = broadcast
        self._is_paused = False
        self._is_pending = False

    def notify(self) -> None:
        """Something is new: it is told now, or with what comes before the next telling."""
        if self._is_paused:
            self._is_pending = True
            return
        told = self._broadcast()
        if told > IMMEDIATE_RECIPIENTS_MAX:
            self._is_paused = True
            self._context.arm(self._key, self._context.now + told * PAUSE_PER_RECIPIENT_NS, self._resume)

    def _resume(self) -> None:
        self._is_paused = False
        if self._is_pending:
            self._is_pending = False
            self.notify()
