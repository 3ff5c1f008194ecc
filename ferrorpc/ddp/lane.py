"""The operations by which one bucket goes round the group, and the bytes they take."""

from __future__ import annotations

from typing import Any

from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.select import sent_bytes
from ferrorpc.ddp.memory import Array
from ferrorpc.operations.stream import Stream
from ferrorpc.types import ReduceOp, TensorSpec, dtype_of
from ferrorpc.work import Work


class Traffic:
    """Bytes that the busiest rank has sent for gradients, by the algorithms that were chosen.

    Attributes:
        sent_bytes: in all rounds so far.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent_bytes = 0
        self._known: dict[tuple[Operation, TensorSpec, ReduceOp | None, str | None], int] = {}

    def note(self, operation: Operation, array: Array, op: ReduceOp | None = None, wire: str | None = None) -> None:
        """An operation was begun."""
        key = operation, TensorSpec(dtype_of(array.dtype), array.shape), op, wire
        if key not in self._known:
            self._known[key] = sent_bytes(Call(operation, (key[1],), op, wire=wire), self.size)
        self.sent_bytes += self._known[key]


class Lane:
    """Begins the operations of one bucket in one round, one after the other.

    Args:
        first: number of the first one in the stream; every rank begins the same ones in the same order.
        traffic: is told of each.
    """

    def __init__(self, stream: Stream, first: int, traffic: Traffic) -> None:
        self.size = traffic.size
        self._stream = stream
        self._next = first
        self._traffic = traffic

    def all_reduce(self, array: Array, op: ReduceOp = ReduceOp.SUM, wire: str | None = None) -> Work[Any]:
        """Reduces an array over all ranks, in place."""
        self._traffic.note(Operation.ALL_REDUCE, array, op, wire)
        work: Work[Any] = self._stream.all_reduce(array, self._number(), op=op, out=array, wire=wire)
        return work

    def all_gather(self, array: Array) -> Work[list[Array]]:
        """Every rank's array, in rank order."""
        self._traffic.note(Operation.ALL_GATHER, array)
        work: Work[list[Array]] = self._stream.all_gather(array, self._number())
        return work

    def _number(self) -> int:
        number, self._next = self._next, self._next + 1
        return number
