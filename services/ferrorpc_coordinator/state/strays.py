"""Processes that did not get as far as to ask for a place: those that were refused, and those that ended before their Hello."""

from __future__ import annotations

from typing import Final

from ferrorpc.logs import escape_unprintable
from ferrorpc_coordinator.state.context import JobContext
from ferrorpc_coordinator.state.settings import SECOND

STRAYS_MAX: Final = 16
"""Processes of each kind that are known."""
KNOWN_NS: Final = 600 * SECOND
"""How long one that was refused, or ended before its Hello, may be why a round is still open."""


class Strays:
    """Those of one job, for the words of those who wait for them, perhaps later."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._refusals: dict[str, tuple[int, str]] = {}
        self._exits: dict[str, tuple[int, str]] = {}

    def refused(self, name: str, why: str) -> None:
        """A process was refused."""
        _keep_last(self._refusals, name, (self._context.now, why[:512]))

    def exited(self, name: str, how: str, has_failed: bool) -> None:
        """A process ended. It counts unless it had been refused lately, and is told of in the job's log once."""
        name, how = escape_unprintable(name[:128]), escape_unprintable(how)[:512]
        if name in dict(self._lately(self._refusals)):
            return
        is_news = self._exits.get(name, (0, ""))[1] != how
        _keep_last(self._exits, name, (self._context.now, how))
        if has_failed and is_news:
            self._context.occurrences.add("dead", f"{name}: {how}, before it said Hello")

    def came(self, name: str) -> None:
        """A process of this name asks for a place."""
        self._refusals.pop(name, None)
        self._exits.pop(name, None)

    def clear(self) -> None:
        """The round is over."""
        self._refusals.clear()
        self._exits.clear()

    @property
    def refusals(self) -> list[str]:
        """Why processes were refused lately."""
        return [why for _, why in self._lately(self._refusals)]

    @property
    def exits(self) -> list[str]:
        """Who ended lately, and how."""
        return [f"{name}: {how}, before it said Hello" for name, how in self._lately(self._exits)]

    def _lately(self, known: dict[str, tuple[int, str]]) -> list[tuple[str, str]]:
        since = self._context.now - KNOWN_NS
        return [(name, what) for name, (when, what) in known.items() if when >= since]


def _keep_last(known: dict[str, tuple[int, str]], name: str, what: tuple[int, str]) -> None:
    """Keeps something for a name, and that of the last STRAYS_MAX names."""
    known.pop(name, None)
    known[name] = what
    while len(known) > STRAYS_MAX:
        del known[next(iter(known))]
