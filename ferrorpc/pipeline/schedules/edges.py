"""Edges: which piece's output goes to which. Most models are a chain; edges may also skip pieces or form branches."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any, TypeAlias

from ferrorpc.errors import UsageError

Edge: TypeAlias = tuple[int, int]
"""(from piece, to piece)."""


class Edges:
    """The edges between the pieces of a model, all from earlier to later ones.

    Args:
        pieces: how many there are.
        pairs: (from, to); None for the chain 0, 1, 2, ...

    Raises:
        UsageError: an edge leads backwards or to no piece, or is there twice; a piece other than the first has no input, or one
            other than the last no output.
    """

    def __init__(self, pieces: int, pairs: Iterable[Edge] | None = None) -> None:
        chosen = [(piece, piece + 1) for piece in range(pieces - 1)] if pairs is None else _checked(pairs)
        self._after: list[list[int]] = [[] for _ in range(pieces)]
        self._before: list[list[int]] = [[] for _ in range(pieces)]
        for source, target in sorted(chosen):
            if not 0 <= source < target < pieces:
                raise UsageError(
                    f"there can be no edge from piece {source} to piece {target} of a model of {pieces}",
                    hint="edges lead from a piece to a later one; pieces count from 0",
                )
            if target in self._after[source]:
                raise UsageError(f"the edge from piece {source} to piece {target} is there twice", hint="list each edge once")
            self._after[source].append(target)
            self._before[target].append(source)
        for piece in range(pieces):
            if piece > 0 and not self._before[piece]:
                raise UsageError(f"no edge leads to piece {piece}", hint="only piece 0 takes the batch")
            if piece < pieces - 1 and not self._after[piece]:
                raise UsageError(f"no edge leads on from piece {piece}", hint="only the last piece gives the output")

    @property
    def pairs(self) -> tuple[Edge, ...]:
        """All of them, in ascending order."""
        return tuple((source, target) for source, targets in enumerate(self._after) for target in targets)

    def after(self, piece: int) -> list[int]:
        """The pieces that take its output, in ascending order."""
        return self._after[piece]

    def before(self, piece: int) -> list[int]:
        """The pieces whose output it takes, in ascending order."""
        return self._before[piece]


def _checked(pairs: Any) -> list[Edge]:
    hint = "list pairs of pieces: [(0, 1), (0, 2), (1, 2)]"
    if not isinstance(pairs, Iterable):
        raise UsageError(f"edges={pairs!r} are no edges", hint=hint)
    chosen = []
    for pair in pairs:
        ends = tuple(pair) if isinstance(pair, Iterable) else ()
        if len(ends) != 2 or not all(isinstance(end, Integral) for end in ends):
            raise UsageError(f"{pair!r} is no edge", hint=hint)
        chosen.append((int(ends[0]), int(ends[1])))
    return chosen
