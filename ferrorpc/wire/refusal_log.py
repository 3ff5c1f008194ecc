"""Rate limit for log messages about refused connections, so that nobody can fill the log by connecting often."""

from __future__ import annotations

from typing import Final

LOGGED_MAX: Final = 20
"""At most so many refusals are logged in LOG_INTERVAL_NS; the others are only counted."""
LOG_INTERVAL_NS: Final = 10_000_000_000
QUOTED_CHARACTERS: Final = 128
"""Characters that are shown of a name that came over the network."""


class RefusalLog:
    """Counts refusals and decides which are logged. Pure: the time is passed in. Not thread-safe."""

    def __init__(self) -> None:
        self._since = -LOG_INTERVAL_NS
        self._count = 0

    def message(self, text: str, now_ns: int) -> str | None:
        """The message to log for a refusal; None for none."""
        untold = 0
        if now_ns - self._since >= LOG_INTERVAL_NS:
            untold, self._since, self._count = max(0, self._count - LOGGED_MAX), now_ns, 0
        self._count += 1
        if self._count > LOGGED_MAX:
            return None
        return f"{text} ({untold} earlier refusals were not told)" if untold else text


def quoted(name: str) -> str:
    """A name from the network, safe to log: quoted, so that it stays on its line, and cut to QUOTED_CHARACTERS."""
    return repr(name[:QUOTED_CHARACTERS]) + ("..." if len(name) > QUOTED_CHARACTERS else "")
