"""The collectives of a group, as training code calls them: check arguments, start the call, return the caller's kind of array.

Each is declared twice: for type checkers (the overloads, with the types of type_hints.py), and as it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack, overload

from numpy.typing import NDArray

from ferrorpc.arrays.base import View
from ferrorpc.collectives.call import Operation
from ferrorpc.collectives.ranks_and_tags import rank_of
from ferrorpc.errors import UsageError
from ferrorpc.guard import seconds_of
from ferrorpc.operations.arguments import kind_like, no_result
from ferrorpc.operations.fast_path import GENERAL_PATH
from ferrorpc.operations.point_to_point import PointToPoint
from ferrorpc.operations.results import NOTHING, Result
from ferrorpc.operations.type_hints import A, Later, Moving, Now, Op, Parts, Readable, Reducing, Scalar, Timed
from ferrorpc.types import ReduceOp
from ferrorpc.work import Work


class Collectives(PointToPoint):
    """The collectives of a group."""

    # Reductions. The canonical result is the left fold in rank order; halves are added in float32 and rounded once.

    @overload
    def all_reduce(self, x: A, op: Op = ..., *, out: A | None = ..., async_op: Now = ..., **options: Unpack[Reducing]) -> A: ...
    @overload
    def all_reduce(
        self, x: A, op: Op = ..., *, out: A | None = ..., async_op: Later, **options: Unpack[Reducing]
    ) -> Work[A]: ...
    @overload
    def all_reduce(
        self, x: Scalar, op: Op = ..., *, out: None = ..., async_op: Now = ..., **options: Unpack[Reducing]
    ) -> NDArray[Scalar]: ...
    @overload
    def all_reduce(
        self, x: Scalar, op: Op = ..., *, out: None = ..., async_op: Later, **options: Unpack[Reducing]
    ) -> Work[NDArray[Scalar]]: ...
    @overload
    def all_reduce(
        self, x: Readable, op: Op = ..., *, out: None = ..., async_op: Now = ..., **options: Unpack[Reducing]
    ) -> NDArray[Any]: ...
    @overload
    def all_reduce(
        self, x: Readable, op: Op = ..., *, out: None = ..., async_op: Later, **options: Unpack[Reducing]
    ) -> Work[NDArray[Any]]: ...
    def all_reduce(
        self,
        x: Any,
        op: ReduceOp | str = "sum",
        *,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
        wire: str | None = None,
        algorithm: str | None = None,
    ) -> Any:
        """x[0] op x[1] op ..., on every rank. All ranks bring the same dtype and shape.

        Args:
            x: the array; written only when it is `out`.
            op: sum, mean, product, min, max, band, bor or bxor.
            wire: "bf16", "f16" or "int8": compresses messages of float32 arrays; sums stay float32.
            algorithm: a name that `explain` lists; None chooses, up to 16 ranks one that adds in rank order.
        """
        if self._fast_path is not None and not async_op and wire is None and algorithm is None:
            found = self._fast_path.all_reduce(x, op, out, timeout)
            if found is not GENERAL_PATH:
                return found
        if self._device_fast_path is not None and wire is None and algorithm is None:
            found = self._device_fast_path.all_reduce(x, op, out, async_op, timeout)
            if found is not GENERAL_PATH:
                return found
        source = self._arguments.view(x)
        result = self._arguments.one_result(out, source.kind, source.spec, [source])
        return self._run(
            Operation.ALL_REDUCE, [source], result, async_op, timeout, op=ReduceOp.named(op), wire=wire, algorithm=algorithm
        )

    @overload
    def reduce(
        self, x: A, root: int = ..., op: Op = ..., *, out: A | None = ..., async_op: Now = ..., **options: Unpack[Reducing]
    ) -> A | None: ...
    @overload
    def reduce(
        self, x: A, root: int = ..., op: Op = ..., *, out: A | None = ..., async_op: Later, **options: Unpack[Reducing]
    ) -> Work[A | None]: ...
    @overload
    def reduce(
        self, x: Readable, root: int = ..., op: Op = ..., *, out: None = ..., async_op: Now = ..., **options: Unpack[Reducing]
    ) -> NDArray[Any] | None: ...
    @overload
    def reduce(
        self, x: Readable, root: int = ..., op: Op = ..., *, out: None = ..., async_op: Later, **options: Unpack[Reducing]
    ) -> Work[NDArray[Any] | None]: ...
    def reduce(
        self,
        x: Any,
        root: int = 0,
        op: ReduceOp | str = "sum",
        *,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
        wire: str | None = None,
        algorithm: str | None = None,
    ) -> Any:
        """As `all_reduce`, on rank `root` only; the others get None."""
        if self._fast_path is not None and not async_op and wire is None and algorithm is None:
            found = self._fast_path.reduce(x, root, op, out, timeout)
            if found is not GENERAL_PATH:
                return found
        root = rank_of(root, self._size, "root")
        source = self._arguments.view(x)
        result = self._arguments.one_result(out, source.kind, source.spec, [source]) if root == self._rank else no_result(out)
        return self._run(
            Operation.REDUCE,
            [source],
            result,
            async_op,
            timeout,
            op=ReduceOp.named(op),
            root=root,
            wire=wire,
            algorithm=algorithm,
        )

    @overload
    def reduce_scatter(
        self, parts: Parts[A], op: Op = ..., *, out: A | None = ..., async_op: Now = ..., **options: Unpack[Reducing]
    ) -> A: ...
    @overload
    def reduce_scatter(
        self, parts: Parts[A], op: Op = ..., *, out: A | None = ..., async_op: Later, **options: Unpack[Reducing]
    ) -> Work[A]: ...
    @overload
    def reduce_scatter(
        self, parts: Sequence[Readable], op: Op = ..., *, out: None = ..., async_op: Now = ..., **options: Unpack[Reducing]
    ) -> NDArray[Any]: ...
    @overload
    def reduce_scatter(
        self, parts: Sequence[Readable], op: Op = ..., *, out: None = ..., async_op: Later, **options: Unpack[Reducing]
    ) -> Work[NDArray[Any]]: ...
    def reduce_scatter(
        self,
        parts: Any,
        op: ReduceOp | str = "sum",
        *,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
        wire: str | None = None,
        algorithm: str | None = None,
    ) -> Any:
        """parts[r] of rank 0 op parts[r] of rank 1 op ..., on rank r.

        Args:
            parts: a list of arrays in rank order (they may differ in shape, but not from rank to rank), or one array that is
                split along axis 0 as by np.array_split.
        """
        if self._fast_path is not None and not async_op and wire is None and algorithm is None:
            found = self._fast_path.reduce_scatter(parts, op, out, timeout)
            if found is not GENERAL_PATH:
                return found
        sources = self._arguments.parts(parts, self._size)
        result = self._arguments.one_result(out, sources[0].kind, sources[self._rank].spec, sources)
        return self._run(
            Operation.REDUCE_SCATTER, sources, result, async_op, timeout, op=ReduceOp.named(op), wire=wire, algorithm=algorithm
        )

    # Moves. Messages describe themselves, so no rank needs to know in advance what arrives.

    @overload
    def broadcast(self, x: A, root: int = ..., *, out: A | None = ..., async_op: Now = ..., **options: Unpack[Moving]) -> A: ...
    @overload
    def broadcast(
        self, x: A, root: int = ..., *, out: A | None = ..., async_op: Later, **options: Unpack[Moving]
    ) -> Work[A]: ...
    @overload
    def broadcast(self, x: A | None = ..., root: int = ..., *, out: A, async_op: Now = ..., **options: Unpack[Moving]) -> A: ...
    @overload
    def broadcast(
        self, x: A | None = ..., root: int = ..., *, out: A, async_op: Later, **options: Unpack[Moving]
    ) -> Work[A]: ...
    @overload
    def broadcast(
        self, x: None = ..., root: int = ..., *, out: None = ..., async_op: Now = ..., **options: Unpack[Moving]
    ) -> NDArray[Any]: ...
    @overload
    def broadcast(
        self, x: None = ..., root: int = ..., *, out: None = ..., async_op: Later, **options: Unpack[Moving]
    ) -> Work[NDArray[Any]]: ...
    @overload
    def broadcast(
        self, x: A | None, root: int = ..., *, out: None = ..., async_op: Now = ..., **options: Unpack[Moving]
    ) -> A | NDArray[Any]: ...
    @overload
    def broadcast(
        self, x: A | None, root: int = ..., *, out: None = ..., async_op: Later, **options: Unpack[Moving]
    ) -> Work[A | NDArray[Any]]: ...
    @overload
    def broadcast(
        self, x: Readable, root: int = ..., *, out: None = ..., async_op: Now = ..., **options: Unpack[Moving]
    ) -> NDArray[Any]: ...
    @overload
    def broadcast(
        self, x: Readable, root: int = ..., *, out: None = ..., async_op: Later, **options: Unpack[Moving]
    ) -> Work[NDArray[Any]]: ...
    def broadcast(
        self,
        x: Any = None,
        root: int = 0,
        *,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
        algorithm: str | None = None,
    ) -> Any:
        """The root's x, on every rank. Others may pass None, or an array: the result is then of its kind."""
        if self._fast_path is not None and not async_op and algorithm is None:
            found = self._fast_path.broadcast(x, root, out, timeout)
            if found is not GENERAL_PATH:
                return found
        root = rank_of(root, self._size, "root")
        if root != self._rank:
            result = self._arguments.one_result(out, kind_like(x, out), None, [])
            return self._run(Operation.BROADCAST, [], result, async_op, timeout, root=root, algorithm=algorithm)
        if x is None:
            hint = "pass x on the root; the others may pass None"
            raise UsageError(f"rank {root} is the root of this broadcast, so x must be an array", hint=hint)
        source = self._arguments.view(x)
        result = self._arguments.one_result(out, source.kind, source.spec, [source])
        return self._run(Operation.BROADCAST, [source], result, async_op, timeout, root=root, algorithm=algorithm)

    @overload
    def gather(
        self, x: A, root: int = ..., *, out: None = ..., async_op: Now = ..., **options: Unpack[Timed]
    ) -> list[A] | None: ...
    @overload
    def gather(
        self, x: A, root: int = ..., *, out: None = ..., async_op: Later, **options: Unpack[Timed]
    ) -> Work[list[A] | None]: ...
    @overload
    def gather(
        self, x: Readable, root: int = ..., *, out: None = ..., async_op: Now = ..., **options: Unpack[Timed]
    ) -> list[NDArray[Any]] | None: ...
    @overload
    def gather(
        self, x: Readable, root: int = ..., *, out: None = ..., async_op: Later, **options: Unpack[Timed]
    ) -> Work[list[NDArray[Any]] | None]: ...
    @overload
    def gather(
        self, x: A | Readable, root: int = ..., *, out: list[A] | None, async_op: Now = ..., **options: Unpack[Timed]
    ) -> list[A] | None: ...
    @overload
    def gather(
        self, x: A | Readable, root: int = ..., *, out: list[A] | None, async_op: Later, **options: Unpack[Timed]
    ) -> Work[list[A] | None]: ...
    @overload
    def gather(
        self, x: A | Readable, root: int = ..., *, out: A, async_op: Now = ..., **options: Unpack[Timed]
    ) -> A | None: ...
    @overload
    def gather(
        self, x: A | Readable, root: int = ..., *, out: A, async_op: Later, **options: Unpack[Timed]
    ) -> Work[A | None]: ...
    def gather(self, x: Any, root: int = 0, *, out: Any = None, async_op: bool = False, timeout: float | None = None) -> Any:
        """Every rank's x as a list in rank order, on rank `root`; the others get None. Shapes may differ, dtypes not."""
        if self._fast_path is not None and not async_op:
            found = self._fast_path.gather(x, root, out, timeout)
            if found is not GENERAL_PATH:
                return found
        root = rank_of(root, self._size, "root")
        sources = [self._arguments.view(x)]
        result = (
            self._arguments.list_result(out, sources[0].kind, self._size, sources) if root == self._rank else no_result(out)
        )
        return self._run(Operation.GATHER, sources, result, async_op, timeout, root=root)

    @overload
    def scatter(
        self, parts: Parts[A], root: int = ..., *, out: A | None = ..., async_op: Now = ..., **options: Unpack[Timed]
    ) -> A: ...
    @overload
    def scatter(
        self, parts: Parts[A], root: int = ..., *, out: A | None = ..., async_op: Later, **options: Unpack[Timed]
    ) -> Work[A]: ...
    @overload
    def scatter(
        self, parts: Parts[A] | None = ..., root: int = ..., *, out: A, async_op: Now = ..., **options: Unpack[Timed]
    ) -> A: ...
    @overload
    def scatter(
        self, parts: Parts[A] | None = ..., root: int = ..., *, out: A, async_op: Later, **options: Unpack[Timed]
    ) -> Work[A]: ...
    @overload
    def scatter(
        self, parts: None = ..., root: int = ..., *, out: None = ..., async_op: Now = ..., **options: Unpack[Timed]
    ) -> NDArray[Any]: ...
    @overload
    def scatter(
        self, parts: None = ..., root: int = ..., *, out: None = ..., async_op: Later, **options: Unpack[Timed]
    ) -> Work[NDArray[Any]]: ...
    @overload
    def scatter(
        self, parts: Parts[A] | None, root: int = ..., *, out: None = ..., async_op: Now = ..., **options: Unpack[Timed]
    ) -> A | NDArray[Any]: ...
    @overload
    def scatter(
        self, parts: Parts[A] | None, root: int = ..., *, out: None = ..., async_op: Later, **options: Unpack[Timed]
    ) -> Work[A | NDArray[Any]]: ...
    @overload
    def scatter(
        self, parts: Sequence[Readable], root: int = ..., *, out: None = ..., async_op: Now = ..., **options: Unpack[Timed]
    ) -> NDArray[Any]: ...
    @overload
    def scatter(
        self, parts: Sequence[Readable], root: int = ..., *, out: None = ..., async_op: Later, **options: Unpack[Timed]
    ) -> Work[NDArray[Any]]: ...
    def scatter(
        self, parts: Any = None, root: int = 0, *, out: Any = None, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """parts[r] of the root, on rank r. Off the root `parts` is None (or arrays: the result is then of their kind).

        Args:
            parts: on the root a list of arrays in rank order, or one array that is split along axis 0.
        """
        if self._fast_path is not None and not async_op:
            found = self._fast_path.scatter(parts, root, out, timeout)
            if found is not GENERAL_PATH:
                return found
        root = rank_of(root, self._size, "root")
        if root != self._rank:
            first = next(iter(parts), None) if isinstance(parts, list | tuple) else parts
            result = self._arguments.one_result(out, kind_like(first, out), None, [])
            return self._run(Operation.SCATTER, [], result, async_op, timeout, root=root)
        if parts is None:
            hint = "pass parts on the root, and None on the others"
            raise UsageError(f"rank {root} is the root of this scatter, so parts must be {self._size} arrays", hint=hint)
        sources = self._arguments.parts(parts, self._size)
        result = self._arguments.one_result(out, sources[0].kind, sources[root].spec, sources)
        return self._run(Operation.SCATTER, sources, result, async_op, timeout, root=root)

    @overload
    def all_gather(self, x: A, *, out: None = ..., async_op: Now = ..., **options: Unpack[Moving]) -> list[A]: ...
    @overload
    def all_gather(self, x: A, *, out: None = ..., async_op: Later, **options: Unpack[Moving]) -> Work[list[A]]: ...
    @overload
    def all_gather(
        self, x: Readable, *, out: None = ..., async_op: Now = ..., **options: Unpack[Moving]
    ) -> list[NDArray[Any]]: ...
    @overload
    def all_gather(
        self, x: Readable, *, out: None = ..., async_op: Later, **options: Unpack[Moving]
    ) -> Work[list[NDArray[Any]]]: ...
    @overload
    def all_gather(self, x: A | Readable, *, out: list[A], async_op: Now = ..., **options: Unpack[Moving]) -> list[A]: ...
    @overload
    def all_gather(self, x: A | Readable, *, out: list[A], async_op: Later, **options: Unpack[Moving]) -> Work[list[A]]: ...
    @overload
    def all_gather(self, x: A | Readable, *, out: A, async_op: Now = ..., **options: Unpack[Moving]) -> A: ...
    @overload
    def all_gather(self, x: A | Readable, *, out: A, async_op: Later, **options: Unpack[Moving]) -> Work[A]: ...
    def all_gather(
        self, x: Any, *, out: Any = None, async_op: bool = False, timeout: float | None = None, algorithm: str | None = None
    ) -> Any:
        """Every rank's x as a list in rank order, on every rank. Shapes may differ, dtypes not."""
        if self._fast_path is not None and not async_op and algorithm is None:
            found = self._fast_path.all_gather(x, out, timeout)
            if found is not GENERAL_PATH:
                return found
        sources = [self._arguments.view(x)]
        result = self._arguments.list_result(out, sources[0].kind, self._size, sources)
        return self._run(Operation.ALL_GATHER, sources, result, async_op, timeout, algorithm=algorithm)

    @overload
    def all_to_all(
        self, parts: Parts[A], *, out: list[A] | None = ..., async_op: Now = ..., **options: Unpack[Moving]
    ) -> list[A]: ...
    @overload
    def all_to_all(
        self, parts: Parts[A], *, out: list[A] | None = ..., async_op: Later, **options: Unpack[Moving]
    ) -> Work[list[A]]: ...
    @overload
    def all_to_all(self, parts: Parts[A], *, out: A, async_op: Now = ..., **options: Unpack[Moving]) -> A: ...
    @overload
    def all_to_all(self, parts: Parts[A], *, out: A, async_op: Later, **options: Unpack[Moving]) -> Work[A]: ...
    @overload
    def all_to_all(
        self, parts: Sequence[Readable], *, out: None = ..., async_op: Now = ..., **options: Unpack[Moving]
    ) -> list[NDArray[Any]]: ...
    @overload
    def all_to_all(
        self, parts: Sequence[Readable], *, out: None = ..., async_op: Later, **options: Unpack[Moving]
    ) -> Work[list[NDArray[Any]]]: ...
    def all_to_all(
        self, parts: Any, *, out: Any = None, async_op: bool = False, timeout: float | None = None, algorithm: str | None = None
    ) -> Any:
        """A list of what every rank had for this one, in rank order.

        Args:
            parts: what this rank has for each: a list of arrays in rank order, whose shapes may differ, or one array that is
                split along axis 0.
        """
        if self._fast_path is not None and not async_op and algorithm is None:
            found = self._fast_path.all_to_all(parts, out, timeout)
            if found is not GENERAL_PATH:
                return found
        sources = self._arguments.parts(parts, self._size)
        result = self._arguments.list_result(out, sources[0].kind, self._size, sources)
        return self._run(Operation.ALL_TO_ALL, sources, result, async_op, timeout, algorithm=algorithm)

    @overload
    def barrier(self, timeout: float | None = ..., *, async_op: Now = ..., algorithm: str | None = ...) -> None: ...
    @overload
    def barrier(self, timeout: float | None = ..., *, async_op: Later, algorithm: str | None = ...) -> Work[None]: ...
    def barrier(self, timeout: float | None = None, *, async_op: bool = False, algorithm: str | None = None) -> Any:
        """Returns when every rank has called it; results on a GPU that this rank has are complete then.

        Raises:
            BarrierTimeoutError: naming every rank that did not, and what is known of it.
        """
        if self._dispatch.landings and not async_op:
            timeout = self._dispatch.await_landings_or_end(timeout)
        if self._fast_path is not None and not async_op and algorithm is None and self._fast_path.barrier(timeout):
            return None
        return self._run(Operation.BARRIER, [], NOTHING, async_op, timeout, algorithm=algorithm)

    # What the operations share.

    def _run(
        self,
        operation: Operation,
        sources: list[View],
        result: Result,
        async_op: bool,
        timeout: float | None,
        *,
        op: ReduceOp | None = None,
        root: int | None = None,
        wire: str | None = None,
        algorithm: str | None = None,
        note: str = "",
    ) -> Any:
        dispatch = self._dispatch
        dispatch.check_open()
        seconds = seconds_of(timeout, dispatch.timeout)
        specs = tuple([source.spec for source in sources])
        prepared = dispatch.prepared(operation, specs, op, root, wire, algorithm, note)
        if self._size == 1 and not async_op:
            return dispatch.alone(sources, result)
        if self._fast_path is not None and not async_op:
            found = self._fast_path.run(prepared, sources, result, seconds)
            if found is not GENERAL_PATH:
                return found
        return dispatch.perform(operation, prepared, sources, result, seconds, async_op)
