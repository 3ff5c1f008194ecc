"""Drives executions: the caller's thread for a blocking call, one progress thread for all asynchronous ones.

Both do the same. They advance an execution, and park until it is woken, its generation ends, or a timer is due. After
PROBE_SECONDS without progress the peers waited for are asked where they are, after EXPLAIN_SECONDS the wait is explained in the
log, and at the deadline the operation fails. Where thousands of asynchronous operations wait, only the oldest ask and explain:
more would flood peers and the log. A failure is reported first. What is raised is the first cause that the coordinator kept, so
every rank raises the same.
"""

from __future__ import annotations

import heapq
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np

from ferrorpc.arrays.device import Device
from ferrorpc.collectives.execution import Execution
from ferrorpc.collectives.polling import nap_seconds
from ferrorpc.errors import FerroError, LimitExceededError, UsageError, is_own_frame
from ferrorpc.guard import FOREVER, SYSTEM_CLOCK, Clock, Guard, Parker
from ferrorpc.work import Work

PROBE_SECONDS: Final = 0.25
EXPLAIN_SECONDS: Final = 5.0
PROBES_AT_ONCE: Final = 64
"""How many asynchronous operations probe their peers within PROBE_SECONDS."""
EXPLAINED_AT_ONCE: Final = 8
"""How many asynchronous operations are explained within EXPLAIN_SECONDS."""
VERDICT_SECONDS: Final = 1.5
"""How long a failed operation waits for the coordinator's first cause before it raises the rank's own error."""

_log = logging.getLogger("ferrorpc.collectives")


class Allowance:
    """Lets the first `count` of those who ask within `seconds` go ahead. For one thread."""

    def __init__(self, count: int, seconds: float) -> None:
        self._count = count
        self._seconds = seconds
        self._until = -FOREVER
        self.asked = 0
        """How many have asked in the present interval."""

    def grants(self, now: float) -> bool:
        """Whether the one who asks may go ahead."""
        if now >= self._until:
            self._until, self.asked = now + self._seconds, 0
        self.asked += 1
        return self.asked <= self._count


class WaitTimers:
    """The timers of a waiting execution: probe, explanation, deadline.

    Args:
        probes, explanations: shared by all operations of a thread; None for an operation that has its thread for itself.
    """

    __slots__ = ("_execution", "_explain_at", "_explanations", "_probe_at", "_probes", "_step")

    def __init__(self, execution: Execution, probes: Allowance | None = None, explanations: Allowance | None = None) -> None:
        guard = execution.guard
        self._execution = execution
        self._probes = probes
        self._explanations = explanations
        self._step = min(PROBE_SECONDS, guard.seconds / 2)
        self._probe_at = guard.started + self._step
        self._explain_at = guard.started + EXPLAIN_SECONDS

    def due(self) -> float:
        """Clock time of the next timer."""
        return min(self._execution.guard.deadline, self._probe_at, self._explain_at)

    def progressed(self) -> None:
        """There was progress: postpones the next probe. The guard may be a new one since then (`Expected.take`)."""
        guard = self._execution.guard
        self._probe_at = guard.clock.now() + self._step
        self._explain_at = max(self._explain_at, guard.started + EXPLAIN_SECONDS)

    def act(self) -> None:
        """Acts on the timers that are due.

        Raises:
            FerroError: the deadline has passed.
        """
        execution, now = self._execution, self._execution.guard.clock.now()
        if now >= execution.guard.deadline:
            raise execution.timeout_error()
        if now >= self._probe_at:
            if self._probes is None or self._probes.grants(now):
                execution.probe()
            self._probe_at = now + max(self._step, (now - execution.guard.started) / 4)
        if now >= self._explain_at:
            self._explain(now)
            self._explain_at = now + 2 * execution.guard.waited

    def _explain(self, now: float) -> None:
        execution, allowance = self._execution, self._explanations
        if allowance is None or allowance.grants(now):
            _log.warning("after %.0f s, %s", execution.guard.waited, "; ".join((execution.explain(), *_unwell(execution))))
        elif allowance.asked == EXPLAINED_AT_ONCE + 1:
            _log.warning("after %.0f s, more operations wait than the %d above", execution.guard.waited, EXPLAINED_AT_ONCE)


