"""ProcessGroup: the operations of a group of ranks, as training code calls them.

This file checks arguments and says what is called; dispatch.py turns that into running operations. A group lives through
open -> broken (the generation ended; every call raises its first cause) -> closed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from ferrorpc.arrays.base import Kind, Out, View
from ferrorpc.arrays.kinds import NUMPY, kind_of, spec_of, view, view_out
from ferrorpc.backends.base import Backend
from ferrorpc.collectives import select
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.coordination.base import Session, Store
from ferrorpc.dispatch import Convert, Dispatch, many, nothing, one
from ferrorpc.errors import (
    BackendUnavailableError,
    GroupAbortedError,
    InvalidRankError,
    SelfSendError,
    TensorMismatchError,
    UsageError,
)
from ferrorpc.types import DType, ReduceOp, TensorSpec, dtype_named, dtype_of
from ferrorpc.work import Work

TAG_LIMIT = 1 << 62


class ProcessGroup:
    """A group of ranks that compute together.

    Arrays may be NumPy, CuPy or torch (CPU) arrays, numbers, or anything with `__dlpack__`; results come back as the kind that
    went in, on its device, in memory of their own. Every collective must be called by all ranks in the same order, and takes

        out: where the result goes, an array of the result's dtype and shape (it may be strided and may be the input itself,
            but not overlap it in part); the call then returns it.
        async_op: return a `Work` at once instead of waiting.
        timeout: seconds this rank waits for the operation; None for the group's.

    Raises (from every operation):
        UsageError: the call is wrong on this rank; nothing was sent, the group stays open.
        GroupClosedError: after close().
        PeerLostError, CollectiveMismatchError, CollectiveTimeoutError, GroupAbortedError, ...: the generation has ended; every
            operation raises the same first cause from then on. `reform()` goes on from there.

    Args:
        backend: performs the operations.
        timeout: seconds an operation may take.
    """

    def __init__(self, backend: Backend, timeout: float = 60.0) -> None:
        self._backend = backend
        self._dispatch = Dispatch(backend, timeout)
        self._subgroups = 0
        self._is_world = backend.group_id == 0

    @property
    def rank(self) -> int:
        """This process's rank in this group."""
        return self._backend.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._backend.size

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """World rank of each rank of this group."""
        return self._backend.world_ranks

    @property
    def generation(self) -> int:
        """The number of the membership this group lives in; 0 without a coordinator."""
        session = self._backend.session
        return 0 if session is None else session.membership.assignment.generation

    @property
    def backend(self) -> str:
        """Who performs operations: "grpc", "simulated", "nccl", "hybrid", or a third party's name."""
        return self._backend.name

    @property
    def timeout(self) -> float:
        """Seconds an operation may take where none are given."""
        return self._dispatch.timeout

    @property
    def session(self) -> Session:
        """The line to the coordinator: named barriers and what is known of other ranks."""
        if self._backend.session is None:
            raise BackendUnavailableError(f"backend {self.backend!r} has no coordinator")
        return self._backend.session

    @property
    def store(self) -> Store:
        """Small values shared by the job; they outlive generations."""
        return self.session.store

    @property
    def pending_members(self) -> list[str]:
        """Names of those who wait to be admitted; they come in at the next `reform()`."""
        return self.session.pending_members

    # Reductions. Canonical results: the left fold in rank order; halves are added in float32 and rounded once.

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
        """x[0] op x[1] op ... on every rank. All ranks bring the same dtype and shape.

        Args:
            x: the array; it is written only when it is `out`.
            op: sum, mean, product, min, max, band, bor or bxor.
            wire: "bf16", "f16" or "int8": compresses messages of float32 arrays; sums stay float32.
            algorithm: "ring", "recursive_doubling" or another name of `explain`; None chooses, up to 16 ranks in rank order.
        """
        source = view(x)
        call = Call(Operation.ALL_REDUCE, (source.spec,), ReduceOp.named(op), None, wire, algorithm)
        return self._single(call, [source], source.kind, self._place(out, source.spec, [source]), async_op, timeout)

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
    ) -> Any:
        """As `all_reduce`, on `root` only; the others get None."""
        source = view(x)
        call = Call(Operation.REDUCE, (source.spec,), ReduceOp.named(op), self._rank_of(root, "root"), wire)
        place = self._place(self._only_at(root, out), source.spec, [source])
        return self._single(call, [source], source.kind, place, async_op, timeout)

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
        """parts[r][0] op parts[r][1] op ... on rank r.

        Args:
            parts: a list of arrays in rank order (part r has the same shape on all ranks; parts may differ), or one array that
                is split along axis 0 as by np.array_split.
        """
        sources = self._parts(parts)
        specs = tuple(source.spec for source in sources)
        call = Call(Operation.REDUCE_SCATTER, specs, ReduceOp.named(op), None, wire, algorithm)
        place = self._place(out, specs[self.rank], sources)
        return self._single(call, sources, sources[0].kind, place, async_op, timeout)

    # Moves. Messages describe themselves, so shapes need not be known where they arrive.

    def broadcast(
        self, x: Any = None, root: int = 0, *, out: Any = None, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """The root's x on every rank. Others may pass None, or an array, whose kind the result then has."""
        at_root = self._rank_of(root, "root") == self.rank
        if at_root and x is None:
            raise UsageError(f"rank {root} is the root of this broadcast, so x must be an array")
        sources = [view(x)] if at_root else []
        kind = kind_of(x) if x is not None else NUMPY if out is None else kind_of(out)
        place = self._place(out, sources[0].spec if at_root else None, sources)
        call = Call(Operation.BROADCAST, tuple(source.spec for source in sources), root=root)
        return self._single(call, sources, kind, place, async_op, timeout)

    def gather(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Sequence[Any] | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Every rank's x as a list in rank order on `root` (shapes may differ); the others get None. `out` is such a list."""
        source = view(x)
        call = Call(Operation.GATHER, (source.spec,), root=self._rank_of(root, "root"))
        places = self._places(self._only_at(root, out), [source])
        return self._listed(call, [source], source.kind, places, async_op, timeout)

    def all_gather(
        self, x: Any, *, out: Sequence[Any] | None = None, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Every rank's x as a list in rank order, on every rank; shapes may differ. `out` is such a list."""
        source = view(x)
        call = Call(Operation.ALL_GATHER, (source.spec,))
        return self._listed(call, [source], source.kind, self._places(out, [source]), async_op, timeout)

    def scatter(
        self,
        parts: Any = None,
        root: int = 0,
        *,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """parts[r] of the root on rank r. `parts` (a list, or an array to split along axis 0) is None off the root."""
        at_root = self._rank_of(root, "root") == self.rank
        if at_root and parts is None:
            raise UsageError(f"rank {root} is the root of this scatter, so parts must be a list of {self.size} arrays")
        sources = self._parts(parts) if at_root else []
        kind = sources[0].kind if at_root else NUMPY if out is None else kind_of(out)
        place = self._place(out, sources[self.rank].spec if at_root else None, sources)
        call = Call(Operation.SCATTER, tuple(source.spec for source in sources), root=root)
        return self._single(call, sources, kind, place, async_op, timeout)

    def all_to_all(
        self, parts: Any, *, out: Sequence[Any] | None = None, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """A list of what every rank had for this one, in rank order. `parts` is a list, or an array to split along axis 0."""
        sources = self._parts(parts)
        call = Call(Operation.ALL_TO_ALL, tuple(source.spec for source in sources))
        return self._listed(call, sources, sources[0].kind, self._places(out, sources), async_op, timeout)

    def barrier(self, timeout: float | None = None, *, async_op: bool = False) -> Any:
        """Returns when every rank has called it.

        Raises:
            BarrierTimeoutError: naming every rank that did not, and what is known of it.
        """
        return self._run(Call(Operation.BARRIER), [], None, nothing, async_op, timeout)

    # Two ranks.

    def send(self, x: Any, dst: int, tag: int = 0, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Sends an array to rank `dst`. Returns (or the Work is done) when x may be changed again; receipt is not implied."""
        self._pair(dst, "dst", tag)
        self._dispatch.check_open()
        source = view(x)
        execution = self._backend.start_send(source.data, source.spec, dst, tag, self._dispatch.guard(timeout))
        return self._dispatch.finish(execution, nothing, async_op)

    def recv(self, src: int, tag: int = 0, *, out: Any = None, timeout: float | None = None, async_op: bool = False) -> Any:
        """The next array that rank `src` sent with this tag, first in, first out; a NumPy array unless `out` is given.

        Raises:
            CollectiveTimeoutError: nothing came in time. Nothing is lost or broken: call it again.
            TensorMismatchError: `out` does not fit; the message stays for the next recv.
        """
        self._pair(src, "src", tag)
        self._dispatch.check_open()
        place = self._place(out, None, [])
        target, spec = (None, None) if place is None else (place.data, place.spec)
        execution = self._backend.start_recv(src, tag, target, spec, self._dispatch.guard(timeout))
        return self._dispatch.finish(execution, one(NUMPY, place), async_op)

    # Memory, subgroups, streams.

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """A new NumPy array whose memory the group's lanes can use best. Local call; contents undefined.

        Lanes of this version read any host memory equally well, so this is ordinary memory.
        """
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if isinstance(dtype, DType):
            return NUMPY.empty(sizes, dtype)
        return NUMPY.empty(sizes, dtype_named(dtype) if isinstance(dtype, str) else dtype_of(np.dtype(dtype)))

    def subgroup(self, ranks: Sequence[int], *, timeout: float | None = None) -> ProcessGroup | None:
        """A group of some of this group's ranks, numbered in the order given. Every member of this group must call it, with
        the same ranks; those outside get None."""
        chosen = [self._rank_of(rank, "a subgroup's rank") for rank in ranks]
        if not chosen or len(set(chosen)) != len(chosen):
            raise UsageError(f"ranks={list(ranks)} must name each member of the subgroup once")
        self._subgroups += 1
        self._run(Call(Operation.BARRIER, note=f"subgroup of ranks {chosen}"), [], None, nothing, False, timeout)
        if self.rank not in chosen:
            return None
        identity = f"{self._backend.group_id}/{self._subgroups}:{chosen}".encode()
        group_id = int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little") | 1
        return ProcessGroup(self._backend.split(chosen, group_id), self._dispatch.timeout)

    def stream(self) -> Stream:
        """A stream of operations that their user numbers by meaning. All ranks must open streams in the same order."""
        return Stream(self, self._dispatch.open_stream())

    def explain(self, operation: str, nbytes: int) -> str:
        """Which algorithm a float32 operation of so many bytes a rank uses, why, and what else there is."""
        try:
            chosen = Operation(operation)
        except ValueError:
            names = ", ".join(known.value for known in Operation)
            raise UsageError(f"there is no operation {operation!r}", hint=f"use one of: {names}") from None
        reduces = chosen in (Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER)
        listed = chosen in (Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL, Operation.SCATTER)
        count = nbytes // 4
        sizes = [len(part) for part in np.array_split(np.empty(count, np.bool_), self.size)] if listed else [count]
        rooted = chosen in (Operation.REDUCE, Operation.BROADCAST, Operation.GATHER, Operation.SCATTER)
        specs = () if chosen is Operation.BARRIER else tuple(TensorSpec(DType.FLOAT32, (size,)) for size in sizes)
        call = Call(chosen, specs, ReduceOp.SUM if reduces else None, 0 if rooted else None)
        return select.explain(call, self.size)

    # Life.

    def synchronize(self) -> None:
        """Blocks the host until nothing that this rank started is in flight. Errors stay with their Works."""
        self._dispatch.drain()

    def abort(self, cause: str) -> None:
        """Ends the generation on every rank: operations in flight and later ones raise GroupAbortedError(rank, cause)."""
        self._backend.abort(GroupAbortedError(self.world_ranks[self.rank], str(cause)))

    def reform(self, timeout: float | None = None) -> ProcessGroup:
        """The group of the next generation, after a break or to admit `pending_members`. Every survivor must call it.

        A fixed world waits for the replacement of who was lost; an elastic one goes on with at least its minimum. This group
        is over once it is called; the coordinator session, and the store, go on.

        Raises:
            RendezvousTimeoutError: naming who is missing; it may be called again.
        """
        if self._dispatch.closed:
            self._dispatch.check_open()
        if not self._is_world:
            raise UsageError("a subgroup cannot be formed again", hint="call reform() on the world's group, then subgroup()")
        if self._backend.latch.cause is None:
            self._dispatch.drain()
        seconds = self._dispatch.timeout if timeout is None else timeout
        renewed = self._backend.renew(seconds)
        self._dispatch.closed = True
        return ProcessGroup(renewed, self._dispatch.timeout)

    def close(self) -> None:
        """Refuses new operations, finishes what this rank has in flight, says goodbye. Idempotent.

        A rank that closes first never fails its peers; only an operation that still needs it does. Closing a subgroup leaves
        the world as it is.
        """
        if self._dispatch.closed:
            return
        self._dispatch.closed = True
        if self._backend.latch.cause is None:
            self._dispatch.drain()
        self._say_goodbye("")

    def _say_goodbye(self, reason: str) -> None:
        self._dispatch.closed = True
        session = self._backend.session
        if reason and session is not None:
            session.leave(reason)
        self._backend.close()
        if self._is_world and session is not None:
            session.leave(reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None or self._dispatch.closed:
            self.close()
        elif self._backend.latch.cause is not None or not self._is_world:
            self._say_goodbye("")
        else:
            self._say_goodbye(f"{type(error).__name__}: {error}")

    def __repr__(self) -> str:
        cause = self._backend.latch.cause
        state = "closed" if self._dispatch.closed else "open" if cause is None else f"broken: {cause.message}"
        return f"<ProcessGroup {self.backend} rank {self.rank} of {self.size}, generation {self.generation}: {state}>"

    # What the operations above share.

    def _single(
        self, call: Call, sources: Sequence[View], kind: Kind, place: Out | None, async_op: bool, timeout: float | None
    ) -> Any:
        return self._run(call, sources, None if place is None else [place], one(kind, place), async_op, timeout)

    def _listed(
        self, call: Call, sources: Sequence[View], kind: Kind, places: list[Out] | None, async_op: bool, timeout: float | None
    ) -> Any:
        return self._run(call, sources, places, many(kind, places), async_op, timeout)

    def _run(
        self,
        call: Call,
        sources: Sequence[View],
        places: Sequence[Out] | None,
        convert: Convert,
        async_op: bool,
        timeout: float | None,
    ) -> Any:
        execution = self._dispatch.start(call, sources, places, timeout=timeout)
        return self._dispatch.finish(execution, convert, async_op)

    def _place(self, out: Any, spec: TensorSpec | None, sources: Sequence[View]) -> Out | None:
        """Where a result goes; `spec` is None where only the arriving message tells what it is."""
        if out is None:
            return None
        place = view_out(out, spec_of(out) if spec is None else spec)
        for source in sources:
            place.shares(source)
        return place

    def _places(self, out: Sequence[Any] | None, sources: Sequence[View]) -> list[Out] | None:
        if out is None:
            return None
        if not isinstance(out, list | tuple) or len(out) != self.size:
            raise TensorMismatchError(f"out must be a list of {self.size} arrays in rank order")
        places = [self._place(part, None, sources) for part in out]
        return [place for place in places if place is not None]

    def _only_at(self, root: int, out: Any) -> Any:
        """`out`, which only the root may give."""
        if out is not None and self.rank != root:
            raise UsageError(f"only rank {root} gets a result, so out means nothing on rank {self.rank}")
        return out

    def _parts(self, parts: Any) -> list[View]:
        """One array for each rank: a list as it is, an array split along axis 0."""
        if isinstance(parts, list | tuple):
            views = [view(part) for part in parts]
        else:
            whole = view(parts)
            if not whole.spec.shape:
                raise TensorMismatchError("a single number cannot be split among ranks")
            split = np.array_split(whole.data, self.size)
            views = [whole._replace(spec=TensorSpec(whole.spec.dtype, part.shape), data=part) for part in split]
        if len(views) != self.size:
            raise TensorMismatchError(
                f"{len(views)} parts were given for {self.size} ranks", hint="pass one part for each rank"
            )
        if len({part.spec.dtype for part in views}) > 1:
            raise TensorMismatchError("all parts must have the same dtype")
        return views

    def _rank_of(self, rank: Any, what: str) -> int:
        if not isinstance(rank, int | np.integer) or not 0 <= rank < self.size:
            raise InvalidRankError(f"{what} is {rank!r}, but this group has ranks 0 to {self.size - 1}")
        return int(rank)

    def _pair(self, peer: Any, what: str, tag: Any) -> None:
        if self._rank_of(peer, what) == self.rank:
            raise SelfSendError(f"{what} is this rank itself ({peer})")
        if not isinstance(tag, int) or not 0 <= tag < TAG_LIMIT:
            raise UsageError(f"tag={tag!r} is no integer from 0 to 2^62 - 1")


class Stream:
    """Operations apart from program order, numbered by their user: ranks may start them in different orders.

    Made by `ProcessGroup.stream`; for data parallelism and others that know which operation of one rank belongs to which of
    another without counting.
    """

    def __init__(self, group: ProcessGroup, number: int) -> None:
        self._group = group
        self._number = number

    def all_reduce(
        self,
        x: Any,
        *,
        number: int,
        op: ReduceOp | str = "sum",
        out: Any = None,
        timeout: float | None = None,
        wire: str | None = None,
    ) -> Work[Any]:
        """As `ProcessGroup.all_reduce(async_op=True)`; operations with the same number belong together.

        Args:
            number: from 0, used once on every rank.
        """
        group = self._group
        source = view(x)
        place = group._place(out, source.spec, [source])
        call = Call(Operation.ALL_REDUCE, (source.spec,), ReduceOp.named(op), None, wire)
        execution = group._dispatch.start(
            call, [source], None if place is None else [place], timeout=timeout, stream=self._number, number=number
        )
        return group._dispatch.submit(execution, one(source.kind, place))
