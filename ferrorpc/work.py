"""Work: the handle of an asynchronous operation."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, Generic, NoReturn, Protocol, TypeVar
from weakref import WeakKeyDictionary

from ferrorpc.errors import CollectiveTimeoutError, FerroError, UsageError
from ferrorpc.guard import FOREVER, Clock, Parker, seconds_of
from ferrorpc.logs import tell

Result = TypeVar("Result", covariant=True)
ASSIST_SECONDS: Final = 10e-3
"""How long `assist` may take: threads that wait no longer do not assist."""
TURN_MIN_SECONDS: Final = 1e-5
TURN_MAX_SECONDS: Final = 1e-2
"""How long an event loop waits at a time, on a clock whose threads take turns: minutes should not take too many turns."""

_log = logging.getLogger("ferrorpc.work")
_awaiting: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakKeyDictionary[Clock, Parker]] = WeakKeyDictionary()
"""One parker for each loop and clock, so that a loop goes on as soon as any Work that its coroutines await is done."""


class Meter(Protocol):
    """Counts the time that callers spend in operations. Called on the thread that waits."""

    def operating(self, began: float) -> None:
        """The thread began to wait at that clock time."""

    def operated(self, seconds: float) -> None:
        """The thread has waited so long."""


class Landing(Protocol):
    """Where a result that a GPU computes is complete."""

    @property
    def is_reached(self) -> bool:
        """Whether the GPU has come there. Never blocks."""

    def follow(self) -> None:
        """Orders the calling thread's current stream after it."""

    def settle(self, clock: Clock, until: float) -> None:
        """Waits until the GPU is there, or until that clock time."""


