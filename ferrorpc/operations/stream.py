"""Streams: operations outside of program order, whose numbers their user gives."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Unpack, overload

from numpy.typing import NDArray

from ferrorpc.arrays.base import View
from ferrorpc.arrays.kinds import kind_of
from ferrorpc.collectives.arena.arena import Arena
from ferrorpc.collectives.call import Operation
from ferrorpc.collectives.ranks_and_tags import number_of, rank_of
from ferrorpc.guard import Clock, Guard, seconds_of
from ferrorpc.operations.arguments import Arguments
from ferrorpc.operations.dispatch import Dispatch
from ferrorpc.operations.results import Result
from ferrorpc.operations.type_hints import A, Op, Parts, Readable, Reducing, Timed
from ferrorpc.types import DType, ReduceOp, TensorSpec
from ferrorpc.work import Work


class Stream:
    """Operations that ranks may start in different orders, because each has a number of its own.

    For data parallelism and other callers that know which operations of the ranks belong together. Made by
    `ProcessGroup.stream`. Every operation takes a number, from 0, that is used once on every rank; operations with the same
    number belong together.
    """

    def __init__(self, dispatch: Dispatch, channels: int | None) -> None:
        self._dispatch = dispatch
        self._arguments = Arguments(dispatch.backend.capabilities.device_arrays)
        self._number = dispatch.open_stream(channels)
        arena = dispatch.backend.arena
        self._unordered = channels is None and arena is not None
        if arena is not None:
            weakref.finalize(self, _let_go, weakref.ref(arena), self._number).atexit = False

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._dispatch.backend.rank

    @property
    def number(self) -> int:
        """The number of this stream: the same on every rank, and unique in the group."""
        return self._number

    @property
    def name(self) -> str:
        """The name of this stream: the same on every rank, and unique among the streams of all groups of the generation."""
        return f"{self._dispatch.backend.group_id:x}/{self._number}"

    @property
    def is_open(self) -> bool:
        """Whether operations can still begin: its group is neither closed nor broken."""
        return self._dispatch.is_open

    @property
    def clock(self) -> Clock:
        """The clock of the group's operations."""
        return self._dispatch.backend.clock

    def guard(self) -> Guard:
        """As `ProcessGroup.guard`."""
        return self._dispatch.guard(self._dispatch.timeout)

    def check_wire(self, wire: str) -> None:
        """Raises UsageError if the backend has no all_reduce with this `wire`. Sends no message."""
        specs = (TensorSpec(DType.FLOAT32, (1,)),)
        self._dispatch.prepared(Operation.ALL_REDUCE, specs, ReduceOp.SUM, None, wire, None, unordered=self._unordered)

    @overload
    def all_reduce(self, x: A, number: int, *, op: Op = ..., out: A | None = ..., **options: Unpack[Reducing]) -> Work[A]: ...
    @overload
    def all_reduce(
        self, x: Readable, number: int, *, op: Op = ..., out: None = ..., **options: Unpack[Reducing]
    ) -> Work[NDArray[Any]]: ...
    def all_reduce(
        self,
        x: Any,
        number: int,
        *,
        op: ReduceOp | str = "sum",
        out: Any = None,
        timeout: float | None = None,
        wire: str | None = None,
        algorithm: str | None = None,
    ) -> Work[Any]:
        """As `ProcessGroup.all_reduce(async_op=True)`."""
        source, chosen = self._arguments.view(x), ReduceOp.named(op)
        result = self._arguments.one_result(out, source.kind, source.spec, [source])
        return self._start(Operation.ALL_REDUCE, [source], result, number, timeout, op=chosen, wire=wire, algorithm=algorithm)

    @overload
    def reduce_scatter(
        self, parts: Parts[A], number: int, *, op: Op = ..., out: A | None = ..., **options: Unpack[Reducing]
    ) -> Work[A]: ...
    @overload
    def reduce_scatter(
        self, parts: Sequence[Readable], number: int, *, op: Op = ..., out: None = ..., **options: Unpack[Reducing]
    ) -> Work[NDArray[Any]]: ...
    def reduce_scatter(
        self,
        parts: Any,
        number: int,
        *,
        op: ReduceOp | str = "sum",
        out: Any = None,
        timeout: float | None = None,
        wire: str | None = None,
        algorithm: str | None = None,
    ) -> Work[Any]:
        """As `ProcessGroup.reduce_scatter(async_op=True)`."""
        backend, chosen = self._dispatch.backend, ReduceOp.named(op)
        sources = self._arguments.parts(parts, backend.size)
        result = self._arguments.one_result(out, sources[0].kind, sources[backend.rank].spec, sources)
        return self._start(
            Operation.REDUCE_SCATTER, sources, result, number, timeout, op=chosen, wire=wire, algorithm=algorithm
        )

    def broadcast(self, x: A, number: int, *, root: int, timeout: float | None = None) -> Work[A]:
        """As `ProcessGroup.broadcast(x, out=x, async_op=True)`: x is read on rank `root` and written on the others."""
        root, source = rank_of(root, self._dispatch.backend.size, "root"), self._arguments.view(x)
        sources = [source] if self._dispatch.backend.rank == root else []
        result = self._arguments.one_result(x, kind_of(x), source.spec, sources)
        return self._start(Operation.BROADCAST, sources, result, number, timeout, root=root)

    @overload
    def all_gather(self, x: A, number: int, **options: Unpack[Timed]) -> Work[list[A]]: ...
    @overload
    def all_gather(self, x: Readable, number: int, **options: Unpack[Timed]) -> Work[list[NDArray[Any]]]: ...
    def all_gather(self, x: Any, number: int, *, timeout: float | None = None) -> Work[Any]:
        """As `ProcessGroup.all_gather(async_op=True)`."""
        source = self._arguments.view(x)
        result = self._arguments.list_result(None, source.kind, self._dispatch.backend.size, [source])
        return self._start(Operation.ALL_GATHER, [source], result, number, timeout)

    def _start(
        self,
        operation: Operation,
        sources: list[View],
        result: Result,
        number: int,
        timeout: float | None,
        *,
        op: ReduceOp | None = None,
        root: int | None = None,
        wire: str | None = None,
        algorithm: str | None = None,
    ) -> Work[Any]:
        dispatch, number = self._dispatch, number_of(number)
        dispatch.check_open()
        seconds = seconds_of(timeout, dispatch.timeout)
        specs = tuple([source.spec for source in sources])
        prepared = dispatch.prepared(operation, specs, op, root, wire, algorithm, unordered=self._unordered)
        work: Work[Any] = dispatch.perform(
            operation, prepared, sources, result, seconds, True, stream=self._number, number=number
        )
        return work


def _let_go(arena: weakref.ref[Arena], stream: int) -> None:
    """A finaliser. It must not keep the arena alive, from which its stream may be reachable."""
    found = arena()
    if found is not None:
        found.let_go(stream)