def _unwell(execution: Execution) -> list[str]:
    """What the coordinator reported of ranks that the execution waits for and that are not well."""
    told = execution.guard.latch.unhealthy
    found = [told.get(rank) for rank in execution.waiting_on()] if told else []
    return [each for each in found if each is not None]


def breaks(execution: Execution, error: FerroError) -> bool:
    """Whether this failure ends the generation, or concerns this rank alone."""
    if isinstance(error, UsageError):
        return False
    return execution.timeout_breaks or not isinstance(error, TimeoutError)


def out_of_memory(label: str, error: MemoryError) -> LimitExceededError:
    """The failure of an operation whose arrays do not fit this process's memory. Peers decide how large they are."""
    return LimitExceededError(
        f"{label}: this process has no memory for what the operation brings: {error}",
        hint="send smaller arrays, give ranks more memory, or fewer of them a host",
    )


def unexpected(label: str, error: Exception) -> FerroError:
    """The failure of an operation by an error of another library or of Python. It is a bug in this one, or was raised by the
    user's code: a signal handler, which Python calls wherever it is, or a third party's send or recv."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    hint = FerroError.default_hint
    if trace is not None and not is_own_frame(trace.tb_frame):
        place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        hint = f"see {place}, where it was raised; if that is not your code, {hint}"
    return FerroError(f"{label}: {error!r}", hint=hint)


def drive(execution: Execution, abort: Callable[[FerroError], None]) -> list[np.ndarray[Any, Any]]:
    """Drives one execution on this thread; returns its results.

    Raises:
        FerroError: the first cause of the generation's end, this rank's timeout, or a UsageError of this call.
    """
    guard = execution.guard
    parker = guard.clock.parker()
    execution.wake = parker.unpark
    try:
        guard.latch.check()
        if execution.polling is not None:
            if not execution.polling.spin(iter(execution.advance, True)):
                _poll(execution, parker)
        elif not execution.advance() and (execution.has_polled or not execution.busy_poll() or not execution.advance()):
            _wait(execution, parker)
    except FerroError as error:
        if not breaks(execution, error):
            raise
        raise _first_cause(guard, error, abort, parker) from None
    except MemoryError as error:
        raise _first_cause(guard, out_of_memory(execution.label, error), abort, parker) from None
    except Exception as bug:
        abort(unexpected(execution.label, bug))
        raise
    finally:
        execution.finish()
    return execution.results


def drive_apart(execution: Execution, abort: Callable[[FerroError], None], convert: Callable[[Execution], Any]) -> Work[Any]:
    """Drives an execution on a thread of its own, which ends with it. The Work's result is `convert(execution)`."""
    clock = execution.guard.clock
    work: Work[Any] = Work(clock, execution.label)

    def body() -> None:
        try:
            drive(execution, abort)
            work.complete(convert(execution))
        except FerroError as error:
            work.fail(error)
        except Exception as bug:  # noqa: BLE001  a third party's send or recv may raise anything
            work.fail(unexpected(execution.label, bug))

    clock.start(body, "ferrorpc-operation")
    return work


def _first_cause(guard: Guard, error: FerroError, abort: Callable[[FerroError], None], parker: Parker) -> FerroError:
    """The error that a failed operation raises. A function of its own: a frame that refers to the error it raises is a
    reference cycle that keeps the arrays alive."""
    cause = guard.latch.cause
    return verdict(guard, error, abort, parker) if cause is None else cause.again()


def _wait(execution: Execution, parker: Parker) -> None:
    latch = execution.guard.latch
    patience = WaitTimers(execution)
    ticket = latch.watch(parker.unpark)
    try:
        while True:
            woken = parker.park(patience.due())
            latch.check()
            if not woken:
                patience.act()
            elif execution.advance():
                return
            else:
                patience.progressed()
    finally:
        latch.forget(ticket)


def _poll(execution: Execution, parker: Parker) -> None:
    clock, latch = execution.guard.clock, execution.guard.latch
    patience = WaitTimers(execution)
    ticket = latch.watch(parker.unpark)
    position, moved_at = execution.position, clock.now()
    try:
        while True:
            now = clock.now()
            parker.park(min(patience.due(), now + nap_seconds(now - moved_at)))
            latch.check()
            if execution.advance():
                return
            if execution.position != position:
                position, moved_at = execution.position, clock.now()
                patience.progressed()
            elif clock.now() >= patience.due():
                patience.act()
    finally:
        latch.forget(ticket)


