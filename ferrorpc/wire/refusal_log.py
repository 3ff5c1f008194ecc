"""RefusalLog in a log: told, but no more of them than somebody could want to read, however many strangers knock."""

from __future__ import annotations

from typing import Final

LOGGED_MAX: Final = 20
"""So many are told in LOG_INTERVAL_NS; of the others only how many they were."""
LOG_INTERVAL_NS: Final = 10_000_000_000
QUOTED_CHARACTERS: Final = 128
"""Of a name that came over the network."""


class RefusalLog:
    """Counts them. Pure: the time is passed in. One thread at a time."""

    def __init__(self) -> None:
        self._since = -LOG_INTERVAL_NS
        self._count = 0

    def message(self, text: str, now_ns: int) -> str | None:
        """What to tell of a refusal; None for nothing."""
        untold = 0
        if now_ns - self._since >= LOG_INTERVAL_NS:
            untold, self._since, self._count = max(0, self._count - LOGGED_MAX), now_ns, 0
        self._count += 1
        if self._count > LOGGED_MAX:
            return None
        return f"{text} ({untold} earlier refusals were not told)" if untold else text


def quoted(name: str) -> str:
    """A name from the network as messages show it: quoted, so that it stays on its line, and not longer than any is."""
    return repr(name[:QUOTED_CHARACTERS]) + ("..." if len(name) > QUOTED_CHARACTERS else "")
