"""ProcessGroup: a group of ranks, as training code uses it.

This file has the group's members and its life. Of operations/, collectives.py and point_to_point.py have the operations,
arguments.py checks what callers pass, results.py makes what they get, and dispatch.py runs them.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, NoReturn, Self, overload

import numpy as np
from numpy.typing import NDArray

from ferrorpc.arrays.kinds import NUMPY
from ferrorpc.backends.base import Backend, Capabilities
from ferrorpc.collectives.call import Operation, example
from ferrorpc.coordination.base import Session, Store
from ferrorpc.coordination.causes import replaced
from ferrorpc.coordination.farewell import reason_of
from ferrorpc.errors import BackendUnavailableError, GroupAbortedError, GroupClosedError, UsageError
from ferrorpc.guard import seconds_of
from ferrorpc.operations.arguments import check_sendable, ranks_of, shape_of
from ferrorpc.operations.collectives import Collectives
from ferrorpc.operations.results import NOTHING
from ferrorpc.operations.stream import Stream
from ferrorpc.operations.type_hints import Scalar
from ferrorpc.types import TensorSpec, dtype_given

OWN_WORK_SECONDS: Final = 0.4
"""How long close() waits for what this rank has in flight."""


class ProcessGroup(Collectives):
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
        super().__init__(_backend_given(backend), seconds_of(timeout, 60.0))
        self._is_world = backend.group_id == 0
        self._subgroups = 0
        self._following: ProcessGroup | None = None
        """The newest group that `reform` has made of this one."""
        self._block: weakref.ref[ProcessGroup] | None = None
        """The group whose `with` block this one has taken over; those in between are not kept."""
        session = backend.session
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
    def capabilities(self) -> Capabilities:
        """What the backend can do beyond what every backend can."""
        return self._backend.capabilities

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

    # Memory, subgroups, streams.

    @overload
    def empty(self, shape: int | Sequence[int]) -> NDArray[np.float32]: ...

    @overload
    def empty(self, shape: int | Sequence[int], dtype: type[Scalar] | np.dtype[Scalar]) -> NDArray[Scalar]: ...

    @overload
    def empty(self, shape: int | Sequence[int], dtype: Any) -> NDArray[Any]: ...

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """A new NumPy array, its contents undefined, in the memory that this group's lanes read best. No message flows.

        Ranks on one host share that memory: what is in it, views included, they read where it lies, without copies. It is freed
        with the last view of it, and outlives the group. Without such ranks it is ordinary memory.

        Args:
            shape: sizes, or one for a vector.
            dtype: its name, or NumPy's or torch's.

        Raises:
            LimitExceededError: the shared memory is full.
            TensorMismatchError: there is no such dtype; the message lists them.
            UsageError: it is no shape, or none that can be sent.
            GroupClosedError: the group was closed.
        """
        spec = TensorSpec(dtype_given(dtype), shape_of(shape))
        check_sendable([spec])
        if self._dispatch.closed:
            self._dispatch.check_open()
        return NUMPY.typed(self._backend.empty(spec), spec)

    def subgroup(self, ranks: Sequence[int], *, timeout: float | None = None) -> ProcessGroup | None:
        """A group of some of this group's ranks, numbered in the order given; None on the ranks outside.

        Every member of this group must call it with the same ranks; another list on one of them is a
        CollectiveMismatchError. The subgroup lives in this group's generation and ends with it.

        Make subgroups once and keep them: where ranks share memory a generation has room for some thousands, closed ones
        included.

        Raises:
            LimitExceededError: there is room for no more.
        """
        chosen = ranks_of(ranks, self._size)
        self._dispatch.check_open()
        self._subgroups += 1
        identity = f"{self._backend.group_id:x}/{self._subgroups}:{chosen}"
        note = f"subgroup of ranks {chosen}"
        self._run(Operation.BARRIER, [], NOTHING, False, timeout, note=note)
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
        """Blocks until nothing of this rank is in flight: each ends by its own deadline. Errors stay with their Works.

        Raises:
            FerroError: the generation has ended, so that what a GPU was given may not have been done.
        """
        self._dispatch.settle()

    def abort(self, cause: str | BaseException) -> None:
        """Ends the generation on every rank: operations in flight and later ones raise GroupAbortedError(rank, cause)."""
        text = reason_of(cause) if isinstance(cause, BaseException) else str(cause)
        self._dispatch.end(GroupAbortedError(self.world_ranks[self._rank], text))

    def reform(self, timeout: float | None = None) -> ProcessGroup:
        """The group of the next generation, after a break or to admit `pending_members`. Every survivor must call it.

        A fixed world waits for a replacement of whoever was lost; an elastic one goes on with at least its minimum. This group
        and its subgroups are over then; the seat in the job, and the store, go on.

        Raises:
            RendezvousTimeoutError: naming who is missing. It may be called again; this group is over all the same.
        """
        seconds = seconds_of(timeout, self.timeout)
        if not self._is_world:
            raise UsageError("a subgroup cannot be formed again", hint="call reform() on the world's group, then subgroup()")
        if self._dispatch.closed:
            self._dispatch.check_open()
        if self._backend.latch.cause is None:
            self._dispatch.drain(self._backend.clock.now() + seconds)
        try:
            renewed = self._backend.renew(seconds)
        except BaseException as error:
            if not isinstance(error, BackendUnavailableError):
                self._dispatch.give_up()
            raise
        following = ProcessGroup(renewed, self.timeout)
        over = replaced(self.generation, following.generation)
        self._dispatch.close(GroupClosedError(over.message, hint=over.hint))
        self._backend.latch.trip(over)
        self._backend.close()
        block = (None if self._block is None else self._block()) or self
        block._following, following._block = following, weakref.ref(block)
        return following

    def close(self) -> None:
        """Refuses new operations, finishes what this rank has in flight, says goodbye. Idempotent.

        Under a second once the generation has ended; otherwise as long as peers need to take what they were sent, within
        bounds of that order. A rank that closes first never fails its peers; only an operation that still needs it does.
        Closing a subgroup leaves the world as it is.
        """
        if not self._dispatch.closed:
            self._dispatch.close()
            if self._backend.latch.cause is None:
                self._dispatch.drain(self._backend.clock.now() + OWN_WORK_SECONDS)
            self._say_goodbye("")

    def _say_goodbye(self, reason: str) -> None:
        """With a reason (an exception's) the others are told before the lanes close."""
        self._dispatch.close()
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
        self._block = None  # it has one of its own
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._following is not None:  # `group = group.reform()` within the block: what is left is that one
            self._following.__exit__(kind, error, traceback)
        elif error is None or self._dispatch.closed or not self._is_world or _is_clean(error):
            self.close()
        elif self._backend.latch.cause is not None:
            self._say_goodbye("")
        else:
            self._say_goodbye(reason_of(error))

    def __getstate__(self) -> NoReturn:
        """Refuses: it is this process's place among the ranks."""
        raise UsageError(
            "a ProcessGroup cannot be copied or pickled",
            hint="another process makes its own with init_process_group(); for another group of these ranks call subgroup()",
        )

    def __repr__(self) -> str:
        cause = self._backend.latch.cause
        calm = "given up" if self._dispatch.refuses else "open"
        state = "closed" if self._dispatch.closed else calm if cause is None else f"broken: {cause.message}"
        return f"<ProcessGroup {self.backend} rank {self.rank} of {self.size}, generation {self.generation}: {state}>"


def _is_clean(error: BaseException) -> bool:
    """Whether a program ends by it as it meant to."""
    return isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0))


def _backend_given(backend: Any) -> Backend:
    """Raises UsageError: it is no backend, or lacks what each must set."""
    if not isinstance(backend, Backend):
        hint = "pass a ferrorpc.Backend, or call ferrorpc.init_process_group()"
        raise UsageError(f"backend={backend!r} is no backend", hint=hint)
    rank, size = getattr(backend, "rank", None), getattr(backend, "size", None)
    if not (isinstance(rank, int) and isinstance(size, int) and 0 <= rank < size):
        hint = "let its __init__ set self.rank and self.size: integers, and 0 <= rank < size"
        raise UsageError(f"backend {type(backend).__name__} has rank {rank!r} and size {size!r}", hint=hint)
    return backend


def group_given(group: Any) -> ProcessGroup:
    """What a caller passed as a group, if it is one.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(group, ProcessGroup):
        raise UsageError(
            f"group={group!r} is no ProcessGroup",
            hint="pass what init_process_group() returned; subgroup() returns None on the ranks outside",
        )
    return group
