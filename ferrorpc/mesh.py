"""Mesh: a group's ranks as a grid with named dimensions, such as data-parallel replicas and pipeline stages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from ferrorpc.consistency import require_same
from ferrorpc.errors import UsageError
from ferrorpc.failure import interrupts_told
from ferrorpc.group import ProcessGroup, group_given
from ferrorpc.types import integer_of


class Mesh:
    """A group's ranks as a grid with named dimensions.

        mesh = ferrorpc.Mesh({"dp": 2, "pp": 2}, group)
        pipe = ferrorpc.Pipeline(stage, mesh["pp"])           # ranks 0, 1 are one pipeline, ranks 2, 3 the other
        sync = ferrorpc.GradientSynchronizer(like, mesh["dp"])     # ranks 0, 2 hold the same stage, and ranks 1, 3

    Ranks are in row-major order: the last dimension varies fastest. So put the dimension last whose ranks communicate most.
    The groups of the dimensions belong to the group's generation and end with it.

    Args:
        dimensions: name -> number of ranks along it. The product must be the group's size.
        group: the group of all ranks. Every rank must make the mesh at the same point of its program, with the same dimensions.

    Raises:
        UsageError: the dimensions are invalid or do not fit the group's size. Nothing was sent then.
        CollectiveMismatchError: ranks gave different dimensions, or in another order.
    """

    def __init__(self, dimensions: Mapping[str, int], group: ProcessGroup) -> None:
        group = group_given(group)
        _check(dimensions, group.size)
        self._sizes = {name: int(size) for name, size in dimensions.items()}
        self.group = group
        self._coordinates = list(product(*(range(size) for size in self._sizes.values())))
        self._groups: dict[str, ProcessGroup] = {}
        with interrupts_told(group):
            require_same(group, "dimensions of the mesh", "\n".join(f"{name} {size}" for name, size in self._sizes.items()))
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
        """This rank's coordinate in each dimension, which is its rank in that dimension's group."""
        return self.coordinates_of(self.group.rank)

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank of the whole group. Raises UsageError if there is no such rank."""
        number = integer_of(rank)
        if not 0 <= number < len(self._coordinates):
            count = len(self._coordinates)
            raise UsageError(f"there is no rank {rank!r} in a mesh of {count}", hint=f"ranks go from 0 to {count - 1}")
        return dict(zip(self._sizes, self._coordinates[number], strict=True))

    def __getitem__(self, name: str) -> ProcessGroup:
        """The group of the ranks that differ from this one along this dimension only. Raises UsageError if there is none."""
        if name not in self._groups:
            raise UsageError(f"the mesh has no dimension {name!r}", hint=f"use one of: {', '.join(self._sizes) or 'none'}")
        return self._groups[name]

    def __iter__(self) -> Iterator[str]:
        """The names of the dimensions."""
        return iter(self._sizes)

    def _lines(self, axis: int) -> Iterator[list[int]]:
        """The ranks of each group along a dimension, in the same order on every rank."""
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank, at in enumerate(self._coordinates):
            lines.setdefault((*at[:axis], *at[axis + 1 :]), []).append(rank)
        yield from lines.values()

    def __repr__(self) -> str:
        shape = " x ".join(f"{name} {size}" for name, size in self._sizes.items())
        return f"<Mesh {shape}, rank {self.group.rank} at {self.coordinates}>"


def _check(sizes: Mapping[Any, Any], count: int) -> None:
    """Raises UsageError unless the sizes are those of a grid of `count` ranks."""
    hint = "give names and sizes, such as {'data': 2, 'stage': 4}"
    if not isinstance(sizes, Mapping):
        raise UsageError(f"dimensions={sizes!r} of a mesh is no dict", hint=hint)
    for name, size in sizes.items():
        if not isinstance(name, str) or integer_of(size) < 1:
            raise UsageError(f"dimension {name!r} of {size!r} ranks: names are text, sizes integers of at least 1", hint=hint)
    if math.prod(sizes.values()) != count:
        raise UsageError(
            f"a mesh {dict(sizes)} has {math.prod(sizes.values())} ranks, but the group has {count}",
            hint="choose sizes whose product is the group's size",
        )
