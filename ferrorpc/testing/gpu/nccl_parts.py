"""One rank's call of the fake NCCL, and what a collective does once all ranks have made theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ferrorpc.backends.device.communicator import DataType, Op
from ferrorpc.testing.gpu.elements import elements_at, reduced
from ferrorpc.testing.gpu.machine import Gpu

Array = np.ndarray[Any, Any]


@dataclass
class Part:
    """One call of one rank. A group may have several."""

    kind: str
    source: int
    target: int
    count: int
    datatype: DataType
    op: Op | None = None
    peer: int = -1
    """The root, or the other rank of a send or recv; -1 if there is none."""
    given: Array | None = None
    """The input of a rank that receives no result, copied so that the rank can complete before the others."""

    @property
    def agreed(self) -> tuple[object, ...]:
        """The parameters that must be equal on every rank."""
        return self.kind, self.count, self.datatype, self.op, self.peer


def perform(gpus: Sequence[Gpu], parts: dict[int, Part]) -> None:
    """Executes a collective that all ranks have reached.

    Args:
        gpus: those of the ranks.
        parts: the ranks' calls.
    """
    first = parts[0]
    size, kind, count = len(parts), first.kind, first.count

    def read(rank: int, elements: int) -> Array:
        given = parts[rank].given
        return elements_at(gpus[rank], parts[rank].source, elements, first.datatype).copy() if given is None else given

    def write(rank: int, values: Array) -> None:
        elements_at(gpus[rank], parts[rank].target, values.size, first.datatype)[:] = values

    if kind == "broadcast":
        values = read(first.peer, count)
        for rank in set(range(size)) - {first.peer}:
            write(rank, values)
    elif kind == "all_gather":
        values = np.concatenate([read(rank, count) for rank in range(size)])
        for rank in range(size):
            write(rank, values)
    elif kind == "reduce_scatter":
        total = _total([read(rank, count * size) for rank in range(size)], first)
        for rank in range(size):
            write(rank, total[rank * count : (rank + 1) * count])
    else:
        total = _total([read(rank, count) for rank in range(size)], first)
        for rank in range(size) if kind == "all_reduce" else (first.peer,):
            write(rank, total)


def _total(arrays: list[Array], part: Part) -> Array:
    if part.op is None:
        raise AssertionError(f"{part.kind} reduces nothing")
    return reduced(arrays, part.op, part.datatype)
