"""Drives one execution on the caller's thread, for a blocking call; the waits, timers and failures of all executions.

A driver advances an execution, and parks until it is woken, its generation ends, or a timer is due. After PROBE_SECONDS without
progress the peers waited for are asked where they are, after EXPLAIN_SECONDS the wait is explained in the log, and at the
deadline the operation fails. A failure is reported first. What is raised is the first cause that the coordinator kept, so every
rank raises the same. The driver of asynchronous executions is in progress.py.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import numpy as np

from ferrorpc.arrays.event import translated
from ferrorpc.collectives.execution import Execution
from ferrorpc.collectives.polling import nap_seconds
from ferrorpc.errors import BackendUnavailableError, FerroError, LimitExceededError, UsageError
from ferrorpc.generation_errors import ended_by, reason_of
from ferrorpc.guard import FOREVER, Guard, Parker
from ferrorpc.logs import tell
from ferrorpc.tracebacks import is_own_frame
from ferrorpc.work import Work

PROBE_SECONDS: Final = 0.25
EXPLAIN_SECONDS: Final = 5.0
EXPLAINED_AT_ONCE: Final = 8
"""How many asynchronous operations are explained within EXPLAIN_SECONDS."""
VERDICT_SECONDS: Final = 1.5
"""How long a failed operation waits for the coordinator's first cause before it raises the rank's own error."""
_GPU_OUT_OF_MEMORY: Final = "OutOfMemoryError"
"""CuPy's class, a MemoryError."""
_LIBRARIES: Final = sys.stdlib_module_names | {"cuda", "cupy", "google", "grpc", "ml_dtypes", "nccl", "numpy", "torch"}
"""What this library calls, and no user code."""

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
            text = "; ".join((execution.explain(), *_unwell(execution)))
            tell(_log, logging.WARNING, "after %.0f s, %s", execution.guard.waited, text)
        elif allowance.asked == EXPLAINED_AT_ONCE + 1:
            text = "after %.0f s, more operations wait than the %d above"
            tell(_log, logging.WARNING, text, execution.guard.waited, EXPLAINED_AT_ONCE)


def _unwell(execution: Execution) -> list[str]:
    """What the coordinator reported of ranks that the execution waits for and that are not well."""
    told = execution.guard.latch.unhealthy
    found = [told.get(rank) for rank in execution.waiting_on()] if told else []
    return [each for each in found if each is not None]


def breaks(execution: Execution, error: FerroError) -> bool:
    """Whether this failure ends the generation, or concerns this rank alone."""
    if execution.fails_alone or isinstance(error, UsageError):
        return False
    return execution.timeout_breaks or not isinstance(error, TimeoutError)


def out_of_memory(label: str, error: MemoryError) -> LimitExceededError:
    """The failure of an operation whose arrays do not fit this process's memory, or its GPU's. Peers decide how large they
    are."""
    if type(error).__name__ == _GPU_OUT_OF_MEMORY:
        who, hint = "the GPU", "send smaller arrays, or free some (cupy.get_default_memory_pool().free_all_blocks())"
    else:
        who, hint = "this process", "send smaller arrays, give ranks more memory, or fewer of them a host"
    return LimitExceededError(f"{label}: {who} has no memory for what the operation brings: {error}", hint=hint)


def unexpected(label: str, error: Exception) -> FerroError:
    """The failure of an operation by an error of another library or of Python: a GPU has failed; or user code has raised it: a
    signal handler, which Python calls wherever it is, or a third party's send or recv; or it is a bug in this library."""
    told = translated(error)
    if isinstance(told, FerroError):
        return told
    place = place_in_user_code(error)
    if place is not None:
        hint = f"see {place}, where it was raised; group.reform() makes a new generation"
        return ended_by(f"{reason_of(error)} during {label}", hint)
    return FerroError(f"{label}: {error!r}")


def place_in_user_code(error: BaseException) -> str | None:
    """The last place in user code that this library called, directly or through another one; None if there is none."""
    place, trace = None, error.__traceback__
    while trace is not None:
        if is_own_frame(trace.tb_frame):
            place = None
        elif str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0] not in _LIBRARIES:
            place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def interrupted(label: str, interrupt: BaseException) -> FerroError:
    """The failure of an operation that an interrupt has struck, on a thread which may be another than its driver's."""
    return ended_by(f"{type(interrupt).__name__} during {label}")