def verdict(guard: Guard, error: FerroError, abort: Callable[[FerroError], None], parker: Parker) -> FerroError:
    """Reports a failure and returns what to raise: the first cause as soon as it is known, else the failure itself."""
    latch, until = guard.latch, guard.clock.now() + VERDICT_SECONDS
    ticket = latch.watch(parker.unpark)
    abort(error)
    while latch.cause is None and parker.park(until):
        pass
    latch.forget(ticket)
    return error if latch.cause is None else latch.cause.again()


class _Entry:
    """One asynchronous execution."""

    __slots__ = (
        "abort",
        "convert",
        "execution",
        "failure",
        "over",
        "patience",
        "queued",
        "scheduled",
        "ticket",
        "verdict_by",
        "work",
    )

    def __init__(
        self,
        execution: Execution,
        abort: Callable[[FerroError], None],
        convert: Callable[[Execution], Any],
        work: Work[Any],
        patience: WaitTimers,
    ) -> None:
        self.execution = execution
        self.abort = abort
        self.convert = convert
        self.work = work
        self.patience = patience
        self.over = False
        self.queued = False
        self.scheduled = False
        self.ticket = 0
        self.failure: FerroError | None = None
        self.verdict_by = FOREVER

    def release(self) -> None:
        """Drops what it held when it is over. Timers may refer to the entry for a while longer."""
        self.over = True
        self.failure = None  # its traceback refers to the execution
        del self.execution, self.abort, self.convert, self.patience, self.work

    def due(self) -> float:
        """Clock time of its next timer."""
        return self.verdict_by if self.failure is not None else self.patience.due()