class Work(Generic[Result]):
    """The handle of an asynchronous operation. It keeps the operation's arrays alive until it is done.

    `wait` may time out any number of times without consuming the result; under asyncio `await work` waits without blocking the
    loop. `done` and `exception` never block. An error that nobody has looked at is logged when the handle is deleted: once
    where one cause ended many operations, and not at all if it was seen on another of them, or is this rank's own interrupt or
    abort.
    """

    translate_error: Callable[[BaseException], BaseException] | None = None
    """For the driver, which sets it before it hands out the Work: translates an error before the caller sees it."""
    meter: Meter | None = None
    """For the driver, likewise: counts the time of callers that wait."""
    make_result: Callable[[Any], tuple[Result, Landing | None]] | None = None
    """For the driver of an operation whose result is on a GPU: converts what it has produced to the result, and says where that
    is complete, on the thread that waits first. Arrays on a GPU belong to a stream, and every thread has its own current
    stream."""
    landing_context: Callable[[], AbstractContextManager[Any]] | None = None
    """For that driver, likewise: where a result for the caller's arrays is made once the operation has ended, if nobody waits
    before; None for a new array."""
    is_on_device = False
    """For that driver, likewise: whether the result is on a GPU."""
    assist: Callable[[], None] | None = None
    """For the driver, likewise: advances the operation for a moment, on a thread that waits for it."""
    standing: Callable[[], tuple[list[int], str]] | None = None
    """For the driver, likewise: which world ranks the operation waits for, and a sentence about it."""
    withdraw: Callable[[FerroError], bool] | None = None
    """For the driver, likewise: as `Execution.withdraw`."""
    _landing: Landing | None = None
    _done = False
    _observed = False
    _result: Result | None = None
    _error: BaseException | None = None

    _register: dict[int, Any] | None = None
    """Holds it, by id, until it has ended."""

    def __init__(self, clock: Clock, label: object) -> None:
        self._label = label  # its text is made when it is asked for
        self._clock = clock
        self._lock = threading.Lock()
        self._result_lock = threading.RLock()
        """Knows its owner, which an interrupted thread does not."""
        self._callbacks: list[Callable[[], object]] = []

    @property
    def label(self) -> str:
        """The operation, for messages."""
        return str(self._label)

    def done(self) -> bool:
        """Whether the operation has ended, successfully or not, and the caller's arrays are complete. If not, other threads go
        first: a loop of such calls would keep the interpreter from the thread that has to end the operation."""
        is_over = self._done and self._has_landed()
        if not is_over:
            self._clock.give_way()
        return is_over

    @property
    def has_ended(self) -> bool:
        """For the driver, and where a thread must not give way: whether the operation has ended."""
        return self._done

    def exception(self) -> BaseException | None:
        """Its error; None when it succeeded or still runs."""
        if not self._done:  # the error is set before `_done`
            return None
        return self._observe()

    @property
    def failure(self) -> str:
        """The name of its error's class, for statistics; empty without one. Reading it does not count as looking at it."""
        return "" if self._error is None else type(self._error).__name__

    def wait(self, timeout: float | None = None, host: bool = False) -> Result:
        """The result, as soon as there is one.

        Args:
            timeout: seconds; None waits as long as the operation's own deadline allows.
            host: wait until the result is complete even where a GPU computes it. Otherwise such a result is returned as soon as
                its computation is queued, and the current stream is ordered after it.

        Raises:
            CollectiveTimeoutError: it still runs after `timeout`. It continues, and wait may be called again.
            FerroError: the error of the operation.
        """
        seconds = seconds_of(timeout, FOREVER)
        until = self._clock.now() + seconds
        if not self._done:
            self._await(until, seconds)
        error = self._observe()
        if error is not None:  # a copy, whose traceback this handle does not keep, nor with it the caller's frame
            raise error.again() if isinstance(error, FerroError) else error
        if self.is_on_device:
            self._give(self._result)
        if host and self._landing is not None:
            self._landing.settle(self._clock, until)
        return self._result  # type: ignore[return-value]

    def _give(self, left: Any) -> None:
        """Makes the result; where that was done before, orders the current stream after it."""
        with self._result_lock:
            if self.make_result is not None:
                self._make(left)
            elif self._landing is not None:
                self._landing.follow()

    def _make(self, left: Any) -> None:
        if self.make_result is not None:
            self._result, self._landing = self.make_result(left)
            self.make_result = self.landing_context = None  # only now: a wait that failed before takes nothing from the next

    def _has_landed(self) -> bool:
        if not self.complete_arrays():
            return False
        try:
            return self._landing is None or self._landing.is_reached
        except FerroError:  # the GPU has failed: whoever waits is told
            return True

    def complete_arrays(self, wait: bool = False) -> bool:
        """For the driver: once the operation has ended, brings its result to the caller's arrays unless that was done. It has
        failed where that is not possible.

        Args:
            wait: for a thread that is just doing it.

        Returns:
            False where another thread is just doing it.
        """
        context = self.landing_context
        if context is None or self._error is not None:
            return True
        try:
            if not self._result_lock.acquire(blocking=wait):
                return False
            if self.make_result is not None:
                with context():
                    self._make(self._result)
        except Exception as problem:  # noqa: BLE001  any of the GPU's library: whoever waits meets it
            self._error = problem
        finally:
            with contextlib.suppress(RuntimeError):  # another thread has it
                self._result_lock.release()
        return True

    def _await(self, until: float, seconds: float, park: Callable[[float, float], None] | None = None) -> None:
        """Waits until the operation has ended, or as `park` does, and counts the time. Raises as `wait`."""
        began = self._clock.now()
        if self.meter is not None:
            self.meter.operating(began)
        try:
            assist = self.assist  # it is gone as soon as another thread ends the operation
            if assist is not None and seconds > ASSIST_SECONDS:
                assist()
            if park is not None:
                park(until, seconds)
            elif not self._done:
                self._park(until, seconds)
        finally:
            if self.meter is not None:
                self.meter.operated(self._clock.now() - began)

    def _park(self, until: float, seconds: float) -> None:
        parker = self._clock.parker()
        self.on_done(parker.unpark)
        try:
            while not self._done:
                if not parker.park(until) and not self._done:
                    raise self._still_runs(seconds)
        finally:
            self._forget(parker.unpark)

    def _still_runs(self, seconds: float) -> CollectiveTimeoutError:
        standing = self.standing
        ranks, sentence = ([], "") if standing is None else standing()
        subject = f"{sentence}; it" if sentence else self.label
        hint = "call wait() again: nothing was lost"
        return CollectiveTimeoutError(ranks, f"{subject} still runs after {seconds:g} s", hint=hint)

    def _observe(self) -> BaseException | None:
        """Its error as the caller sees it, who has looked at it then."""
        self._observed, error = True, self._error
        if isinstance(error, FerroError):
            error.mark_shown()
        return error if error is None or self.translate_error is None else self.translate_error(error)

    def __await__(self) -> Generator[Any, None, Result]:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            hint = "elsewhere have a thread wait for it, as by await trio.to_thread.run_sync(work.wait)"
            raise UsageError(f"{self.label} is awaited without a running loop of asyncio", hint=hint) from None
        if self._clock.one_at_a_time:
            yield from self._yield_in_turns(loop).__await__()
        else:
            event = asyncio.Event()
            tell = partial(_signal, loop, event)
            self.on_done(tell)
            try:
                yield from event.wait().__await__()
            finally:
                self._forget(tell)
        return self.wait()

    async def _yield_in_turns(self, loop: asyncio.AbstractEventLoop) -> None:
        """Lets the loop's other coroutines and the clock's other threads run in turn: a sleeping loop would stop them."""
        parkers = _awaiting.setdefault(loop, WeakKeyDictionary())
        parker = parkers.setdefault(self._clock, self._clock.parker())
        self.on_done(parker.unpark)
        seconds = TURN_MIN_SECONDS
        try:
            while True:
                await asyncio.sleep(0)
                if self._done:
                    return
                parker.park(self._clock.now() + seconds)
                seconds = min(2 * seconds, TURN_MAX_SECONDS)
        finally:
            self._forget(parker.unpark)

    def on_done(self, callback: Callable[[], object]) -> None:
        """Calls `callback`, which must not block, once the operation has ended; at once if it has ended already."""
        if not callable(callback):
            raise UsageError(f"callback={callback!r} cannot be called", hint="pass a function without arguments")
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback()

    def register(self, register: dict[int, Any]) -> None:
        """For the driver: puts it into a dict, by id, until it has ended."""
        self._register, number = register, id(self)
        register[number] = self  # from here on no call before that of `pop`, where an interrupt could strike
        if self._done:  # perhaps before it was in there
            register.pop(number, None)

    def _forget(self, callback: Callable[[], object]) -> None:
        with self._lock:
            if not self._done and callback in self._callbacks:
                self._callbacks.remove(callback)

    def complete(self, result: Any) -> None:
        """For the driver: the operation succeeded."""
        self._result = result
        self._end()

    def fail(self, error: BaseException) -> None:
        """For the driver: the operation failed."""
        self._error = error
        self._end()

    def abandon_in_child(self, error: BaseException) -> None:
        """For the driver, in a forked child, where no thread of the parent goes on with it: fails it. Who was to be told of its
        end is the parent's."""
        self._lock, self._callbacks = threading.Lock(), []  # a thread of the parent may have held it
        self.fail(error)

    def _end(self) -> None:
        with self._lock:
            self._done = True
        try:
            self.complete_arrays()
        finally:  # also where it is interrupted
            self._tell()

    def _tell(self) -> None:
        self.assist = self.standing = self.withdraw = None
        if self._register is not None:
            self._register.pop(id(self), None)
        callbacks = self._callbacks  # which nobody else changes from now on
        while callbacks:
            try:
                callbacks[0]()
            except BaseException as problem:
                if not isinstance(problem, Exception) and threading.current_thread() is threading.main_thread():
                    raise  # an interrupt, which strikes nowhere else
                text = "%s is done, but one who was to be told of it failed"
                tell(_log, logging.ERROR, text, self.label, traceback_too=True)
            del callbacks[0]  # only now: an interrupt leaves it to a second call. No call, where one could strike

    def __del__(self) -> None:
        error = self._error
        if error is None or self._observed or (isinstance(error, FerroError) and not error.mark_shown()):
            return
        _log.error("%s failed and nobody looked at it: %s", self.label, error)

    def __getstate__(self) -> NoReturn:
        """Refuses to be pickled: the operation runs in this process."""
        raise UsageError("a Work cannot be copied or pickled", hint="pass on what work.wait() returns")

    def __repr__(self) -> str:
        state = "running" if not self._done else "failed" if self._error is not None else "done"
        return f"<Work {self.label}: {state}>"


def await_all(works: Iterable[Work[Any]], clock: Clock, until: float) -> None:
    """Waits until all have ended, or until that clock time. The results of those that have are in the callers' arrays then."""
    parker = clock.parker()
    for work in works:
        work.on_done(parker.unpark)
        while not work.has_ended and parker.park(until):
            pass
        if work.has_ended:
            work.complete_arrays(wait=True)


def _signal(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nothing awaits any more
        loop.call_soon_threadsafe(event.set)
