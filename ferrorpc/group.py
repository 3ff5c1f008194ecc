"""ProcessGroup: a group of ranks, as training code uses it.

This file has the group's members and its life. Of operations/, collectives.py and point_to_point.py have the operations,
arguments.py checks what callers pass, results.py makes what they get, and dispatch.py runs them.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn, Self, overload

import numpy as np
from numpy.typing import NDArray

from ferrorpc.arrays.kinds import NUMPY
from ferrorpc.backends.base import Backend, Capabilities
from ferrorpc.collectives.call import Operation, example
from ferrorpc.coordination.base import Session, Store
from ferrorpc.errors import BackendUnavailableError, FerroError, GroupAbortedError, GroupClosedError, PeerLostError, UsageError
from ferrorpc.generation_errors import ended_by, generation_replaced, is_interrupt, links_closed, reason_of
from ferrorpc.guard import Guard, seconds_of
from ferrorpc.operations.arguments import check_sendable, ranks_of, shape_of
from ferrorpc.operations.collectives import Collectives
from ferrorpc.operations.dispatch import OWN_WORK_SECONDS
from ferrorpc.operations.results import NOTHING
from ferrorpc.operations.stream import Stream
from ferrorpc.operations.type_hints import Scalar
from ferrorpc.types import TensorSpec, as_dtype


class ProcessGroup(Collectives):
    """A group of ranks that compute together. A context manager that closes the group at its end.

    Arrays may be NumPy, CuPy or torch arrays, numbers, or anything with `__dlpack__` (the result is then NumPy). Results are of
    the input's kind, on its device, in new memory. All ranks call the same collectives in the same order. Each takes

        out: an array for the result, with its dtype and shape. It may be strided, and may be the input itself, but must not
            overlap it in part. The call returns it. For lists of results, a list of such arrays that do not overlap each other,
            or one array that is split along axis 0 (as by np.array_split). Off the root it is not written.
        async_op: return a `Work` at once instead of waiting. Its arrays must not be changed until it is done.
        timeout: seconds this rank waits for the operation, from the call on; None for the group's.

    and raises, besides its own errors,

        UsageError (InvalidRankError, TensorMismatchError, GroupClosedError, ...): the call is wrong on this rank. Nothing was
            sent and the group stays open.
        PeerLostError, CollectiveMismatchError, CollectiveTimeoutError, GroupAbortedError, ...: the generation has ended, on
            every rank. From then on every operation raises the same first cause, and the contents of `out` are undefined.
            `reform` makes the group of the next generation.

    Args:
        backend: performs the operations.
        timeout: default timeout of an operation, in seconds; None for the backend's.
    """

    def __init__(self, backend: Backend, timeout: float | None = None) -> None:
        super().__init__(_backend_given(backend), seconds_of(timeout, seconds_of(backend.timeout, 60.0)))
        self._subgroups = 0
        self._is_ending = False
        """Whether a thread is just closing it, or replacing it by its successor."""
        self._has_left = False
        """Whether close() has nothing left to do: until then one that was interrupted can be called again."""
        self._following: ProcessGroup | None = None
        """The group of the newest generation that followed this one by `reform`."""
        self._renewed: ProcessGroup | None = None
        """The group of the next generation, until `reform` returns it: an interrupt must not lose it."""
        self._block: weakref.ref[ProcessGroup] | None = None
        """The group whose `with` block closes this one."""
        self._membership = None if backend.session is None else backend.session.membership

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
        """The number of this group's generation. The first of a job is 1, unless the coordinator has removed a job before. Each
        `reform` gives the next group a larger one, as long as the coordinator has lost nothing."""
        return 1 if self._membership is None else self._membership.assignment.generation

    @property
    def backend(self) -> str:
        """The name of the backend: "grpc", "simulated", "nccl", "hybrid", "cuda_ipc" or a third party's."""
        return self._backend.name

    @property
    def capabilities(self) -> Capabilities:
        """What the backend can do beyond what every backend can."""
        return self._backend.capabilities

    @property
    def session(self) -> Session:
        """The session with the coordinator: named barriers, and what is known of other ranks."""
        if self._backend.session is None:
            raise BackendUnavailableError(f"backend {self.backend!r} has no coordinator", "use init_process_group()")
        return self._backend.session

    @property
    def store(self) -> Store:
        """Small values shared by the job; they outlive generations."""
        return self.session.store

    @property
    def pending_members(self) -> list[str]:
        """Names of the members that join at the next `reform`, without spares for which there is no room."""
        return self.session.pending_members

    # Memory, subgroups, streams.

    @overload
    def empty(self, shape: int | Sequence[int]) -> NDArray[np.float32]: ...

    @overload
    def empty(self, shape: int | Sequence[int], dtype: type[Scalar] | np.dtype[Scalar]) -> NDArray[Scalar]: ...

    @overload
    def empty(self, shape: int | Sequence[int], dtype: Any) -> NDArray[Any]: ...

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """A new NumPy array, its contents undefined, in the memory that this group's lanes read fastest. Sends no message.

        Ranks on one host share that memory: they read the array, and views of it, in place and without copies. It is freed with
        its last view, and outlives the group. Where no other rank is on this host it is ordinary memory, and so is what does
        not fit into half of this rank's share.

        Args:
            shape: sizes, or one for a vector.
            dtype: its name, or NumPy's or torch's.

        Raises:
            TensorMismatchError: there is no such dtype; the message lists them.
            UsageError: the shape is invalid, or too large to be sent; or this is a forked child.
            GroupClosedError: the group was closed.
        """
        spec = TensorSpec(as_dtype(dtype), shape_of(shape))
        check_sendable([spec])
        self._dispatch.check_not_forked()
        if self._dispatch.closed:
            self._dispatch.check_open()
        try:
            data = self._backend.empty(spec)
        except ValueError:  # NumPy's
            hint = "pass smaller sizes: no address space holds so many bytes"
            raise UsageError(f"shape={shape!r} of {spec.dtype.label} has {spec.nbytes} bytes", hint=hint) from None
        return NUMPY.typed(data, spec)

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
        note = f"subgroup of ranks {chosen}"
        try:
            self._run(Operation.BARRIER, [], NOTHING, False, timeout, note=note)
            return self._subgroup_of(chosen)
        except BaseException as error:
            if is_interrupt(error):  # the others may have the subgroup
                self.abort(error)
            raise

    def _subgroup_of(self, chosen: list[int]) -> ProcessGroup | None:
        """The subgroup of these ranks, which all ranks have agreed on."""
        self._subgroups += 1  # only now: a call that was refused on this rank must not make its numbers differ from the others'
        identity = f"{self._backend.group_id:x}/{self._subgroups}:{chosen}"
        group_id = int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "little") or 1
        if self._rank not in chosen:
            self._backend.stay_out(chosen, group_id)
            return None
        world, part = self._backend, self._backend.split(chosen, group_id)
        of_world = {
            "group_id": group_id,
            "world_ranks": tuple(world.world_ranks[rank] for rank in chosen),
            "session": world.session,
            "latch": world.latch,
            "clock": world.clock,
        }
        for name, value in of_world.items():
            with suppress(AttributeError):  # of a backend with a property of its own for it
                setattr(part, name, value)
        group = ProcessGroup(part, self.timeout)
        self._dispatch.adopt(group._dispatch)
        return group

    def stream(self, channels: int | None = None) -> Stream:
        """A stream of operations with numbers of the caller's own. All ranks must open their streams in the same order.

        Args:
            channels: a promise, the same on every rank, that lets operations go through shared memory: those with equal
                number % channels start in ascending order everywhere (others in any). None promises nothing.
        """
        if channels is not None and (type(channels) is not int or channels < 1):
            raise UsageError(f"channels={channels!r} is no number of channels", hint="give at least one, or leave it out")
        return Stream(self._dispatch, channels)

    def guard(self) -> Guard:
        """The deadline and the latch of something that begins now, takes at most the group's timeout, and ends with its
        generation: for what a rank waits for on its own, such as a copy of an array on a GPU."""
        return self._dispatch.guard(self._dispatch.timeout)

    def explain(self, operation: str, nbytes: int) -> str:
        """Which algorithm runs a float32 operation of `nbytes` a rank, why, and the alternatives. Sends no message."""
        return self._backend.explain(example(operation, nbytes, self._size))

    # Life.

    def synchronize(self) -> None:
        """Blocks until no operation of this group is in flight on this rank, and results are complete also where a GPU
        computes them. Each ends by its own deadline. Errors stay with their Works.

        Raises:
            UsageError: this is a forked child, in which nothing of its parent's ends.
            FerroError: the generation has ended, so that a GPU may not have done its operations.
        """
        self._dispatch.settle()

    def abort(self, cause: str | BaseException) -> None:
        """Ends the generation on every rank: operations in flight and later ones raise GroupAbortedError(rank, cause).

        A rank that has left the job by close() ends nothing any more. Any thread may call it, but no signal handler: that may
        have interrupted a call that holds a lock which this needs.
        """
        if self._dispatch.closed and self._dispatch.is_world:
            return
        text = reason_of(cause) if isinstance(cause, BaseException) else str(cause)
        self._dispatch.end(GroupAbortedError(self.world_ranks[self._rank], text))

    def fail(self, error: BaseException) -> BaseException:
        """Ends the generation on every rank as an operation that fails with this error does, for what is built on a group.

        One that is no FerroError is told to all as by `abort`.

        Returns:
            What to raise here: the first cause of the end, which may be another rank's.
        """
        if not isinstance(error, BaseException):
            raise UsageError(f"error={error!r} is no exception", hint="pass one; abort() takes a text")
        cause = error if isinstance(error, FerroError) else ended_by(reason_of(error))
        return self._dispatch.located(self._dispatch.end(cause))

    def reform(self, timeout: float | None = None) -> ProcessGroup:
        """The group of the next generation, after a break or to admit `pending_members`. Every survivor must call it.

        A fixed world waits for a replacement of each lost rank; an elastic one continues with at least its minimum. This group
        and its subgroups are closed; the membership in the job, and the store, remain.

        Args:
            timeout: seconds until the others have come; None for the group's. At most three quarters of them (on GPUs, seven
                eighths) go to what is in flight here and in subgroups, a recv that nobody answers included, and to what peers
                have not received yet. Connecting to the others afterwards has the timeouts of `init_process_group`.

        Raises:
            RendezvousTimeoutError: naming who is missing. It may be called again, as after Ctrl-C; operations of this group
                are refused.
        """
        seconds = seconds_of(timeout, self.timeout)
        if not self._dispatch.is_world:
            raise UsageError("a subgroup cannot be formed again", hint="call reform() on the world's group, then subgroup()")
        if self._renewed is None:
            if self._dispatch.closed:
                self._dispatch.check_open()
            self._renewed = self._next_generation(seconds)
        following = self._renewed
        self._is_ending = True
        try:
            over = generation_replaced(self.generation, following.generation)
            self._dispatch.close_all(GroupClosedError(over.message, hint=over.hint))
            self._backend.latch.trip(over)
            self._backend.close()
            block = (None if self._block is None else self._block()) or self
            block._following, following._block = following, weakref.ref(block)
            self._has_left = True
            self._renewed = None
        finally:
            self._is_ending = False
        return following

    def _next_generation(self, seconds: float) -> ProcessGroup:
        clock = self._backend.clock
        until = clock.now() + seconds
        if self._backend.latch.cause is None:
            # What never ends must not take the time to meet the others.
            self._dispatch.drain(seconds / 2, links_closed(self.world_ranks[self._rank]))
        try:
            return ProcessGroup(self._backend.renew(max(0.0, until - clock.now())), self.timeout)
        except BaseException as error:
            session = self._backend.session
            has_next = session is not None and session.membership is not self._membership
            if has_next or not isinstance(error, BackendUnavailableError):  # which a backend that cannot do it raises at once
                self._dispatch.refuses = True
            if session is not None and has_next:  # the others have the next one, and wait for this rank there
                told = error if isinstance(error, FerroError) else ended_by(f"{reason_of(error)} during reform()")
                session.membership.latch.end(told)
            raise

    def close(self) -> None:
        """Refuses new operations, gives those in flight here and in subgroups 0.4 s, and leaves the job. Idempotent.

        Wait for a Work first where a peer still needs it: an operation that takes longer than those 0.4 s is abandoned. Its
        Work then raises GroupClosedError, and a peer that needs it gets a PeerLostError. What a send has taken, because it
        returned or its Work is done, still arrives. A peer's recv without a message raises PeerLostError there alone.

        It takes under a second once the generation has ended; otherwise as long as peers need to receive what was sent, up to
        60 s (it logs for whom it waits, and that it gave up), as long as the GPU needs for results that calls have returned,
        and up to 10 s while the coordinator can be reached but does not answer. A rank that closes first fails only operations
        that still need it. A script that ends without it closes too, but waits for no rank that is stalled or suspect.

        Closing a subgroup leaves the world open. A recv in which another thread still waits raises GroupClosedError, and what
        was sent and not received is dropped; other operations in flight go on, because peers may need them. A peer that still
        receives from this rank, or sends it a message of more than 4 MiB, gets a GroupClosedError. One that waits for this rank
        in a collective of the subgroup that it has not begun ends the generation, with a GroupAbortedError that names it.
        """
        self._finish_and_leave("")

    def _finish_and_leave(self, reason: str) -> None:
        """As `close`. The reason is told as by `_leave`."""
        if self._has_left or self._is_ending:
            return None
        if self._renewed is not None:  # of a reform() that was interrupted
            return self.reform().close()
        self._is_ending = True
        try:
            try:
                if not self._dispatch.closed:
                    self._dispatch.close()
                    if self._backend.latch.cause is None:
                        self._dispatch.drain(OWN_WORK_SECONDS)
            finally:  # also when it is interrupted, or the others would not hear of it
                self._leave(reason)
        finally:
            self._is_ending = False

    def _leave(self, reason: str) -> None:
        """Closes the lanes and leaves the job. A reason (an exception's) is sent to the others before the lanes close; that of
        a subgroup to those who wait for this rank in it."""
        self._dispatch.close()
        if not self._dispatch.is_world:
            self._dispatch.retire(reason)
            self._backend.close()
            self._has_left = True
            return
        session = self._backend.session
        if reason and session is not None:
            session.leave(reason)
        elif reason:
            self._backend.latch.end(PeerLostError(self.world_ranks[self._rank], reason))
        try:
            self._backend.close()
        finally:  # as in `close`
            if session is not None:
                session.leave(reason)
        self._has_left = True
        if session is not None:  # what was abandoned has its error before the process may end
            self._dispatch.drain(OWN_WORK_SECONDS)

    def __enter__(self) -> Self:
        self._block = None  # this group has its own block
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._following is not None:  # after `group = group.reform()` within the block
            self._following.__exit__(kind, error, traceback)
        elif error is None or self._dispatch.closed or _is_clean(error):
            self.close()
        else:
            reason = reason_of(error) if self._backend.latch.cause is None else ""
            if self._dispatch.is_world:
                self._leave(reason)
            else:  # its operations in flight are perhaps needed by those who go on
                self._finish_and_leave(reason)

    def __getstate__(self) -> NoReturn:
        """Raises UsageError: a group belongs to its process."""
        raise UsageError(
            "a ProcessGroup cannot be copied or pickled",
            hint="another process makes its own with init_process_group(); for another group of these ranks call subgroup()",
        )

    def __repr__(self) -> str:
        cause = self._backend.latch.cause
        unbroken = "given up" if self._dispatch.refuses else "open"
        state = "closed" if self._dispatch.closed else unbroken if cause is None else f"broken: {cause.message}"
        return f"<ProcessGroup {self.backend} rank {self.rank} of {self.size}, generation {self.generation}: {state}>"


def _is_clean(error: BaseException) -> bool:
    """Whether the exception ends a program as intended."""
    return isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0))


def _backend_given(backend: Any) -> Backend:
    """Checks that a caller passed a backend. Raises UsageError if not, or if it lacks what each must set."""
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
