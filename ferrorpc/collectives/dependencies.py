"""Which actions of a plan depend on which, element by element.

A plan means what its actions do in order. Another order gives the same result as long as no two actions that touch the same
element, at least one of them writing it, are swapped for that element. Actions process their regions from the first element to
the last, so the progress of an action is one number, and it bounds what the others may do. That lets the executor send the
first chunk of a slice on while later chunks still arrive, without the plan having to say so.

OUT may be the memory of IN where a call works in place, so the two then count as one array.

Cost: each action depends at most on the last writer of each of its elements and on those that have read them since.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

from ferrorpc.collectives.algorithms.plan import Buffer, Copy, Finish, FoldOwn, Load, Region, Send
from ferrorpc.collectives.fusion import Reduce, Task, UploadResult

UNBOUNDED: Final = 1 << 62
"""More elements than any array has: the progress of a complete action, and the end of an array of unknown size."""


class Wait(NamedTuple):
    """The waiting action may touch elements [low, high) of an array once `action` has done them."""

    action: int
    first: int
    """Where that action's region begins in that array."""
    low: int
    high: int
    start: int
    """Where the region of the waiting action begins in it."""


class Dependencies(NamedTuple):
    """The dependencies of one action.

    Attributes:
        waits: what it waits for.
        wakes: indices of the actions that wait for it.
    """

    waits: tuple[Wait, ...]
    wakes: tuple[int, ...]


def bound(waits: tuple[Wait, ...], done: list[int]) -> int:
    """The element up to which an action may go. `done`: elements that each action has done, UNBOUNDED when complete."""
    furthest = UNBOUNDED
    for action, first, low, high, start in waits:
        position = first + done[action]
        if position < high:
            allowed = (position if position > low else low) - start
            if allowed < furthest:
                furthest = allowed
    return furthest


def dependencies_of(tasks: Sequence[Task], own: int | None) -> tuple[Dependencies, ...]:
    """The dependencies of each task of a rank, in their order. Arguments as for `waits_of`."""
    waits = waits_of(tasks, own)
    wakes: list[list[int]] = [[] for _ in waits]
    for index, each in enumerate(waits):
        for wait in each:
            wakes[wait.action].append(index)
    return tuple(Dependencies(each, tuple(dict.fromkeys(woken))) for each, woken in zip(waits, wakes, strict=True))


def waits_of(tasks: Sequence[Task], own: int | None) -> list[tuple[Wait, ...]]:
    """What each task of a rank waits for, in their order.

    Args:
        own: the input whose memory the first result may be; None where none may.
    """
    histories: dict[tuple[Buffer, int], _History] = {}
    waits: list[tuple[Wait, ...]] = []
    last_fence = -1
    for index, action in enumerate(tasks):
        if action.region.is_empty:
            # It moves nothing and is a fence: it waits for all actions before it, and all after it wait for it.
            found = [_whole(earlier) for earlier in range(max(last_fence, 0), index)]
            last_fence = index
        else:
            found = [_whole(last_fence)] if last_fence >= 0 else []
            for region, writes in _touched(action):
                place = (Buffer.IN, own) if region.buffer is Buffer.OUT and own is not None else (region.buffer, region.item)
                found += histories.setdefault(place, _History()).touch(index, region, writes)
        waits.append(tuple(found))
    return waits


def _whole(index: int) -> Wait:
    """A wait until action `index` is complete."""
    return Wait(index, -UNBOUNDED, 0, 0, 0)


def _touched(action: Task) -> Iterator[tuple[Region, bool]]:
    """The regions an action touches, and whether it writes them."""
    if isinstance(action, Reduce):
        yield from ((operand, False) for operand in action.operands if isinstance(operand, Region))
    elif isinstance(action, Load | FoldOwn | Finish | Copy):
        yield action.source, False
    yield action.region, not isinstance(action, Send | UploadResult)


class _Access(NamedTuple):
    """An action that accessed elements of an array, and where its region there begins."""

    action: int
    first: int


class _Run(NamedTuple):
    """Elements [low, high) of an array: the action that wrote them last, and those that have read them since."""

    low: int
    high: int
    writer: _Access | None
    readers: tuple[_Access, ...]

    def before(self, writes: bool) -> Iterator[_Access]:
        """The accesses that an action which reads or writes these elements depends on."""
        if self.writer is not None:
            yield self.writer
        if writes:
            yield from self.readers


_LOW: Final = attrgetter("low")


class _History:
    """The accesses to one array, as runs of elements, each run where the one before it ends."""

    def __init__(self) -> None:
        self._runs: list[_Run] = [_Run(0, UNBOUNDED, None, ())]

    def touch(self, index: int, region: Region, writes: bool) -> list[Wait]:
        """Records that action `index` reads or writes a region. Returns its waits; overlaps with one action become one wait."""
        low, high = region.start, UNBOUNDED if region.stop is None else region.stop
        own = _Access(index, low)
        extents: dict[_Access, tuple[int, int]] = {}
        runs: list[_Run] = []
        overlapping = slice(bisect_right(self._runs, low, key=_LOW) - 1, bisect_left(self._runs, high, key=_LOW))
        for run in self._runs[overlapping]:
            first, last = max(run.low, low), min(run.high, high)
            for earlier in run.before(writes):
                if earlier.action != index:
                    extents[earlier] = extents.get(earlier, (first, last))[0], last
            if run.low < low:
                runs.append(run._replace(high=low))
            runs.append(_Run(first, last, own, ()) if writes else _Run(first, last, run.writer, (*run.readers, own)))
            if high < run.high:
                runs.append(run._replace(low=high))
        self._runs[overlapping] = runs
        return [Wait(*earlier, *extent, low) for earlier, extent in extents.items()]
