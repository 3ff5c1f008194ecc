"""The groups that a rank has closed, and how far it came in each of their streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ferrorpc.wire.frames import BARRIER_STREAM, BESIDE, Key

CLOSED_GROUPS_MAX: Final = 65_536
"""Number of closed groups that are known."""


class ClosedGroups:
    """The groups that this rank has closed, of which the latest CLOSED_GROUPS_MAX are known."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, ...]] = {}

    def add(self, group: int, last: Sequence[int]) -> None:
        """Adds a group. `last`: as for `Backend.retire`."""
        self._last[group] = tuple(last)
        if len(self._last) > CLOSED_GROUPS_MAX:
            del self._last[next(iter(self._last))]

    def __contains__(self, group: int) -> bool:
        return group in self._last

    def last_in(self, key: Key) -> int | None:
        """The largest number that has begun in an operation's stream, -1 for none. None where its group is open, and for
        `Backend.barrier`, send and recv, whose numbers the group does not give."""
        last = self._last.get(key.group)
        if last is None or key.stream >= BARRIER_STREAM:
            return None
        stream = key.stream % BESIDE
        return last[stream] if stream < len(last) else -1

    def never_begins(self, key: Key) -> bool:
        """Whether an operation will not begin on this rank: it comes after the last one of its stream."""
        last = self.last_in(key)
        return last is not None and key.number > last
