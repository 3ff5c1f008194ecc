"""Starts the operations of a group and returns their results: what all operations have in common.

A call is prepared once per signature and cached; a later one is looked up, numbered and run. The life of a group is kept here:
open -> broken (its generation ended: the latch holds the first cause) -> closed.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Final

from ferrorpc.arrays.base import View
from ferrorpc.arrays.kinds import copy_of
from ferrorpc.backends.base import Backend
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.driver import check_ended_here, failure_of, place_in_user_code, verdict
from ferrorpc.collectives.event_driven import EventDrivenExecution
from ferrorpc.collectives.execution import Execution, PointerAllReduce, Prepared, return_execution
from ferrorpc.errors import (
    CollectiveTimeoutError,
    FerroError,
    GroupAbortedError,
    GroupClosedError,
    LimitExceededError,
    StaleGenerationError,
)
from ferrorpc.generation_errors import is_interrupt, used_in_child
from ferrorpc.guard import FOREVER, Guard, seconds_of, wake_nobody
from ferrorpc.operations.arguments import check_sendable
from ferrorpc.operations.landings import Landing, Landings
from ferrorpc.operations.results import NOTHING, Result
from ferrorpc.telemetry import telemetry
from ferrorpc.transports.closed_groups import Begun
from ferrorpc.types import ReduceOp, TensorSpec
from ferrorpc.wire.frames import Key
from ferrorpc.work import Work, await_all

PREPARED_CALLS: Final = 1024
"""How many prepared calls are cached. Beyond that the oldest is dropped."""

OWN_WORK_SECONDS: Final = 0.4
"""How long close() waits for operations in flight."""


class Dispatch:
    """Starts operations of one group on its backend.

    Args:
        backend: performs them.
        timeout: default timeout of an operation, in seconds.
    """

    def __init__(self, backend: Backend, timeout: float) -> None:
        self.backend = backend
        self.timeout = timeout
        self.closed = False
        self.refuses = False
        """Whether operations are refused: the group is closed, or a failed reform() has closed its lanes."""
        self._lock = threading.Lock()
        self._prepared: OrderedDict[tuple[Hashable, ...], Prepared] = OrderedDict()
        self._numbers = itertools.count(1)
        self._begun = [Begun()]
        """What has begun in each stream. That of program order, the first one, comes from the counter above, and is here only
        once the group is closed."""
        self._in_flight: dict[int, Work[Any]] = {}
        """Works that are not done, by id. Shared without a lock: each use is one dict operation, which is atomic."""
        self.landings = Landings(backend.clock, backend.latch)
        """Where the latest results on GPUs are complete."""
        self._family = weakref.WeakValueDictionary({backend.group_id: self})
        """Those of a world and of all subgroups below it, which share it: by the group's id, in the order they were made."""
        self.is_world = backend.group_id == 0
        self._closing = GroupClosedError("the group was closed") if self.is_world else _subgroup_closed()
        self._latch_of_recvs, self._ticket = (backend.latch, 0) if self.is_world else backend.latch.part()
        """Trips also when a subgroup is closed. Only for recvs: what other ranks wait for goes on."""
        self._forked: FerroError | None = None
        """The error of who uses it in a forked child."""
        self._activity = None if backend.session is None else backend.session.activity
        self.telemetry = telemetry()
        _dispatches.add(self)

    def close(self) -> None:
        """Refuses operations from now on."""
        self.closed = self.refuses = True

    def close_all(self, error: GroupClosedError) -> None:
        """As `close`, of a world and all its subgroups, whose generation another one has followed: what callers then get."""
        for dispatch in self._members():
            if not dispatch.closed:
                dispatch._closing = error
                dispatch.close()

    def retire(self, reason: str) -> None:
        """After close(): ends the recvs of a subgroup, and tells the backend which operations have begun. May be called again
        where it was interrupted. `reason`: as for `Backend.retire`."""
        self.backend.latch.forget(self._ticket)
        self._latch_of_recvs.trip(self._closing)
        if self._begun[0].last < 0:
            self._begun[0] = Begun(self.next_number() - 1)
        self.backend.retire(self._begun, reason)

    @property
    def is_open(self) -> bool:
        """Whether operations can still begin."""
        return not self.refuses and self.backend.latch.cause is None

    def check_open(self) -> None:
        """Raises GroupClosedError after close() or a failed reform(), and the first cause once the generation has ended, also
        where only this rank has found that it ends."""
        if self.closed:
            raise self._closing.again()
        cause = self.backend.latch.cause
        if cause is not None and not (self.refuses and isinstance(cause, StaleGenerationError)):  # which knows of a next group
            cause.mark_shown()
            raise self.located(cause.again())
        if cause is None and self.backend.latch.ended_here:
            check_ended_here(self.guard(0.0))
        if self.refuses:
            raise GroupClosedError(
                "a reform() of this group came to nothing, and its lanes are closed",
                hint="call group.reform() again for the next generation, or group.close()",
                retryable=True,
            )

    def end(self, cause: FerroError) -> FerroError:
        """Ends the generation on every rank. Returns once this rank knows of it, so that no operation begins afterwards: the
        first cause. Its caller knows why, so the log tells of no operation that ends thereby and that nobody looks at."""
        guard = self.guard(0.0)
        known = guard.latch.cause
        first = verdict(guard, cause) if known is None else known.again()
        first.mark_shown()
        return first

    def open_stream(self, channels: int | None) -> int:
        """Opens a stream and returns its number. Ranks agree on it by opening streams in the same order."""
        self.check_open()
        with self._lock:
            stream = len(self._begun)
            self._begun.append(Begun())
        self.backend.open_stream(stream)
        if channels is not None and self.backend.arena is not None:
            self.backend.arena.open_stream(stream, channels)
        return stream

    def next_number(self) -> int:
        """The number of the next operation in program order."""
        return next(self._numbers)

    def guard(self, seconds: float) -> Guard:
        """Deadline and latch of an operation that begins now."""
        return Guard(self.backend.clock, self.backend.latch, seconds)

    def guard_of_recv(self, seconds: float) -> Guard:
        """As `guard`, for a recv, which ends when its group is closed."""
        return Guard(self.backend.clock, self._latch_of_recvs, seconds)

    def prepared(
        self,
        operation: Operation,
        inputs: tuple[TensorSpec, ...] = (),
        op: ReduceOp | None = None,
        root: int | None = None,
        wire: str | None = None,
        algorithm: str | None = None,
        note: str = "",
        unordered: bool = False,
    ) -> Prepared:
        """The prepared `Call` with these fields, from the cache where it was called before.

        The key is a plain tuple of the fields, in their order: it is hashed much faster than a Call.

        Raises:
            UsageError: the call is invalid on every rank.
        """
        key = (operation, inputs, op, root, wire, algorithm, note, unordered)
        try:
            found = self._prepared.get(key)
        except TypeError:  # an algorithm or a codec that cannot be hashed is invalid
            found = None
        if found is None:
            check_sendable(inputs)
            found = self.backend.prepare(Call(*key))
            with self._lock:
                self._prepared[key] = found
                if len(self._prepared) > PREPARED_CALLS:
                    self._prepared.popitem(last=False)
        return found

    def perform(
        self,
        operation: Operation,
        prepared: Prepared,
        sources: Sequence[View],
        result: Result,
        seconds: float,
        async_op: bool,
        *,
        stream: int = 0,
        number: int | None = None,
    ) -> Any:
        """Starts a call, the next in program order unless it has a number of its own, and returns as `finish`."""
        backend, execution = self.backend, None
        try:
            if number is not None:
                with self._lock:
                    self._begun[stream] = self._begun[stream].with_number(number)
            place = next(self._numbers) if number is None else number
            guard = Guard(backend.clock, backend.latch, seconds)
            key = Key(backend.group_id, stream, place)
            try:
                execution = prepared.start(key, [source.data for source in sources], result.targets, guard)
            except (FerroError, MemoryError, RuntimeError) as error:  # the last from CUDA; all come before what is sent
                if isinstance(error, CollectiveTimeoutError):  # of a GPU, for whose array the others wait as well
                    raise verdict(guard, error) from None
                if number is None:
                    self._give_back(place)
                elif isinstance(error, MemoryError | LimitExceededError):  # the others wait for this rank's of that number
                    raise verdict(guard, failure_of(f"operation {number} of stream {stream}", error)) from None
                raise
            return self.finish(execution, result, async_op)
        except BaseException as error:
            self.struck(operation.value, error, execution)
            raise

    def start_at(self, prepared: PointerAllReduce, source: int, target: int, keeps: object, timeout: float | None) -> Execution:
        """A new execution of a call on addresses on a GPU. The other arguments are those of `PointerAllReduce.start_at`.

        Args:
            timeout: seconds, as a caller gives it.
        """
        backend = self.backend
        if self.refuses or backend.latch.cause is not None or backend.latch.ended_here:
            self.check_open()
        guard = Guard(backend.clock, backend.latch, self.timeout if timeout is None else seconds_of(timeout, self.timeout))
        number = next(self._numbers)
        try:
            return prepared.start_at(Key(backend.group_id, 0, number), source, target, keeps, guard)
        except Exception:  # it was refused before it had a place
            self._give_back(number)
            raise

    def _give_back(self, number: int) -> None:
        """Takes back the latest number: its operation was refused before anything was sent, so the peers' next one has it."""
        self._numbers = itertools.count(number)

    def finish(self, execution: Execution, result: Result, async_op: bool) -> Any:
        """The result (blocking), or a Work for it."""
        if async_op:
            return self.submit(execution, result)
        self.note(execution.label)
        self.run(execution)
        return _made_on_device(self.landings, result, execution)[0] if result.on_device else result.of(execution)

    def run(self, execution: Execution) -> None:
        """Drives an execution on this thread; errors are as this group's ranks see them."""
        backend, activity = self.backend, self._activity
        ended = self._observed(execution)
        began = backend.clock.now()
        failure = ""
        if activity is not None:
            activity.operating(began)
        try:
            backend.run(execution)
        except FerroError as error:
            failure = type(error).__name__
            error.mark_shown()
            if not self.is_world:
                raise self.located(error) from None
            raise
        except BaseException as error:
            failure = type(error).__name__
            if is_interrupt(error) and execution.timeout_breaks:  # that of a recv concerns this rank alone
                self.interrupted(execution.label, error)
            raise
        finally:
            if activity is not None:
                activity.operated(backend.clock.now() - began)
            if ended is not None:
                ended(failure)

    def interrupted(self, label: str, error: BaseException) -> None:
        """Ends the generation after an interrupt in an operation with a number: the other ranks wait for this one."""
        self.end(GroupAbortedError(self.backend.world_ranks[self.backend.rank], f"{type(error).__name__} during {label}"))

    def struck(self, label: str, error: BaseException, execution: Execution | None = None) -> None:
        """As `interrupted`, where this is an interrupt or an error of a signal handler. Of any other the generation knows, or
        the number was given back, as after a RuntimeError, which may be CUDA's.

        Args:
            execution: which perhaps has no driver yet; None where it was not started.
        """
        if is_interrupt(error):
            self.interrupted(label, error)
        elif (
            not isinstance(error, SystemExit | FerroError | MemoryError | RuntimeError)
            and place_in_user_code(error) is not None
        ):
            self.end(failure_of(label, error))
        if execution is not None and (self.backend.latch.cause or self.backend.latch.ended_here):
            with suppress(Exception):  # such as of one with which another thread still works: what has struck tells more
                execution.finish()

    def _observed(self, execution: Execution) -> Callable[[str], None] | None:
        """Begins an operation's span where telemetry is on, and returns what ends it; None where it is off."""
        active = self.telemetry
        if active is None:
            return None
        backend, session, label = self.backend, self.backend.session, execution.label
        generation = 1 if session is None else session.membership.assignment.generation
        names = {
            "ferrorpc.rank": backend.rank,
            "ferrorpc.world_rank": backend.world_ranks[backend.rank],
            "ferrorpc.size": backend.size,
            "ferrorpc.generation": generation,
        }
        span, began = active.begin(label, names), backend.clock.now()
        return lambda failure: active.end(span, label, backend.clock.now() - began, failure)

    def submit(self, execution: Execution, result: Result) -> Work[Any]:
        """A Work for the result; it is in flight until it is done."""
        self.note(execution.label)
        ended = self._observed(execution)
        try:
            work = self.backend.submit(execution, return_execution if result.on_device else result.of)
        except LimitExceededError as refusal:  # there is no thread for it
            if ended is not None:
                ended(type(refusal).__name__)
            execution.finish()
            if execution.timeout_breaks:  # others would wait for what it has begun
                self.end(refusal)
            raise
        if result.on_device:
            work.is_on_device, work.make_result = True, partial(_made_on_device, self.landings, result)
            if result.landing_device is not None:
                work.landing_context = result.landing_device.staging.landing_context
                if work.has_ended:  # perhaps before it had the context
                    work.complete_arrays()
        if ended is not None:
            work.on_done(lambda: ended(work.failure))
        if not self.is_world:
            work.translate_error = self.located
        work.meter = self._activity
        work.register(self._in_flight)
        return work

    def begin(self, execution: Execution) -> bool:
        """Advances an execution once on this thread, before its driver has it. Returns whether it is complete.

        An error is not raised here: the driver's next `advance` raises it.
        """
        if not isinstance(execution, EventDrivenExecution):
            return False
        execution.wake = wake_nobody  # so its driver has to ask for room again, where a lane is full now
        try:
            return execution.advance()
        except Exception:  # noqa: BLE001  a transport may raise anything
            return False

    def let_events_advance(self, execution: Execution) -> None:
        """Lets the threads that bring its messages advance an execution before its driver has it. Not one that sends: where a
        lane is full, its driver goes on."""
        if isinstance(execution, EventDrivenExecution):
            execution.wake, execution.has_begun = wake_nobody, True
            try:
                execution.notify()
            except BaseException:  # an interrupt: nobody will have it, so it must not keep its place
                execution.finish()
                raise

    def send(self, execution: Execution, async_op: bool) -> Any:
        """As `finish`, but sends on the caller's thread what the lane has room for: waking another thread costs more."""
        if not async_op or self.telemetry is not None or not self.begin(execution):
            return self.finish(execution, NOTHING, async_op)
        execution.finish()
        return self.sent(execution.label, async_op)

    def sent(self, label: str, async_op: bool) -> Work[None] | None:
        """What a send returns that is over."""
        self.note(label)
        if not async_op:
            return None
        work: Work[None] = Work(self.backend.clock, label)
        work.complete(None)
        return work

    def alone(self, sources: Sequence[View], result: Result) -> Any:
        """The result in a group of one: every operation returns its input."""
        self.note("a group of one")
        into_own = result.targets is not None
        arrays = [source.data if into_own or not source.borrowed else copy_of(source.data) for source in sources]
        found = result.give(arrays, [source.spec for source in sources], "an operation of one rank")
        if result.on_device:
            self.landings.note(result.landing, found)
        return found

    def await_landings_or_end(self, timeout: float | None) -> float:
        """As `Landings.settle`, before an operation with this timeout, in seconds, of which it returns what is left. Others
        wait for the operation, so if it cannot begin in time the generation ends."""
        self.check_open()
        until = self.backend.clock.now() + seconds_of(timeout, self.timeout)
        try:
            self.landings.settle(until)
        except CollectiveTimeoutError as error:
            self.end(error)
            raise
        return max(until - self.backend.clock.now(), 0.0)

    def note(self, activity: str) -> None:
        """Counts an operation that begins, for the next heartbeat."""
        if self._activity is not None:
            self._activity.note(activity)

    def adopt(self, subgroup: Dispatch) -> None:
        """What is in flight in this subgroup is waited for before its world ends."""
        subgroup._family = self._family
        self._family[subgroup.backend.group_id] = subgroup

    def drain(self, seconds: float, error: GroupClosedError | None = None) -> None:
        """Waits until nothing of this group, and of a world's subgroups, is in flight, at most so many seconds. Recvs that have
        no message by then fail, and nobody has to look at that.

        Args:
            error: what they fail with; None for that of a closed group.
        """
        clock, members = self.backend.clock, self._members() if self.is_world else [self]
        works = [work for dispatch in members for work in list(dispatch._in_flight.values())]
        await_all(works, clock, clock.now() + seconds)
        error = error or self._closing
        error.mark_shown()
        withdrawn = [work for work in works if (withdraw := work.withdraw) is not None and withdraw(error)]
        await_all(withdrawn, clock, clock.now() + OWN_WORK_SECONDS)  # no longer than a thread needs to end them

    def _members(self) -> list[Dispatch]:
        """Those of the family now: a list, because another thread may make a subgroup."""
        return [dispatch for reference in self._family.valuerefs() if (dispatch := reference()) is not None]

    def abandon_in_child(self) -> None:
        """In a forked child: fails what is in flight, which the parent's threads go on with there alone."""
        if self.backend.size == 1:
            return
        self._forked = used_in_child()
        self._forked.mark_shown()  # a child that does not look at its parent's operations logs nothing of them
        for work in list(self._in_flight.values()):
            work.abandon_in_child(self._forked)

    def check_not_forked(self) -> None:
        """Raises UsageError in a forked child."""
        if self._forked is not None:
            raise self._forked.again()

    def settle(self) -> None:
        """Waits until nothing of this group is in flight, on devices too."""
        self.check_not_forked()
        try:
            with nullcontext() if self._activity is None else self._activity.waiting(self.backend.clock):
                await_all(list(self._in_flight.values()), self.backend.clock, FOREVER)
                self.backend.synchronize(FOREVER)
                self.landings.settle(FOREVER)
        except FerroError as error:
            error.mark_shown()
            raise self.located(error) from None

    def located(self, error: BaseException) -> BaseException:
        """An error as a subgroup raises it: with the subgroup's rank beside the world rank that it names."""
        if not self.is_world and isinstance(error, FerroError) and error.fields.get("rank") in self.backend.world_ranks:
            error.fields["group_rank"] = self.backend.world_ranks.index(error.fields["rank"])
        return error


_dispatches: Final[weakref.WeakSet[Dispatch]] = weakref.WeakSet()


def _abandon_all() -> None:
    for dispatch in list(_dispatches):
        dispatch.abandon_in_child()


os.register_at_fork(after_in_child=_abandon_all)


def _made_on_device(landings: Landings, result: Result, execution: Execution) -> tuple[Any, Landing | None]:
    """As `Result.of`, on a GPU; and where it is complete. A Work that has ended refers to it, and so to no group."""
    found = result.of(execution)
    return found, landings.note(result.landing, found)


def _subgroup_closed() -> GroupClosedError:
    hint = "make another with subgroup(), or move close() after the last operation"
    return GroupClosedError("the subgroup was closed", hint=hint)
