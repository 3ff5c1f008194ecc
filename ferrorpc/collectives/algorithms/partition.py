"""Slices of arrays and the order of peers, which every algorithm needs."""

from __future__ import annotations

from itertools import pairwise

from ferrorpc.collectives.algorithms.plan import Buffer, Region


def slices(count: int, size: int) -> list[tuple[int, int]]:
    """`size` contiguous runs [start, stop) that cover `count` elements; lengths differ by at most one, longer ones first."""
    short, longer = divmod(count, size)
    starts = [rank * short + min(rank, longer) for rank in range(size + 1)]
    return list(pairwise(starts))


def holds(cut: tuple[int, int]) -> bool:
    """Whether a run has elements."""
    return cut[0] < cut[1]


def joined(buffer: Buffer, cuts: list[tuple[int, int]], first: int, last: int) -> Region:
    """The region of the neighbouring runs [first, last)."""
    return Region(buffer, 0, cuts[first][0], cuts[last - 1][1])


def others(rank: int, size: int) -> list[int]:
    """All other ranks, beginning with the next, so that ranks that start together do not all send to rank 0 first."""
    return [(rank + step) % size for step in range(1, size)]