class Progress:
    """The thread that interleaves all asynchronous executions of one process (of one virtual world)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._parker = clock.parker()
        self._ready: deque[_Entry] = deque()
        self._timers: list[tuple[float, int, _Entry]] = []
        self._polled: dict[object, deque[_Entry]] = {}
        """Queue -> what waits in it; only the oldest of each is polled."""
        self._probes = Allowance(PROBES_AT_ONCE, PROBE_SECONDS)
        self._explanations = Allowance(EXPLAINED_AT_ONCE, EXPLAIN_SECONDS)
        self._moved_at = 0.0
        self._count = 0
        self._lock = threading.Lock()
        self._started = False
        self._device: Device | None = None
        """The device that was made current on the thread; None before the first."""

    def submit(
        self,
        execution: Execution,
        abort: Callable[[FerroError], None],
        convert: Callable[[Execution], Any],
        work: Work[Any] | None = None,
    ) -> Work[Any]:
        """Takes over an execution. The result of the Work is `convert(execution)`, called on the progress thread.

        Args:
            work: the Work; a new one where none is given.
        """
        if work is None:
            work = Work(self._clock, execution.label)
        entry = _Entry(execution, abort, convert, work, WaitTimers(execution, self._probes, self._explanations))
        wake = partial(self._wake, entry)
        with self._lock:
            if not self._started:
                self._clock.start(self._run, "ferrorpc-progress")
                self._started = True
        # The ticket is set before others can wake the entry: from then on it may end at any time, and needs its ticket.
        entry.ticket = execution.guard.latch.watch(wake)
        execution.wake = wake
        self._wake(entry)
        return work

    def _wake(self, entry: _Entry) -> None:
        if not entry.queued:
            entry.queued = True
            self._ready.append(entry)
            self._parker.unpark()

    def _run(self) -> None:
        while True:
            while self._ready:
                entry = self._ready.popleft()
                entry.queued = False
                self._guarded(entry, self._step)
            now = self._clock.now()
            while self._timers and self._timers[0][0] <= now:
                self._guarded(heapq.heappop(self._timers)[2], self._fire)
            if not self._ready:
                until = self._timers[0][0] if self._timers else FOREVER
                self._parker.park(min(until, self._next_poll(now)))
            if self._polled:
                self._poll()

    def _next_poll(self, now: float) -> float:
        """Clock time of the next poll."""
        least_seconds = [queue[0].execution.nap_seconds for queue in self._polled.values() if not queue[0].over]
        return now + nap_seconds(now - self._moved_at, min(least_seconds, default=0.0)) if self._polled else FOREVER

    def _poll(self) -> None:
        """Advances the executions that are polled: the oldest of each queue, and the next one as soon as it is over."""
        for key, queue in list(self._polled.items()):
            while queue:
                self._guarded(queue[0], self._step)
                if not queue[0].over:
                    break
                queue.popleft()
            else:
                del self._polled[key]

    def _guarded(self, entry: _Entry, act: Callable[[_Entry], None]) -> None:
        if entry.over:
            return
        try:
            self._move_to(entry.execution.device)
            act(entry)
        except FerroError as error:
            self._fail(entry, error)
        except MemoryError as error:
            self._fail(entry, out_of_memory(entry.execution.label, error))
        except Exception as bug:  # noqa: BLE001  a bug in one operation must not stop all the others of the process
            self._fail(entry, unexpected(entry.execution.label, bug))

    def _move_to(self, device: Device | None) -> None:
        """Makes the GPU of an execution current on this thread, so that its arrays are freed there."""
        if device is not None and device is not self._device:
            device.enter_own_thread()
            self._device = device

    def _step(self, entry: _Entry) -> None:
        """The entry was woken: advances it, or ends it if it has failed and the first cause is known."""
        latch = entry.execution.guard.latch
        if entry.failure is not None:
            if latch.cause is not None:
                self._end(entry, latch.cause.again())
            return
        latch.check()
        execution, position = entry.execution, entry.execution.position
        if execution.advance():
            self._moved_at = self._clock.now()
            self._end(entry, None)
        elif not entry.scheduled:
            entry.scheduled = True
            self._schedule(entry)
            if execution.polling is not None:
                self._moved_at = self._clock.now()
                self._polled.setdefault(execution.queue, deque()).append(entry)
        elif execution.polling is None or execution.position != position:
            self._moved_at = self._clock.now()
            entry.patience.progressed()

    def _fire(self, entry: _Entry) -> None:
        """A timer of the entry is due, or was due before it made progress."""
        if entry.failure is not None:
            if self._clock.now() >= entry.verdict_by:
                self._end(entry, entry.failure)
            return
        if self._clock.now() >= entry.patience.due():
            entry.patience.act()
        self._schedule(entry)

    def _schedule(self, entry: _Entry) -> None:
        self._count += 1
        heapq.heappush(self._timers, (entry.due(), self._count, entry))

    def _fail(self, entry: _Entry, error: FerroError) -> None:
        if not breaks(entry.execution, error):
            self._end(entry, error)
            return
        cause = entry.execution.guard.latch.cause
        if cause is not None:
            self._end(entry, cause.again())
            return
        entry.failure = error
        entry.verdict_by = self._clock.now() + VERDICT_SECONDS
        self._schedule(entry)
        entry.abort(error)

    def _end(self, entry: _Entry, error: FerroError | None) -> None:
        execution, result = entry.execution, None
        execution.guard.latch.forget(entry.ticket)
        execution.finish()
        if error is None:
            try:
                result = entry.convert(execution)
            except FerroError as problem:
                error = problem
                execution.give_back()
        work = entry.work
        entry.release()
        if error is not None:
            work.fail(error)
        else:
            work.complete(result)


_create = threading.Lock()
_inherited: list[Progress | None] = []
"""In a forked child, that of its parent. It is kept, because what it holds must not be freed there."""


def progress_of(clock: Clock) -> Progress:
    """The progress thread of a clock: one per process, or per virtual world. It is kept on the clock and freed with it."""
    found: Progress | None = getattr(clock, "progress", None)
    if found is None:
        with _create:
            found = getattr(clock, "progress", None) or Progress(clock)
            vars(clock)["progress"] = found
    return found


def _begin_anew() -> None:
    """In a forked child, where its parent's thread is not: the first asynchronous operation of a new group starts another."""
    global _create
    _create = threading.Lock()
    _inherited.append(vars(SYSTEM_CLOCK).pop("progress", None))


os.register_at_fork(after_in_child=_begin_anew)
