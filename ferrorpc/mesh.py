"""Mesh: the ranks of a group along named dimensions, such as replicas of a model and the stages of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from ferrorpc.errors import UsageError
from ferrorpc.group import ProcessGroup, group_given


class Mesh:
    """A group's ranks as a grid with named dimensions.

        mesh = ferrorpc.Mesh({"dp": 2, "pp": 2}, group)
        pipe = ferrorpc.Pipeline(stage, mesh["pp"])           # ranks 0, 1 are one pipeline, ranks 2, 3 the other
        sync = ferrorpc.GradientSynchronizer(like, mesh["dp"])     # ranks 0, 2 hold the same stage, and ranks 1, 3

    Ranks are laid out as NumPy lays out elements: the last dimension runs fastest, so put that last whose ranks talk most.
    The groups live in the group's generation and end with it.

    Args:
        dimensions: name -> how many ranks along it; their product is the group's size.
        group: every rank constructs the mesh at the same point of its program, with the same dimensions.

    Raises:
        UsageError: the dimensions are not those of a grid of this group's ranks. Nothing was sent then.
        CollectiveMismatchError: ranks gave different dimensions.
    """

    def __init__(self, dimensions: Mapping[str, int], group: ProcessGroup) -> None:
        group = group_given(group)
        self._sizes = dict(dimensions)
        _check(self._sizes, group.size)
        self.group = group
        self._places = list(product(*(range(size) for size in self._sizes.values())))
        self._groups: dict[str, ProcessGroup] = {}
        for axis, name in enumerate(self._sizes):
            for ranks in self._lines(axis):
                along = group.subgroup(ranks)
                if along is not None:
                    self._groups[name] = along

    @property
    def sizes(self) -> dict[str, int]:
        """How many ranks there are along each dimension."""
        return dict(self._sizes)

    @property
    def coordinates(self) -> dict[str, int]:
        """Where this rank is: its rank in each dimension's group."""
        return self.coordinates_of(self.group.rank)

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """Where a rank of the whole group is. Raises UsageError if there is no such rank."""
        if not 0 <= rank < len(self._places):
            raise UsageError(f"there is no rank {rank} in a mesh of {len(self._places)}")
        return dict(zip(self._sizes, self._places[rank], strict=True))

    def __getitem__(self, name: str) -> ProcessGroup:
        """The group of the ranks that differ from this one along this dimension only. Raises UsageError if there is none."""
        if name not in self._groups:
            raise UsageError(f"the mesh has no dimension {name!r}", hint=f"use one of: {', '.join(self._sizes) or 'none'}")
        return self._groups[name]

    def _lines(self, axis: int) -> Iterator[list[int]]:
        """The ranks of each group along a dimension, in the same order on every rank."""
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(self._places):
            lines.setdefault((*place[:axis], *place[axis + 1 :]), []).append(rank)
        yield from lines.values()

    def __repr__(self) -> str:
        shape = " x ".join(f"{name} {size}" for name, size in self._sizes.items())
        return f"<Mesh {shape}, rank {self.group.rank} at {self.coordinates}>"


def _check(sizes: Mapping[Any, Any], count: int) -> None:
    """Raises UsageError unless it is a grid of so many ranks."""
    for name, size in sizes.items():
        if not isinstance(name, str) or type(size) is not int or size < 1:
            raise UsageError(f"dimension {name!r} of {size!r} ranks: names are text, sizes integers of at least 1")
    if math.prod(sizes.values()) != count:
        raise UsageError(
            f"a mesh {sizes} has {math.prod(sizes.values())} ranks, but the group has {count}",
            hint="choose sizes whose product is the group's size",
        )
