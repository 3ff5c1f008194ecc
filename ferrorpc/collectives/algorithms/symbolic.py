"""Symbolic arrays for the validator: what the elements of a plan's arrays are computed from, instead of their values.

A `Term` says which ranks' elements were folded, and in which order. A `SymbolicArray` is an array as runs of neighbouring
elements with one term each, so arrays of any length cost no more than the number of cuts in them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Term:
    """The symbolic value of a run.

    Attributes:
        text: the formula, such as "((x0+x1)+x2)", or "q(x1)" once a codec has rounded it; equal texts, equal bits.
        ranks: the ranks whose parts it holds, in the order they were folded.
        item: which of its ranks' IN arrays it comes from.
        chain: it is a left fold: every right operand was one rank's own part.
        finished: a reduction's last division and rounding was done.
    """

    text: str
    ranks: tuple[int, ...]
    item: int
    chain: bool = True
    finished: bool = False


Run: TypeAlias = tuple[int, int, Term | None]
"""A number of elements, the position of the first in its IN array, and their term; None: never written."""


def length(piece: Sequence[Run]) -> int:
    """Elements of a sequence of runs."""
    return sum([run[0] for run in piece])


class SymbolicArray:
    """An array. Runs are found by bisection; what is written replaces only the runs it meets."""

    __slots__ = ("_ends", "_runs")

    def __init__(self, runs: Sequence[Run] = ()) -> None:
        self.become(runs)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def become(self, runs: Sequence[Run]) -> None:
        """Replaces its contents."""
        self._runs = [run for run in runs if run[0]]
        self._ends = list(accumulate([run[0] for run in self._runs]))

    def cut(self, start: int, stop: int) -> list[Run]:
        """Elements [start, stop), as far as they exist."""
        piece: list[Run] = []
        index = bisect_right(self._ends, start)
        while start < stop and index < len(self._ends):
            count, first, term = self._runs[index]
            end = self._ends[index]
            offset = start - (end - count)
            after = min(stop, end)
            piece.append((after - start, first + offset, term))
            start = after
            index += 1
        return piece

    def paste(self, start: int, piece: Sequence[Run]) -> None:
        """Writes runs at element `start`; what lies between the end and there is unwritten."""
        end, stop = len(self), start + length(piece)
        if start == 0 and stop >= end:
            self.become(piece)
            return
        if start > end:
            self._runs.append((start - end, 0, None))
            self._ends.append(start)
        low, high = bisect_right(self._ends, start), bisect_right(self._ends, stop)
        from_ = self._ends[low - 1] if low else 0
        until = self._ends[high] if high < len(self._ends) else stop
        fresh = [*self.cut(from_, start), *(run for run in piece if run[0]), *self.cut(stop, until)]
        self._runs[low : high + 1] = fresh
        self._ends[low : high + 1] = list(accumulate([run[0] for run in fresh], initial=from_))[1:]


def aligned(left: Sequence[Run], right: Sequence[Run]) -> Iterator[tuple[Run, Run]]:
    """Two sequences of equal length, cut wherever either of them is."""
    here, there = iter(left), iter(right)
    one: Run = (0, 0, None)
    other: Run = one
    left_over = right_over = 0
    while True:
        if not left_over:
            one = next(here, (0, 0, None))
            left_over = one[0]
        if not right_over:
            other = next(there, (0, 0, None))
            right_over = other[0]
        count = min(left_over, right_over)
        if not count:
            return
        yield (count, one[1] + one[0] - left_over, one[2]), (count, other[1] + other[0] - right_over, other[2])
        left_over -= count
        right_over -= count


def fold(left: Term, right: Term) -> Term:
    """left op right."""
    chain = left.chain and len(right.ranks) == 1
    return Term(f"({left.text}+{right.text})", left.ranks + right.ranks, left.item, chain)
