"""The handle of an asynchronous operation on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ferrorpc.backends.device.completion import NOTIFY_SECONDS
from ferrorpc.backends.device.execution import DeviceExecution
from ferrorpc.backends.device.in_flight import notify
from ferrorpc.collectives.driver import unmade_result
from ferrorpc.collectives.execution import Execution
from ferrorpc.collectives.polling import nap_seconds
from ferrorpc.errors import FerroError
from ferrorpc.guard import FOREVER, Clock, Parker, seconds_of
from ferrorpc.work import Work


class DeviceWork(Work[Any]):
    """A Work that is done when the GPU has finished the operation.

    `wait` returns as soon as the operation is in its stream, and makes the calling thread's current stream wait for it.
    `wait(host=True)` blocks the host until the operation is done.
    """

    _waiting: list[Parker]
    """Of threads that wait until it is in its stream, where it was not at first."""

    def __init__(self, clock: Clock, execution: DeviceExecution, convert: Callable[[Execution], Any]) -> None:
        super().__init__(clock, execution)
        self._execution = execution
        self._convert = convert
        if execution.end_event is None:
            self._waiting = []
            execution.on_queued = self._wake

    def done(self) -> bool:
        if not self._done:
            self._hurry()
        return super().done()

    def on_done(self, callback: Callable[[], object]) -> None:
        super().on_done(callback)
        self._hurry()

    def _hurry(self) -> None:
        if not self._execution.is_awaited:
            self._execution.context.hurry(self._execution)

    def _park(self, until: float, seconds: float) -> None:
        """Polls the GPU on this thread, which waits anyway: the watcher polls seldom, to leave the GIL to other threads."""
        if self._execution.end_event is not None:
            parker = self._clock.parker()
            super().on_done(parker.unpark)
            began = now = self._clock.now()
            while not self._done and now < until and not self._is_settled():
                parker.park(min(until, now + min(nap_seconds(now - began), NOTIFY_SECONDS)))
                now = self._clock.now()
            self._forget(parker.unpark)
        super()._park(until, seconds)

    def _is_settled(self) -> bool:
        """Whether this thread can stop polling: the operation is complete, or has failed, which its watcher will report."""
        execution = self._execution
        try:
            with execution.device.here():
                if not execution.try_complete():
                    return False
                notify(execution, None)
        except FerroError:
            pass
        except BaseException:  # an interrupt: its watcher may have passed it by, because this thread was at it
            execution.context.watch(execution)
            raise
        return True

    def on_complete(self, error: FerroError | None) -> None:
        """As `InFlightExecution.on_complete`: sets the result, or the error that ended the operation. That its result cannot be
        made concerns this rank alone."""
        if self._done:  # an interrupt has struck the first call after that: the result is the caller's
            return self._end()
        if error is None:
            try:
                return self.complete(self._convert(self._execution))
            except Exception as problem:  # noqa: BLE001  whatever it is, nobody else would end it
                error = unmade_result(self.label, problem)
        return self.fail(error)

    def wait(self, timeout: float | None = None, host: bool = False) -> Any:
        execution = self._execution
        if host or self._done or not self.is_on_device:
            return super().wait(timeout, host)
        latch = execution.guard.latch
        if execution.end_event is None or latch.cause is not None or latch.ended_here:
            self._await_launch(timeout)
            if self.has_ended:
                return super().wait()
        execution.join()
        self._give(execution)
        return self._result

    def _await_launch(self, timeout: float | None) -> None:
        """Waits until it is in its stream; until it has ended where the generation's end may have struck it."""
        execution, seconds = self._execution, seconds_of(timeout, FOREVER)
        until, latch = self._clock.now() + seconds, execution.guard.latch
        if not self._is_queued():
            self._await(until, seconds, self._park_until_queued)
        if (latch.cause is not None or latch.ended_here) and not (self._done or execution.has_completed):
            self._await(until, seconds)

    def _park_until_queued(self, until: float, seconds: float) -> None:
        """Nobody has to notice the completion sooner for it."""
        parker = self._clock.parker()
        self._waiting.append(parker)
        super().on_done(parker.unpark)
        try:
            while not self._is_queued():
                if not parker.park(until) and not self._is_queued():
                    raise self._still_runs(seconds)
        finally:
            self._waiting.remove(parker)
            self._forget(parker.unpark)

    def _is_queued(self) -> bool:
        return self._execution.end_event is not None or self._done

    def _wake(self) -> None:
        for parker in tuple(self._waiting):
            parker.unpark()

    def complete(self, result: Any) -> None:
        """Sets the result, unless `wait` has made it already."""
        with self._result_lock:
            if self.make_result is not None or self._result is None:
                self._result = result
        self._end()
