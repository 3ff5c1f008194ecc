"""The collectives that reduce one bucket, numbered within the buckets' stream, and a count of the bytes they send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ferrorpc.arrays.numpy_kind import dtype_in
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.select import sent_bytes
from ferrorpc.ddp.bucket_memory import Array
from ferrorpc.errors import UsageError
from ferrorpc.operations.stream import Stream
from ferrorpc.types import ReduceOp, TensorSpec
from ferrorpc.work import Work


class Traffic:
    """Counts the bytes that the busiest rank sends for gradients, given the algorithms that were chosen.

    Attributes:
        sent_bytes: in all steps so far.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent_bytes = 0
        self._bytes_of: dict[tuple[Operation, tuple[TensorSpec, ...], ReduceOp | None, str | None], int] = {}

    def count(self, operation: Operation, arrays: Sequence[Array], op: ReduceOp | None = None, wire: str | None = None) -> None:
        """Adds one operation's bytes."""
        key = operation, tuple([TensorSpec(dtype_in(array), array.shape) for array in arrays]), op, wire
        if key not in self._bytes_of:
            self._bytes_of[key] = sent_bytes(Call(operation, key[1], op, wire=wire), self.size)
        self.sent_bytes += self._bytes_of[key]


class BucketCollectives:
    """Starts the collectives of one bucket in one step, one after the other. A hook is given one for each exchange.

    Args:
        first: number of the first one in the stream. Every rank starts the same ones in the same order.
        count: how many there may be; the next number is the next bucket's.
        traffic: counts each of them.

    Attributes:
        rank: of this process among the `size` ranks.
    """

    def __init__(self, stream: Stream, first: int, count: int, traffic: Traffic) -> None:
        self.rank = stream.rank
        self.size = traffic.size
        self._stream = stream
        self._next = first
        self._stop = first + count
        self._traffic = traffic

    def all_reduce(self, array: Array, op: ReduceOp = ReduceOp.SUM, wire: str | None = None) -> Work[Any]:
        """Reduces an array over all ranks, in place."""
        self._traffic.count(Operation.ALL_REDUCE, [array], op, wire)
        work: Work[Any] = self._stream.all_reduce(array, self._number(), op=op, out=array, wire=wire)
        return work

    def reduce_scatter(self, parts: Sequence[Array], op: ReduceOp = ReduceOp.SUM, wire: str | None = None) -> Work[Any]:
        """Reduces parts[r] over all ranks, for rank r. With a `wire`, the result is float32 that was not rounded again."""
        self._traffic.count(Operation.REDUCE_SCATTER, parts, op, wire)
        work: Work[Any] = self._stream.reduce_scatter(parts, self._number(), op=op, wire=wire)
        return work

    def all_gather(self, array: Array) -> Work[list[Array]]:
        """Gathers every rank's array, in rank order."""
        self._traffic.count(Operation.ALL_GATHER, [array])
        work: Work[list[Array]] = self._stream.all_gather(array, self._number())
        return work

    def _number(self) -> int:
        if self._next == self._stop:
            raise UsageError("a hook starts more collectives for a bucket than its `operations`", hint="set it to their number")
        number, self._next = self._next, self._next + 1
        return number