def failure_of(label: str, error: BaseException) -> FerroError:
    """The failure of an operation that has raised this error."""
    if isinstance(error, FerroError):
        return error
    if isinstance(error, MemoryError):
        return out_of_memory(label, error)
    return unexpected(label, error) if isinstance(error, Exception) else interrupted(label, error)


def unmade_result(label: str, error: Exception) -> FerroError:
    """The failure to make the result of an operation that is over, which concerns this rank alone."""
    if isinstance(error, MemoryError):
        return out_of_memory(label, error)
    told = translated(error)
    return told if isinstance(told, FerroError) else FerroError(f"{label} is over, but its result could not be made: {error!r}")


def drive(execution: Execution) -> list[np.ndarray[Any, Any]]:
    """Drives one execution on this thread; returns its results.

    Raises:
        FerroError: the first cause of the generation's end, this rank's timeout, or a UsageError of this call.
    """
    try:
        _drive(execution)
    except BaseException:
        with suppress(Exception):  # such as one of a GPU that has failed: what is raised tells more
            execution.finish()
        raise
    execution.finish()
    return execution.results


def _drive(execution: Execution) -> None:
    """Advances an execution until it is complete. Raises as `drive`."""
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
        raise _first_cause(guard, error) from None
    except MemoryError as error:
        raise _first_cause(guard, out_of_memory(execution.label, error)) from None
    except Exception as problem:
        found = unexpected(execution.label, problem)
        if guard.latch.cause is None and not isinstance(found, BackendUnavailableError):
            guard.latch.end(found)  # a bug, which is best seen where it is
            raise
        raise _first_cause(guard, found) from None
    check_ended_here(guard)


def check_ended_here(guard: Guard) -> None:
    """Raises the first cause where this rank has found that the generation ends, though the coordinator has not told it yet.
    Another thread may have, of an operation from which no rank waits for anything."""
    if guard.latch.ended_here:
        raise _first_cause(guard, guard.latch.ended_here[0].again())


def standing(execution: Execution) -> tuple[list[int], str]:
    """What an operation waits for, as far as is known, for a thread that waits no longer. It takes no turn, which only who
    goes on with the operation may have: else a wake-up could be lost."""
    try:
        return execution.waiting_on(), execution.explain()
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):  # another thread is just ending it
        return [], ""


def drive_apart(execution: Execution, convert: Callable[[Execution], Any]) -> Work[Any]:
    """Drives an execution on a thread of its own, which ends with it. The Work's result is `convert(execution)`."""
    clock = execution.guard.clock
    work: Work[Any] = Work(clock, execution.label)
    work.standing = partial(standing, execution)

    def body() -> None:
        try:
            drive(execution)
        except Exception as problem:  # noqa: BLE001  a third party's send or recv may raise anything
            work.fail(failure_of(execution.label, problem))
            return
        try:
            result = convert(execution)
        except Exception as problem:  # noqa: BLE001  whatever it is, nobody else is concerned
            work.fail(unmade_result(execution.label, problem))
        else:
            work.complete(result)

    clock.start(body, "ferrorpc-operation")
    return work


def _first_cause(guard: Guard, error: FerroError) -> FerroError:
    """The error that a failed operation raises. A function of its own: a frame that refers to the error it raises is a
    reference cycle that keeps the arrays alive."""
    cause = guard.latch.cause
    return verdict(guard, error) if cause is None else cause.again()


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


def verdict(guard: Guard, error: FerroError) -> FerroError:
    """Ends the generation. Returns what to raise: the first cause as soon as it is known, else the failure itself."""
    latch, parker, until = guard.latch, guard.clock.parker(), guard.clock.now() + VERDICT_SECONDS
    ticket = latch.watch(parker.unpark)
    latch.end(error)
    while latch.cause is None and parker.park(until):
        pass
    latch.forget(ticket)
    return error if latch.cause is None else latch.cause.again()
