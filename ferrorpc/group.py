"""ProcessGroup: the operations of a group of ranks, as training code calls them.

This file says what is called. In operations/, arguments.py checks what callers pass, results.py brings home what they get,
and dispatch.py turns a call into a running operation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from ferrorpc.arrays.base import View
from ferrorpc.arrays.kinds import NUMPY
from ferrorpc.backends.base import Backend
from ferrorpc.collectives.call import Call, Operation, example
from ferrorpc.coordination.base import Session, Store
from ferrorpc.coordination.farewell import reason_of
from ferrorpc.errors import BackendUnavailableError, GroupAbortedError, UsageError
from ferrorpc.guard import seconds_of
from ferrorpc.operations.arguments import (
    Arguments,
    kind_like,
    no_result,
    peer_of,
    rank_of,
    ranks_of,
    shape_of,
    tag_of,
)
from ferrorpc.operations.dispatch import Dispatch
from ferrorpc.operations.expected import Expected
from ferrorpc.operations.results import NOTHING, Into, Result
from ferrorpc.operations.shortcut import Shortcut
from ferrorpc.operations.stream import Stream
from ferrorpc.types import DType, ReduceOp, TensorSpec, dtype_named, dtype_of

OWN_WORK_SECONDS: Final = 0.4
"""How long close() waits for what this rank has in flight."""


class ProcessGroup:
    """A group of ranks that compute together. A context manager: leaving it closes it.

    Arrays may be NumPy, CuPy or torch arrays, numbers, or anything with `__dlpack__` (NumPy comes back); results are of the
    kind that went in, on its device, in memory of their own. All ranks call the same collectives in the same order. Each takes

        out: where the result goes: an array of the result's dtype and shape, which may be strided and may be the input
            itself, but not overlap it in part. It is what the call returns. For lists of results, a list of such arrays, or
            one array that is split along axis 0 (as by np.array_split). Off the root it is left as it is.
        async_op: return a `Work` at once instead of waiting. Its arrays are not to be changed until it is done.
        timeout: seconds this rank waits for the operation, from the call on; None for the group's.

    and raises, besides what is said there,

        UsageError (InvalidRankError, TensorMismatchError, GroupClosedError, ...): the call is wrong on this rank. Nothing was
            sent and the group stays open.
        PeerLostError, CollectiveMismatchError, CollectiveTimeoutError, GroupAbortedError, ...: the generation has ended, on
            every rank. Every operation raises the same first cause from then on; what `out` holds is undefined. `reform` goes
            on from there.

    Args:
        backend: performs the operations.
        timeout: seconds an operation may take where none are given.
    """

    def __init__(self, backend: Backend, timeout: float = 60.0) -> None:
        self._backend = backend
        self._dispatch = Dispatch(backend, seconds_of(timeout, 60.0))
        self._rank = backend.rank
        self._size = backend.size
        self._given = Arguments(backend.capabilities.device_arrays)
        self._is_world = backend.group_id == 0
        self._subgroups = 0
        session = backend.session
        arena = backend.arena
        self._shortcut = None if arena is None else Shortcut(self._dispatch, arena)
        self._generation = 1 if session is None else session.membership.assignment.generation

    @property
    def rank(self) -> int:
        """This process's rank in this group."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._size

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """World rank of each rank of this group."""
        return self._backend.world_ranks

    @property
    def generation(self) -> int:
        """The number of the membership this group lives in; 1 where there is no coordinator to count them."""
        return self._generation

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
        """The line to the coordinator: named barriers, and what is known of other ranks."""
        if self._backend.session is None:
            raise BackendUnavailableError(f"backend {self.backend!r} has no coordinator", "use init_process_group()")
        return self._backend.session

    @property
    def store(self) -> Store:
        """Small values shared by the job; they outlive generations."""
        return self.session.store

    @property
    def pending_members(self) -> list[str]:
        """Names of those who come in at the next `reform`. Spares wait too, but while there is no room they are not named."""
        return self.session.pending_members

    # Reductions. The canonical result is the left fold in rank order; halves are added in float32 and rounded once.

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
            x: the array; it is written only when it is `out`.
            op: sum, mean, product, min, max, band, bor or bxor.
            wire: "bf16", "f16" or "int8": compresses messages of float32 arrays; sums stay float32.
            algorithm: a name that `explain` lists; None chooses, up to 16 ranks one that adds in rank order.
        """
        if self._shortcut is not None and not async_op and timeout is None and wire is None and algorithm is None:
            found = self._shortcut.all_reduce(x, op, out)
            if found is not None:
                return found
        source = self._given.view(x)
        result = self._given.one_result(out, source.kind, source.spec, [source])
        return self._reduction(Operation.ALL_REDUCE, [source], op, None, wire, algorithm, result, async_op, timeout)

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
        root = rank_of(root, self._size, "root")
        source = self._given.view(x)
        result = self._given.one_result(out, source.kind, source.spec, [source]) if root == self._rank else no_result(out)
        return self._reduction(Operation.REDUCE, [source], op, root, wire, algorithm, result, async_op, timeout)

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
        sources = self._given.parts(parts, self._size)
        result = self._given.one_result(out, sources[0].kind, sources[self._rank].spec, sources)
        return self._reduction(Operation.REDUCE_SCATTER, sources, op, None, wire, algorithm, result, async_op, timeout)

    # Moves. Messages describe themselves, so nobody needs to know in advance what arrives.

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
        root = rank_of(root, self._size, "root")
        if root != self._rank:
            result = self._given.one_result(out, kind_like(x, out), None, [])
            return self._move(Operation.BROADCAST, [], root, result, async_op, timeout, algorithm)
        if x is None:
            raise UsageError(f"rank {root} is the root of this broadcast, so x must be an array")
        source = self._given.view(x)
        result = self._given.one_result(out, source.kind, source.spec, [source])
        return self._move(Operation.BROADCAST, [source], root, result, async_op, timeout, algorithm)

    def gather(self, x: Any, root: int = 0, *, out: Any = None, async_op: bool = False, timeout: float | None = None) -> Any:
        """Every rank's x as a list in rank order, on rank `root`; the others get None. Shapes may differ, dtypes not."""
        root = rank_of(root, self._size, "root")
        sources = [self._given.view(x)]
        result = self._given.list_result(out, sources[0].kind, self._size, sources) if root == self._rank else no_result(out)
        return self._move(Operation.GATHER, sources, root, result, async_op, timeout)

    def scatter(
        self, parts: Any = None, root: int = 0, *, out: Any = None, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """parts[r] of the root, on rank r. Off the root `parts` is None (or arrays: the result is then of their kind).

        Args:
            parts: on the root a list of arrays in rank order, or one array that is split along axis 0.
        """
        root = rank_of(root, self._size, "root")
        if root != self._rank:
            result = self._given.one_result(out, kind_like(parts, out), None, [])
            return self._move(Operation.SCATTER, [], root, result, async_op, timeout)
        if parts is None:
            raise UsageError(f"rank {root} is the root of this scatter, so parts must be {self._size} arrays")
        sources = self._given.parts(parts, self._size)
        result = self._given.one_result(out, sources[0].kind, sources[root].spec, sources)
        return self._move(Operation.SCATTER, sources, root, result, async_op, timeout)

    def all_gather(
        self, x: Any, *, out: Any = None, async_op: bool = False, timeout: float | None = None, algorithm: str | None = None
    ) -> Any:
        """Every rank's x as a list in rank order, on every rank. Shapes may differ, dtypes not."""
        sources = [self._given.view(x)]
        result = self._given.list_result(out, sources[0].kind, self._size, sources)
        return self._move(Operation.ALL_GATHER, sources, None, result, async_op, timeout, algorithm)

    def all_to_all(
        self, parts: Any, *, out: Any = None, async_op: bool = False, timeout: float | None = None, algorithm: str | None = None
    ) -> Any:
        """A list of what every rank had for this one, in rank order.

        Args:
            parts: what this rank has for each: a list of arrays in rank order, whose shapes may differ, or one array that is
                split along axis 0.
        """
        sources = self._given.parts(parts, self._size)
        result = self._given.list_result(out, sources[0].kind, self._size, sources)
        return self._move(Operation.ALL_TO_ALL, sources, None, result, async_op, timeout, algorithm)

    def barrier(self, timeout: float | None = None, *, async_op: bool = False, algorithm: str | None = None) -> Any:
        """Returns when every rank has called it.

        Raises:
            BarrierTimeoutError: naming every rank that did not, and what is known of it.
        """
        simple = timeout is None and algorithm is None and not async_op
        if simple and self._shortcut is not None and self._shortcut.barrier():
            return None
        return self._move(Operation.BARRIER, [], None, NOTHING, async_op, timeout, algorithm)

    # Two ranks.

    def send(self, x: Any, dst: int, tag: int = 0, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Sends an array to rank `dst`. Returns, or the Work is done, when x may be changed again; receipt is not implied.

        Raises:
            SelfSendError: `dst` is this rank.
        """
        peer, tag, source = peer_of(dst, self._rank, self._size, "dst"), tag_of(tag), self._given.parcel(x)
        guard = self._dispatch.guard(seconds_of(timeout, self.timeout))
        self._dispatch.check_open()
        return self._dispatch.send(self._backend.start_send(source.data, source.spec, peer, tag, guard), async_op)

    def recv(self, src: int, tag: int = 0, out: Any = None, timeout: float | None = None, *, async_op: bool = False) -> Any:
        """The next array that rank `src` sent with this tag, first in, first out; a NumPy array unless `out` is given.

        Raises:
            CollectiveTimeoutError: nothing came in time. Nothing is lost or broken: call it again.
            TensorMismatchError: `out` does not fit; the message stays for the next recv.
            SelfSendError: `src` is this rank.
        """
        peer, tag = peer_of(src, self._rank, self._size, "src"), tag_of(tag)
        result = self._given.one_result(out, NUMPY, None, [])
        guard = self._dispatch.guard(seconds_of(timeout, self.timeout))
        self._dispatch.check_open()
        target, spec = (result.out.data, result.out.spec) if isinstance(result, Into) else (None, None)
        execution = self._backend.start_recv(peer, tag, target, spec, guard)
        return self._dispatch.finish(execution, result, async_op)

    def expect(self, src: int, tag: int = 0) -> Expected:
        """A recv whose place in the queue is taken now; its caller waits with `take`, when it needs the array."""
        return Expected(self._dispatch, peer_of(src, self._rank, self._size, "src"), tag_of(tag))

    # Memory, subgroups, streams.

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """A new NumPy array, its contents undefined, in the memory that this group's lanes read best. No message flows.

        Ranks on one host share that memory: what is in it, views included, they read where it lies, without copies. It is freed
        with the last view of it, and outlives the group. Without such ranks it is ordinary memory.

        Raises:
            LimitExceededError: the shared memory is full.
        """
        sizes = shape_of(shape)
        if not isinstance(dtype, DType):
            dtype = dtype_named(dtype) if isinstance(dtype, str) else dtype_of(np.dtype(dtype))
        spec = TensorSpec(dtype, sizes)
        return NUMPY.typed(self._backend.empty(spec), spec)

    def subgroup(self, ranks: Sequence[int], *, timeout: float | None = None) -> ProcessGroup | None:
        """A group of some of this group's ranks, numbered in the order given; None on the ranks outside.

        Every member of this group must call it with the same ranks; another list on one of them is a
        CollectiveMismatchError. The subgroup lives in this group's generation and ends with it.
        """
        chosen = ranks_of(ranks, self._size)
        self._dispatch.check_open()
        self._subgroups += 1
        identity = f"{self._backend.group_id:x}/{self._subgroups}:{chosen}"
        note = f"subgroup of ranks {chosen}"
        self._run((Operation.BARRIER, note), lambda: Call(Operation.BARRIER, note=note), [], NOTHING, False, timeout)
        group_id = int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "little") or 1
        if self._rank not in chosen:
            self._backend.stay_out(chosen, group_id)
            return None
        return ProcessGroup(self._backend.split(chosen, group_id), self.timeout)

    def stream(self, channels: int | None = None) -> Stream:
        """A stream of operations that their user numbers by meaning. All ranks must open their streams in the same order.

        Args:
            channels: a promise, the same on every rank, that lets operations go through shared memory: those with equal
                number % channels start in ascending order everywhere (others in any). None promises nothing.
        """
        if channels is not None and channels < 1:
            raise UsageError(f"a stream of {channels} channels has no room for operations", hint="give at least one")
        return Stream(self._dispatch, channels)

    def explain(self, operation: str, nbytes: int) -> str:
        """Which algorithm runs a float32 operation of so many bytes a rank, why, and what else there is. No message flows."""
        return self._backend.explain(example(operation, nbytes, self._size))

    # Life.

    def synchronize(self) -> None:
        """Blocks until nothing of this rank is in flight: each ends by its own deadline. Errors stay with their Works."""
        self._dispatch.settle()

    def abort(self, cause: str | BaseException) -> None:
        """Ends the generation on every rank: operations in flight and later ones raise GroupAbortedError(rank, cause)."""
        text = f"{type(cause).__name__}: {cause}" if isinstance(cause, BaseException) else str(cause)
        self._dispatch.end(GroupAbortedError(self.world_ranks[self._rank], text))

    def reform(self, timeout: float | None = None) -> ProcessGroup:
        """The group of the next generation, after a break or to admit `pending_members`. Every survivor must call it.

        A fixed world waits for a replacement of whoever was lost; an elastic one goes on with at least its minimum. This group
        and its subgroups are over then; the seat in the job, and the store, go on.

        Raises:
            RendezvousTimeoutError: naming who is missing; it may be called again.
        """
        seconds = seconds_of(timeout, self.timeout)
        if not self._is_world:
            raise UsageError("a subgroup cannot be formed again", hint="call reform() on the world's group, then subgroup()")
        if self._dispatch.closed:
            self._dispatch.check_open()
        if self._backend.latch.cause is None:
            self._dispatch.drain(self._backend.clock.now() + seconds)
        renewed = self._backend.renew(seconds)
        self._dispatch.closed = True
        self._backend.close()
        return ProcessGroup(renewed, self.timeout)

    def close(self) -> None:
        """Refuses new operations, finishes what this rank has in flight, says goodbye. Idempotent.

        Under a second once the generation has ended; otherwise as long as peers need to take what they were sent, within
        bounds of that order. A rank that closes first never fails its peers; only an operation that still needs it does.
        Closing a subgroup leaves the world as it is.
        """
        if not self._dispatch.closed:
            self._dispatch.closed = True
            if self._backend.latch.cause is None:
                self._dispatch.drain(self._backend.clock.now() + OWN_WORK_SECONDS)
            self._say_goodbye("")

    def _say_goodbye(self, reason: str) -> None:
        """With a reason (an exception's) the others are told before the lanes close."""
        self._dispatch.closed = True
        if not self._is_world:
            self._backend.close()
            return
        session = self._backend.session
        if reason and session is not None:
            session.leave(reason)
        self._backend.close()
        if session is not None:
            session.leave(reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None or self._dispatch.closed or not self._is_world or _is_clean(error):
            self.close()
        elif self._backend.latch.cause is not None:
            self._say_goodbye("")
        else:
            self._say_goodbye(reason_of(error))

    def __repr__(self) -> str:
        cause = self._backend.latch.cause
        state = "closed" if self._dispatch.closed else "open" if cause is None else f"broken: {cause.message}"
        return f"<ProcessGroup {self.backend} rank {self.rank} of {self.size}, generation {self.generation}: {state}>"

    # What the operations share.

    def _reduction(
        self,
        operation: Operation,
        sources: list[View],
        op: ReduceOp | str,
        root: int | None,
        wire: str | None,
        algorithm: str | None,
        result: Result,
        async_op: bool,
        timeout: float | None,
    ) -> Any:
        specs, chosen = tuple([source.spec for source in sources]), ReduceOp.named(op)
        return self._run(
            (operation, specs, chosen, root, wire, algorithm),
            lambda: Call(operation, specs, chosen, root, wire, algorithm),
            sources,
            result,
            async_op,
            timeout,
        )

    def _move(
        self,
        operation: Operation,
        sources: list[View],
        root: int | None,
        result: Result,
        async_op: bool,
        timeout: float | None,
        algorithm: str | None = None,
    ) -> Any:
        specs = tuple([source.spec for source in sources])
        return self._run(
            (operation, specs, root, algorithm),
            lambda: Call(operation, specs, root=root, algorithm=algorithm),
            sources,
            result,
            async_op,
            timeout,
        )

    def _run(
        self,
        signature: tuple[Hashable, ...],
        call: Callable[[], Call],
        sources: list[View],
        result: Result,
        async_op: bool,
        timeout: float | None,
    ) -> Any:
        dispatch = self._dispatch
        dispatch.check_open()
        seconds = seconds_of(timeout, dispatch.timeout)
        prepared = dispatch.prepared(signature, call)
        if self._size == 1 and not async_op:
            return dispatch.alone(sources, result)
        execution = dispatch.start(prepared, sources, result, seconds)
        return dispatch.finish(execution, result, async_op)


def _is_clean(error: BaseException) -> bool:
    """Whether a program ends by it as it meant to."""
    return isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0))
