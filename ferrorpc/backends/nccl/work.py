"""The handle of an asynchronous operation on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ferrorpc.backends.nccl.airborne import tell
from ferrorpc.backends.nccl.flight import TELLING_SECONDS
from ferrorpc.backends.nccl.launched import Launched
from ferrorpc.collectives.execution import Execution
from ferrorpc.collectives.polling import nap_seconds
from ferrorpc.errors import FerroError
from ferrorpc.guard import Clock
from ferrorpc.work import Work


class DeviceWork(Work[Any]):
    """Done when the GPU is; but `wait` returns as soon as the operation is in the stream, and the current stream goes on after
    it. `wait(host=True)` returns when the result is there."""

    def __init__(self, clock: Clock, execution: Launched, convert: Callable[[Execution], Any]) -> None:
        super().__init__(clock, execution.label)
        self._execution = execution
        self._convert = convert
        self._queued: Work[None] | None = None
        if execution.mark is None:
            self._queued = Work(clock, f"{execution.label}, until it is in its stream")
            execution.queued = self._is_queued

    def _park(self, until: float, timeout: float | None) -> None:
        """What watches the GPU looks seldom, to leave the interpreter to others; a thread that waits anyway looks itself."""
        if self._execution.mark is not None:
            parker = self._clock.parker()
            self.on_done(parker.unpark)
            began = now = self._clock.now()
            while not self._done and now < until and not self._has_landed():
                parker.park(min(until, now + min(nap_seconds(now - began), TELLING_SECONDS)))
                now = self._clock.now()
            self._forget(parker.unpark)
        super()._park(until, timeout)

    def _has_landed(self) -> bool:
        """Whether this thread need not look again: it has landed, or whoever watches it will say what became of it."""
        execution = self._execution
        try:
            with execution.device.here():
                if not execution.land():
                    return False
                tell(execution, None)
        except FerroError:
            pass
        return True

    def landed(self, error: FerroError | None) -> None:
        """For what watches the GPU: it has come past the operation, or this ended its flight."""
        if error is None:
            try:
                return self.complete(self._convert(self._execution))
            except FerroError as problem:
                error = problem
        return self.fail(error)

    def _is_queued(self) -> None:
        if self._queued is not None and not self._queued.done():
            self._queued.complete(None)

    def wait(self, timeout: float | None = None, host: bool = False) -> Any:
        execution = self._execution
        if host or self._done or (self.bring is None and self._follow is None):
            return super().wait(timeout)
        if self._queued is not None:
            self._queued.wait(timeout)
        may_have_failed = execution.guard.latch.cause is not None and not execution.has_landed
        if execution.mark is None or may_have_failed:
            return super().wait(timeout)
        execution.join()
        self._give(execution)
        return self._result

    def _end(self) -> None:
        self._is_queued()
        super()._end()

    def complete(self, result: Any) -> None:
        """For the driver: the GPU is done. What `wait` has made already stays."""
        with self._bringing:
            if self.bring is not None or self._result is None:
                self._result = result
        self._end()
