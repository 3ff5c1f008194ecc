"""The progress thread, which drives all asynchronous executions of a process.

It does for each of them what driver.py does for one: it advances those that were woken, and acts on the timers that are due.
Where thousands of operations wait, only the oldest ask their peers and explain their wait: more would flood peers and the log.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from ferrorpc.arrays.device import Device
from ferrorpc.collectives.driver import (
    EXPLAIN_SECONDS,
    EXPLAINED_AT_ONCE,
    PROBE_SECONDS,
    VERDICT_SECONDS,
    Allowance,
    WaitTimers,
    breaks,
    out_of_memory,
    unexpected,
)
from ferrorpc.collectives.execution import Execution
from ferrorpc.collectives.polling import nap_seconds
from ferrorpc.errors import FerroError
from ferrorpc.guard import FOREVER, SYSTEM_CLOCK, Clock
from ferrorpc.work import Work

PROBES_AT_ONCE: Final = 64
"""How many asynchronous operations probe their peers within PROBE_SECONDS."""


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
