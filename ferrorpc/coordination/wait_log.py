"""Says in the log what a caller of the coordinator waits for."""

from __future__ import annotations

import logging
from typing import Final

from ferrorpc.logs import tell

EXPLAIN_FIRST_SECONDS: Final = 5.0
EXPLAIN_FACTOR: Final = 3.0
_log = logging.getLogger("ferrorpc.coordination")


class WaitLog:
    """Logs what a caller waits for: after 5 s, then each time after three times as long."""

    def __init__(self, now: float) -> None:
        self._started = now
        self._after = EXPLAIN_FIRST_SECONDS

    @property
    def due(self) -> float:
        """Clock time of the next line."""
        return self._started + self._after

    def say(self, label: str, now: float, why: str) -> None:
        """Logs a line, and puts off the next one."""
        self._after *= EXPLAIN_FACTOR
        tell(_log, logging.WARNING, "%s has waited for %.1f s: %s", label, now - self._started, why)
