"""The progress thread, which drives all asynchronous executions of a process.

It does for each of them what driver.py does for one: it advances those that were woken, and acts on the timers that are due.
Where thousands of operations wait, only the oldest ask their peers and explain their wait: more would flood peers and the log.

A thread that waits for a Work assists: for a moment it advances that operation itself, because to wake this thread and then the
waiting one takes several times as long as a small operation. One thread at a time has an operation, by the entry's `turn`. What
the progress thread leaves alone because another thread has it, that thread hands back when it stops.
"""

from __future__ import annotations

import heapq
import itertools
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
    failure_of,
    standing,
    unmade_result,
)
from ferrorpc.collectives.execution import Execution
from ferrorpc.collectives.polling import NAP_SECONDS_MAX, nap_seconds
from ferrorpc.errors import FerroError, UsageError
from ferrorpc.guard import FOREVER, SYSTEM_CLOCK, Clock, Parker
from ferrorpc.work import ASSIST_SECONDS, Work

TURN_SECONDS: Final = 1e-3
"""How long a thread that waits for an operation waits for its turn to assist."""
PROBES_AT_ONCE: Final = 64
"""How many asynchronous operations probe their peers within PROBE_SECONDS."""


class _Entry:
    """One asynchronous execution."""

    __slots__ = (
        "convert",
        "execution",
        "failure",
        "helper",
        "over",
        "patience",
        "queued",
        "raised",
        "scheduled",
        "serial",
        "ticket",
        "turn",
        "verdict_by",
        "work",
    )

    def __init__(
        self,
        execution: Execution,
        convert: Callable[[Execution], Any],
        work: Work[Any],
        patience: WaitTimers,
        serial: int,
    ) -> None:
        self.execution = execution
        self.convert = convert
        self.work = work
        self.patience = patience
        self.serial = serial
        self.over = False
        self.queued = False
        self.scheduled = False
        self.ticket = 0
        self.turn = threading.RLock()
        """Held by the thread that advances it. It knows its owner, which an interrupted thread does not."""
        self.helper: Parker | None = None
        """Of the thread that assists, which is woken in place of the progress thread."""
        self.raised: BaseException | None = None
        """What it raised on a thread that assisted. The progress thread fails it, because no interrupt strikes there."""
        self.failure: FerroError | None = None
        self.verdict_by = FOREVER

    def release(self) -> None:
        """Drops what it held when it is over. Timers may refer to the entry for a while longer."""
        self.over = True
        self.failure = self.raised = None  # their tracebacks refer to the execution
        del self.execution, self.convert, self.patience, self.work

    def nap_seconds(self) -> float:
        """The shortest sleep until its next poll."""
        if not self.turn.acquire(blocking=False):
            return NAP_SECONDS_MAX
        seconds = 0.0 if self.over else self.execution.nap_seconds
        self.turn.release()
        return seconds

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
        self._count = itertools.count()
        self._sleeps_until = FOREVER
        """Clock time at which the thread looks at the timers next; FOREVER also while it is awake and may have done so."""
        self._lock = threading.Lock()
        self._started = False
        self._threads = itertools.count()
        self._device: Device | None = None
        """The device that was made current on the thread; None before the first."""

    def submit(
        self,
        execution: Execution,
        convert: Callable[[Execution], Any],
        work: Work[Any] | None = None,
    ) -> Work[Any]:
        """Takes over an execution. The result of the Work is `convert(execution)`, called on the thread that completes it: the
        progress thread, or one that waits for the Work.

        Args:
            work: the Work; a new one where none is given.
        """
        if work is None:
            work = Work(self._clock, execution.label)
        entry = _Entry(execution, convert, work, WaitTimers(execution, self._probes, self._explanations), next(self._count))
        wake = partial(self._wake, entry)
        with self._lock:
            if not self._started:
                self._clock.start(self._run, "ferrorpc-progress")
                self._started = True
        if execution.can_be_assisted and not self._clock.one_at_a_time:
            work.assist = partial(self._assist, entry)
        work.standing, work.withdraw = partial(standing, execution), execution.withdraw
        entry.scheduled = execution.has_begun and execution.polling is None
        has_only_timers, due = entry.scheduled, entry.due()  # events advance it already
        # The ticket is set before others can wake the entry: from then on it may end at any time, and needs its ticket.
        entry.ticket = execution.guard.latch.watch(wake)
        execution.wake = wake
        if has_only_timers:
            self._schedule(entry, due)
        if not has_only_timers or execution.has_ended:
            self._wake(entry)
        elif due < self._sleeps_until:
            self._parker.unpark()
        return work

    def _wake(self, entry: _Entry) -> None:
        helper = entry.helper
        if helper is not None:
            helper.unpark()
            return
        if not entry.queued:
            entry.queued = True
            self._ready.append(entry)
        self._parker.unpark()  # in any case: an interrupt may have kept an earlier call from it

    def _run(self) -> None:
        if next(self._threads):
            return  # an interrupt struck as the first thread was started, so that there are two
        while True:
            while self._ready:
                entry = self._ready.popleft()
                entry.queued = False
                self._guarded(entry, self._step)
            now = self._clock.now()
            while self._timers and self._timers[0][0] <= now:
                entry = heapq.heappop(self._timers)[2]
                if not self._guarded(entry, self._fire):
                    self._schedule(entry, now + NAP_SECONDS_MAX)
            if not self._ready:
                until = min(self._timers[0][0] if self._timers else FOREVER, self._next_poll(now))
                self._sleeps_until = until
                self._parker.park(until)
                self._sleeps_until = FOREVER
            if self._polled:
                self._poll()

    def _next_poll(self, now: float) -> float:
        """Clock time of the next poll."""
        least_seconds = [queue[0].nap_seconds() for queue in self._polled.values()]
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

    def _guarded(self, entry: _Entry, act: Callable[[_Entry], None]) -> bool:
        """Acts on an entry that is not over. False, and nothing was done, where another thread has it."""
        if not entry.turn.acquire(blocking=False):
            return False
        try:
            if not entry.over:
                self._move_to(entry.execution.device)
                act(entry)
        except BaseException as error:  # noqa: BLE001  what one operation meets must not stop all the others of the process
            self._fail(entry, error)
        finally:
            entry.turn.release()
        return True

    def _assist(self, entry: _Entry) -> None:
        """Advances an operation on the calling thread, which waits for it, for a moment."""
        try:
            if entry.turn.acquire(timeout=TURN_SECONDS):
                if entry.helper is not None:
                    raise UsageError(
                        "a signal handler waits for the very operation that it has interrupted on this thread",
                        hint="let the handler set a flag, and wait where the program looks at it",
                    )
                entry.helper = self._clock.parker()
                self._advance_here(entry, entry.helper)
                self._hand_back(entry)
        except BaseException:  # wherever an interrupt strikes, the entry must not be left to nobody
            self._hand_back(entry)
            raise

    def _hand_back(self, entry: _Entry) -> None:
        """Leaves an entry to the progress thread, if this thread has it. A second call makes up for an interrupted one."""
        entry.helper = None
        try:  # noqa: SIM105  every small operation comes by here, and a context manager costs it 0.3 us
            entry.turn.release()
        except RuntimeError:  # another thread has it, or none
            pass
        if not entry.over:
            self._wake(entry)

    def _advance_here(self, entry: _Entry, helper: Parker) -> None:
        """Advances an entry of which this thread has the turn, and ends it if it becomes complete."""
        if entry.over or entry.failure is not None or entry.raised is not None:
            return
        execution, polling = entry.execution, entry.execution.polling
        try:
            execution.guard.latch.check()
            over = self._advanced_with_events(entry, helper) if polling is None else polling.spin(iter(execution.advance, True))
        except (FerroError, MemoryError) as error:
            entry.raised = error
            return
        except BaseException as error:  # of a signal handler: it is for this thread as well
            if polling is not None or isinstance(error, Exception):
                entry.raised = error  # a step that it struck cannot be repeated; those of events see to it themselves
            raise
        if execution.guard.latch.ended_here:
            entry.raised = execution.guard.latch.ended_here[0].again()
        elif over:
            queue = self._polled.get(execution.queue)
            self._end(entry, None)
            if queue is not None and len(queue) > 1:  # the next one is polled now
                self._parker.unpark()

    def _advanced_with_events(self, entry: _Entry, helper: Parker) -> bool:
        """Whether it became complete within a moment, and before a timer is due."""
        execution = entry.execution
        if execution.advance() or (execution.busy_poll() and execution.advance()):
            return True
        until = min(self._clock.now() + ASSIST_SECONDS, entry.due())
        while helper.park(until):
            execution.guard.latch.check()
            if execution.advance():
                return True
        return False

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
        if entry.raised is not None:
            self._fail(entry, entry.raised)
            return
        latch.check()
        execution, position = entry.execution, entry.execution.position
        over = execution.advance()
        if latch.ended_here:
            self._fail(entry, latch.ended_here[0].again())
        elif over:
            self._moved_at = self._clock.now()
            self._end(entry, None)
        elif not entry.scheduled:
            entry.scheduled = True
            self._schedule(entry)
            if execution.polling is not None:
                self._moved_at = self._clock.now()
                self._queue_up(entry)
        elif execution.polling is None or execution.position != position:
            self._moved_at = self._clock.now()
            entry.patience.progressed()

    def _queue_up(self, entry: _Entry) -> None:
        """Adds an entry to those that are polled, in the order of submission: an assisted one may come late."""
        queue = self._polled.setdefault(entry.execution.queue, deque())
        place = len(queue)
        while place and queue[place - 1].serial > entry.serial:
            place -= 1
        queue.insert(place, entry)

    def _fire(self, entry: _Entry) -> None:
        """A timer of the entry is due, or was due before it made progress."""
        if entry.failure is not None:
            if self._clock.now() >= entry.verdict_by:
                self._end(entry, entry.failure)
            return
        if self._clock.now() >= entry.patience.due():
            entry.patience.act()
        self._schedule(entry)

    def _schedule(self, entry: _Entry, due: float | None = None) -> None:
        """Adds a timer, for the entry's own time or another. One operation of the heap, which other threads do not divide."""
        heapq.heappush(self._timers, (entry.due() if due is None else due, next(self._count), entry))

    def _fail(self, entry: _Entry, raised: BaseException) -> None:
        error = failure_of(entry.execution.label, raised)
        latch = entry.execution.guard.latch
        if latch.ended_here:  # which is reported already, and is no local matter of this operation
            error = latch.ended_here[0].again()
        elif not breaks(entry.execution, error):
            self._end(entry, error.again())  # without its traceback, which would keep the arrays of the operation alive
            return
        if latch.cause is not None:
            self._end(entry, latch.cause.again())
            return
        entry.failure = error
        entry.verdict_by = self._clock.now() + VERDICT_SECONDS
        self._schedule(entry)
        latch.end(error)

    def _end(self, entry: _Entry, error: FerroError | None) -> None:
        execution, result = entry.execution, None
        execution.guard.latch.forget(entry.ticket)
        try:
            execution.finish()
        except Exception as problem:  # noqa: BLE001  such as one of a GPU that has failed: the operation must end all the same
            if error is None:
                error = failure_of(execution.label, problem).again()
                execution.guard.latch.end(error)
        if error is None:
            try:
                result = entry.convert(execution)
            except Exception as problem:
                if entry.helper is not None and not isinstance(problem, FerroError | MemoryError):
                    raise  # perhaps a signal handler's, for the thread that assists: the progress thread makes the result again
                error = unmade_result(execution.label, problem)
                execution.give_back()
        work = entry.work
        end = partial(work.complete, result) if error is None else partial(work.fail, error)
        try:
            entry.release()
            end()
        except BaseException:  # an interrupt of a thread that assists: nobody else would end it
            end()
            raise


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
