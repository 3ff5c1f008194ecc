"""Arrays of symbols: what a plan's arrays hold, told by how it came about instead of by numbers.

A `Term` says of some neighbouring elements whose parts they hold and in which order these were folded. A strip is an array as
a list of runs (length, term), so arrays of any length cost no more than the number of cuts in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Term:
    """The symbolic value of one run.

    Attributes:
        text: how it came about, such as "((x0+x1)+x2)", or "q(x1)" once a codec has rounded it; equal texts, equal bits.
        ranks: whose parts it holds, in the order they were folded.
        item, first: where its first element was in its ranks' IN.
        chain: it is a left fold: every right operand was one rank's own part.
        finished: a reduction's last division and rounding was done.
    """

    text: str
    ranks: tuple[int, ...]
    item: int
    first: int = 0
    chain: bool = True
    finished: bool = False

    def later(self, elements: int) -> Term:
        """The same of elements further on in the run."""
        return replace(self, first=self.first + elements) if elements else self


Run: TypeAlias = tuple[int, Term | None]
"""A number of elements and their term; None: never written."""


def length(strip: Sequence[Run]) -> int:
    """Elements of a strip."""
    return sum(count for count, _ in strip)


def cut(strip: Sequence[Run], start: int, stop: int) -> list[Run]:
    """Elements [start, stop) of a strip, as far as there are so many."""
    piece: list[Run] = []
    position = 0
    for count, term in strip:
        low, high = max(start, position), min(stop, position + count)
        if low < high:
            piece.append((high - low, term and term.later(low - position)))
        position += count
    return piece


def paste(strip: Sequence[Run], start: int, piece: Sequence[Run]) -> list[Run]:
    """The strip with `piece` written at element `start`; what lies between its end and there is unwritten."""
    end = length(strip)
    gap: list[Run] = [(start - end, None)] if start > end else []
    return [*cut(strip, 0, start), *gap, *piece, *cut(strip, start + length(piece), end)]


def aligned(left: Sequence[Run], right: Sequence[Run]) -> Iterator[tuple[int, Term | None, Term | None]]:
    """Two strips of equal length, cut wherever one of them is."""
    position, end = 0, length(left)
    while position < end:
        ahead_left, ahead_right = cut(left, position, end), cut(right, position, end)
        count = min(ahead_left[0][0], ahead_right[0][0])
        yield count, ahead_left[0][1], ahead_right[0][1]
        position += count


def fold(left: Term, right: Term) -> Term:
    """left op right."""
    chain = left.chain and len(right.ranks) == 1
    return Term(f"({left.text}+{right.text})", left.ranks + right.ranks, left.item, left.first, chain)
