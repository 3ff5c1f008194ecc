"""Collectives on raw device pointers, for code that manages its own memory and wants the least overhead.

No array is inspected, no shape announced, no buffer kept alive. Pointers are addresses on this rank's GPU, counts are elements,
and the memory must stay valid and unchanged until the GPU has finished the operation. Deadlines and error checks of the
communicator are those of every other operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ferrorpc.arrays.device import Stream
from ferrorpc.backends.device.communicator import Communicator, Connector, DataType, Op, required
from ferrorpc.backends.device.context import GroupContext
from ferrorpc.backends.device.execution import ImmediateExecution
from ferrorpc.backends.device.launch import BYTES
from ferrorpc.collectives.driver import check_ended_here
from ferrorpc.errors import InvalidRankError, SelfSendError
from ferrorpc.guard import Guard
from ferrorpc.types import DType, ReduceOp, dtype_named


class RawOperations:
    """The raw forms of a backend's collectives.

    Every rank calls them in the same order among all its operations. Each returns once the operation is in the stream; with
    `stream` (CuPy's, or a CUDA stream as a number) in that one, else in the backend's own, between what the current stream
    holds now and what it holds next. `dtype` is a name such as "float32" or a DType.

    Raises:
        TensorMismatchError: the communicator lacks the operator for this dtype.
        UsageError: a CUDA graph is being captured from the stream.
        CollectiveTimeoutError: an earlier operation could not be launched in time.
        FerroError: the generation's first cause.
    """

    context: GroupContext
    _connector: Connector
    reductions: dict[tuple[str | ReduceOp, str | DType], tuple[Op, DataType, int]]
    """`communicator.required` of earlier calls, by operator and dtype as callers name them."""

    def all_reduce_raw(
        self, source: int, target: int, count: int, dtype: str | DType, op: str | ReduceOp = "sum", *, stream: Any = None
    ) -> None:
        """target[:count] = the reduction of every rank's source[:count]. `target` may be `source`."""
        chosen, datatype, factor = self._reduction(op, dtype)
        self._raw(
            lambda: f"all_reduce_raw(op={chosen.name.lower()}, {_name(dtype)}[{count}])",
            lambda end, pointer: end.all_reduce(source, target, factor * count, datatype, chosen, pointer),
            stream,
        )

    def broadcast_raw(
        self, source: int, target: int, count: int, dtype: str | DType, root: int = 0, *, stream: Any = None
    ) -> None:
        """target[:count] = source[:count] of rank `root`. Elsewhere `source` is not read."""
        size = self.context.size
        if not 0 <= root < size:
            raise InvalidRankError(f"root is {root!r}, but this group has ranks 0 to {size - 1}")
        size_bytes = count * _dtype(dtype).itemsize
        self._raw(
            lambda: f"broadcast_raw({_name(dtype)}[{count}], root={root})",
            lambda end, pointer: end.broadcast(source, target, size_bytes, BYTES, root, pointer),
            stream,
        )

    def all_gather_raw(self, source: int, target: int, count: int, dtype: str | DType, *, stream: Any = None) -> None:
        """target[:size * count] = every rank's source[:count], in rank order."""
        size_bytes = count * _dtype(dtype).itemsize
        self._raw(
            lambda: f"all_gather_raw({_name(dtype)}[{count}])",
            lambda end, pointer: end.all_gather(source, target, size_bytes, BYTES, pointer),
            stream,
        )

    def reduce_scatter_raw(
        self, source: int, target: int, count: int, dtype: str | DType, op: str | ReduceOp = "sum", *, stream: Any = None
    ) -> None:
        """target[:count] = this rank's part of the reduction of every rank's source[:size * count]."""
        chosen, datatype, factor = self._reduction(op, dtype)
        self._raw(
            lambda: f"reduce_scatter_raw(op={chosen.name.lower()}, {_name(dtype)}[{count}])",
            lambda end, pointer: end.reduce_scatter(source, target, factor * count, datatype, chosen, pointer),
            stream,
        )

    def exchange_raw(
        self, sends: Sequence[tuple[int, int, int]], recvs: Sequence[tuple[int, int, int]], *, stream: Any = None
    ) -> None:
        """Sends and receives as one launch, so that ranks may all send and receive at once.

        Every send needs its recv on the other rank, in that rank's call at the same place of the program.

        Args:
            sends: (source, bytes, group rank it goes to).
            recvs: (target, bytes, group rank it comes from); those from one rank in the order in which it sends them.
        """
        rank, size = self.context.rank, self.context.size
        for peer in (each[2] for each in (*sends, *recvs)):
            if not 0 <= peer < size:
                raise InvalidRankError(f"a peer is {peer!r}, but this group has ranks 0 to {size - 1}")
            if peer == rank:
                raise SelfSendError(f"rank {peer} cannot send to or receive from itself")

        def launch(end: Communicator, pointer: int) -> None:
            for source, size_bytes, peer in sends:
                end.send(source, size_bytes, BYTES, peer, pointer)
            for target, size_bytes, peer in recvs:
                end.recv(target, size_bytes, BYTES, peer, pointer)

        if sends or recvs:
            label = f"exchange_raw({len(sends)} sends, {len(recvs)} receives)"
            self._raw(lambda: label, lambda end, pointer: end.grouped(lambda: launch(end, pointer)), stream)

    def _reduction(self, op: str | ReduceOp, dtype: str | DType) -> tuple[Op, DataType, int]:
        try:
            found = self.reductions.get((op, dtype))
        except TypeError:  # what cannot be hashed is refused below
            found = None
        if found is None:
            library, size = self._connector.library, self.context.size
            found = self.reductions[op, dtype] = required(ReduceOp.named(op), _dtype(dtype), library, size)
        return found

    def _raw(self, label: Callable[[], str], launch: Callable[[Communicator, int], None], stream: Any) -> None:
        context, lanes = self.context, self.context.lanes
        lanes.latch.check()
        if lanes.latch.ended_here:
            check_ended_here(lanes.guard(None))
        given = None if stream is None else context.device.adopt(stream)
        if given is not None:
            context.device.check_not_captured(given, "given")
        execution = RawExecution(context, label, launch, given, lanes.guard(None))
        execution.enter()
        try:
            if not execution.ran():
                context.drive(execution)
                execution.ran()
        except BaseException as error:
            execution.struck(error)
            raise


class RawExecution(ImmediateExecution):
    """One run of a raw form."""

    def __init__(
        self,
        context: GroupContext,
        label: Callable[[], str],
        launch: Callable[[Communicator, int], None],
        given: Stream | None,
        guard: Guard,
    ) -> None:
        self._say = label
        self._run = launch
        super().__init__(context, guard, given)

    @property
    def label(self) -> str:
        return self._say()

    def launch(self, pointer: int) -> None:
        self._run(self.launch_queue.communicator, pointer)

    def probe(self) -> None:
        """Raw calls have no key under which other ranks could be probed."""


def _dtype(dtype: str | DType) -> DType:
    return dtype if isinstance(dtype, DType) else dtype_named(dtype)


def _name(dtype: str | DType) -> str:
    return _dtype(dtype).label
