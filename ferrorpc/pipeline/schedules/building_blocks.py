"""Building blocks of the named schedules: placements of pieces, groups of microbatches, and rows that are filled in order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ferrorpc.errors import UsageError
from ferrorpc.pipeline.actions import Action, F, Kind
from ferrorpc.types import integer_of

DOWN, UP = 0, 1
"""The chunks of a rank in a V-shaped placement: on the way down the ranks, and back up."""


def counts_of(name: str, **counts: Any) -> list[int]:
    """The counts, in the order given. Raises UsageError unless every one is an integer of at least 1."""
    found = []
    for what, count in counts.items():
        found.append(integer_of(count))
        if found[-1] < 1:
            raise UsageError(f"{name} with {what}={count!r}: {what} is an integer of at least 1", hint=f"pass {what}=4, say")
    return found


def loop_placement(rank: int, stages: int, chunks: int) -> list[int]:
    """The pieces of a rank where the model goes round the ranks `chunks` times: rank, rank + stages, ..."""
    return [rank + chunk * stages for chunk in range(chunks)]


def v_placement(rank: int, stages: int) -> list[int]:
    """The two pieces of a rank where the model goes down the ranks and back up: the last rank has the middle of the model."""
    return [rank, 2 * stages - 1 - rank]


def microbatch_groups(stages: int, microbatches: int) -> list[range]:
    """Microbatches in groups of at least `stages`, of nearly equal size, larger ones first; one group if there are fewer."""
    count = max(1, microbatches // stages)
    each, more = divmod(microbatches, count)
    starts = [number * each + min(number, more) for number in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


class RowBuilder:
    """Builds a rank's row of actions. A chunk's forwards, and its backwards, take its microbatches in ascending order.

    Args:
        pieces: the pieces of the model that the rank holds, by chunk.
        microbatches: how many there are.
    """

    def __init__(self, pieces: Sequence[int], microbatches: int) -> None:
        self.actions: list[Action] = []
        self._pieces = pieces
        self._microbatches = microbatches
        self._forwards = [0] * len(pieces)
        self._backwards = [0] * len(pieces)
        """How many were added, by chunk; each microbatch has one backward, whole or in two parts."""
        self._due: list[Action] = []
        """Backwards of weights that are due, in the order of their backwards of the input."""

    def add(self, kind: Kind, chunk: int) -> None:
        """Adds the next microbatch's forward or backward on this chunk, if there is one left."""
        added = self._forwards if kind is F else self._backwards
        microbatch = added[chunk]
        if microbatch >= self._microbatches:
            return
        added[chunk] += 1
        self.actions.append(Action(self._pieces[chunk], kind, microbatch))
        if kind is Kind.BACKWARD_INPUT:
            self._due.append(Action(self._pieces[chunk], Kind.BACKWARD_WEIGHT, microbatch))

    def add_weight(self, chunk: int | None = None) -> None:
        """Adds the oldest backward of weights that is due, of this chunk or of any, if there is one."""
        oldest = next((each for each in self._due if chunk is None or each.stage == self._pieces[chunk]), None)
        if oldest is not None:
            self._due.remove(oldest)
            self.actions.append(oldest)

    def forwards_left(self, chunk: int) -> int:
        """How many forwards of a chunk are still to be added."""
        return self._microbatches - self._forwards[chunk]


def alternating_rows(stages: int, microbatches: int, chunks: int, backward: Kind, warm_up: int) -> list[list[Action]]:
    """The rows of 1F1B and its kin: rank r warms up with forwards, then each forward is followed by a backward.

    Microbatches go in groups of k: a group passes all chunks before the next group begins.

    Args:
        backward: B for whole backwards; I for those of the input, whose backwards of weights follow r backwards later.
        warm_up: rank r begins with (v-1)k + warm_up * (p-1-r) forwards.
    """
    groups = microbatch_groups(stages, microbatches)
    forwards = [chunk for group in groups for chunk in range(chunks) for _ in group]
    backwards = [chunk for group in groups for chunk in reversed(range(chunks)) for _ in group]
    rows = []
    for rank in range(stages):
        row = RowBuilder(loop_placement(rank, stages, chunks), microbatches)
        ahead = (chunks - 1) * len(groups[0]) + warm_up * (stages - 1 - rank)
        for chunk in forwards[:ahead]:
            row.add(F, chunk)
        for place, chunk in enumerate(backwards):
            if ahead + place < len(forwards):
                row.add(F, forwards[ahead + place])
            row.add(backward, chunk)
            if place >= rank:
                row.add_weight()
        for _ in range(rank):
            row.add_weight()
        rows.append(row.actions)
    return rows
