"""What a rank has begun in the groups that it has closed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from ferrorpc.wire.frames import BARRIER_STREAM, BESIDE, Key

CLOSED_GROUPS_MAX: Final = 65_536
"""Number of closed groups that are known."""

REASON_CHARACTERS_MAX: Final = 1_000
"""How much is kept of an exception's text, which may be of any length."""

GAPS_MAX: Final = 64
"""How many gaps of a stream are known. Of operations in older ones nobody says that they never begin."""


class Begun(NamedTuple):
    """The numbers that have begun in a stream: those up to `last` (-1: none), but for the gaps."""

    last: int = -1
    gaps: tuple[range, ...] = ()

    def with_number(self, number: int) -> Begun:
        """These and another one."""
        if number > self.last:
            skipped = range(self.last + 1, number)
            return Begun(number, (*self.gaps, skipped)[-GAPS_MAX:] if skipped else self.gaps)
        parts = [part for gap in self.gaps for part in _without(gap, number)]
        return Begun(self.last, tuple(parts[-GAPS_MAX:]))

    def has(self, number: int) -> bool:
        """Whether a number has begun."""
        return number <= self.last and not any(number in gap for gap in self.gaps)


def _without(gap: range, number: int) -> list[range]:
    if number not in gap:
        return [gap]
    return [part for part in (range(gap.start, number), range(number + 1, gap.stop)) if part]


class ClosedGroups:
    """The groups that this rank has closed, of which the latest CLOSED_GROUPS_MAX are known."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[Begun, ...]] = {}
        self._reasons: dict[int, str] = {}
        """Only of groups that have one."""

    def add(self, group: int, begun: Sequence[Begun], reason: str = "") -> None:
        """Adds a group. The arguments are those of `Backend.retire`."""
        self._begun[group] = tuple(begun)
        if reason:
            self._reasons[group] = reason[:REASON_CHARACTERS_MAX]
        if len(self._begun) > CLOSED_GROUPS_MAX:
            oldest = next(iter(self._begun))
            del self._begun[oldest]
            self._reasons.pop(oldest, None)

    def __contains__(self, group: int) -> bool:
        return group in self._begun

    def explain(self, key: Key, signature: str) -> str:
        """What to tell a peer that waits for this rank in an operation of a closed group."""
        reason = self._reasons.get(key.group)
        cause = f"; it had left by {reason}" if reason else ""
        return f"it closed a subgroup in which others wait for it: {signature} #{key.number}{cause}"

    def begun_in_stream_of(self, key: Key) -> Begun | None:
        """What has begun in an operation's stream. None where its group is open, and for send, recv and `Backend.barrier`,
        which are in no stream that the group numbers."""
        streams = self._begun.get(key.group)
        if streams is None or key.stream >= BARRIER_STREAM:
            return None
        stream = key.stream % BESIDE
        return streams[stream] if stream < len(streams) else Begun()

    def never_begins(self, key: Key) -> bool:
        """Whether an operation of a closed group has not begun on this rank, and so never will."""
        begun = self.begun_in_stream_of(key)
        return begun is not None and not begun.has(key.number)
