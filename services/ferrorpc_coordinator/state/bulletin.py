"""News for everybody, which comes less often the more there are to tell.

Idea. A change that each of n members makes, such as leaving, and that all others are told of at once, is n² frames: a thousand
ranks that finish together kept a coordinator busy for 20 s. So after news went to many, the next waits for a time in proportion
to how many they were, and goes out as one then. In a small world everything is told at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ferrorpc_coordinator.state.desk import Desk

MANY: Final = 32
"""Up to so many are told of everything at once."""
REST_NS: Final = 200_000
"""Time for each member told until the next news: a multiple of what it takes to tell one."""


class Bulletin:
    """One kind of news of one job.

    Args:
        name: of the kind, unique in the job.
        tell: tells what is new, if anything still is; returns how many were told.
    """

    def __init__(self, desk: Desk, name: str, tell: Callable[[], int]) -> None:
        self._desk = desk
        self._key = ("bulletin", name)
        self._tell = tell
        self._rests = False
        self._is_due = False

    def issue(self) -> None:
        """Something is new: it is told now, or with what comes before the next telling."""
        if self._rests:
            self._is_due = True
            return
        told = self._tell()
        if told > MANY:
            self._rests = True
            self._desk.arm(self._key, self._desk.now + told * REST_NS, self._rested)

    def _rested(self) -> None:
        self._rests = False
        if self._is_due:
            self._is_due = False
            self.issue()
