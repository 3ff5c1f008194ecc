"""All deadlines of the coordinator, in one heap.

The heap is corrected lazily: moving a deadline to a later time does not touch it. A stale entry is removed when it reaches the
top. When stale entries outnumber the others, the heap is rebuilt, so memory is proportional to the number of deadlines set.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator

Action = Callable[[], None]


class Deadlines:
    """Deadlines by key, each with an action. Equal deadlines expire in the order in which they were set."""

    __slots__ = ("_armed", "_heap", "_order")

    def __init__(self) -> None:
        self._armed: dict[Hashable, tuple[int, Action]] = {}
        self._heap: list[tuple[int, int, Hashable]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._armed)

    def set(self, key: Hashable, when: int, action: Action) -> None:
        """Sets the deadline of `key`, or moves it."""
        before = self._armed.get(key)
        self._armed[key] = when, action
        if before is None or when < before[0]:
            self._push(when, key)

    def drop(self, key: Hashable) -> None:
        """Removes the deadline of `key`, if it is set."""
        self._armed.pop(key, None)
        if len(self._heap) > 2 * len(self._armed) + 64:
            self._rebuild()

    def earliest(self) -> int | None:
        """The next deadline; None if there is none."""
        while self._heap:
            when, _, key = self._heap[0]
            armed = self._armed.get(key)
            if armed is not None and armed[0] == when:
                return when
            heapq.heappop(self._heap)
            if armed is not None and armed[0] > when:
                self._push(armed[0], key)
        return None

    def expired(self, now: int) -> Iterator[Action]:
        """Removes the deadlines that have passed, one by one, and yields their actions.

        An action may still move or remove later ones.
        """
        while (when := self.earliest()) is not None and when <= now:
            _, _, key = heapq.heappop(self._heap)
            yield self._armed.pop(key)[1]

    def _push(self, when: int, key: Hashable) -> None:
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, key))

    def _rebuild(self) -> None:
        """Keeps the earliest entry of each deadline that is set."""
        first = {entry[2]: entry for entry in sorted(self._heap, reverse=True) if entry[2] in self._armed}
        self._heap = sorted(first.values())
