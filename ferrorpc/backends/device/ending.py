"""How communicators end: they are aborted when the generation ends, finalized and destroyed when the group is closed.

A rank learns of a generation's end through its latch: a member died, a call did not match, or a deadline passed. NCCL's kernels
do not learn of it and go on spinning, so every communicator is aborted. NCCL's abort has been known to hang. A process in which
it hangs holds a GPU that nobody can use, and has no way to free it. So the process exits when an abort exceeds its time, with
the exit code that tells launchers to start it again.

An abort does not take back what was launched: its kernels end sooner or later, and the copies queued behind them still run. If
the operations' arrays were released at once, the allocator could give their memory to other arrays, and the GPU would overwrite
those. So they are kept until all aborts are over, and the GPU has come past what they left in the streams.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from ferrorpc.arrays.device import Stream
from ferrorpc.arrays.event import Event
from ferrorpc.backends.device.communicator import Communicator, State
from ferrorpc.backends.device.exit_timer import exit_after
from ferrorpc.errors import LimitExceededError
from ferrorpc.exit_codes import EXIT_RETRY
from ferrorpc.guard import Clock, Latch

ABORT_SECONDS: Final = 10.0
"""How long an abort may take."""
CLOSE_SECONDS: Final = 0.8
"""How long closing a group may take until its communicators are aborted."""
FROZEN_SECONDS: Final = 2.0
"""How much later the process ends where no thread gets the interpreter."""
POLL_SECONDS: Final = 1e-3
KEPT_SECONDS: Final = 3600.0
"""A GPU that has not come past a mark for so long is taken for one that has failed."""
THREAD: Final = "ferrorpc-device-end"
"""The name of threads that wait for what was launched to end."""
_log = logging.getLogger("ferrorpc.backends.device")


class Ending:
    """Ends the communicators of one generation.

    Args:
        latch: trips when the generation ends.
        on_device: returns a context in which the rank's GPU is the current one.
        abort_seconds: how long aborting may take before the process ends.
        leave: ends the process with an exit code.
        exit_later: as `exit_after`.
    """

    def __init__(
        self,
        clock: Clock,
        latch: Latch,
        on_device: Callable[[], AbstractContextManager[Any]],
        *,
        abort_seconds: float = ABORT_SECONDS,
        leave: Callable[[int], Any] = os._exit,
        exit_later: Callable[[float, int], Callable[[], None]] = exit_after,
    ) -> None:
        self._clock = clock
        self._latch = latch
        self._on_device = on_device
        self._seconds = abort_seconds
        self._leave = leave
        self._exit_later = exit_later
        self._lock = threading.Lock()
        self._communicators: list[Communicator] = []
        self._aborts = 0
        """How many are under way."""
        self._kept: list[tuple[Stream, Event | None, object]] = []
        self._lets_go = False
        latch.watch(self._abort_all)

    def add(self, communicator: Communicator) -> None:
        """Adds a communicator. It is aborted at once if the generation has ended."""
        with self._lock:
            self._communicators.append(communicator)
        if self._latch.cause is not None:
            self._start_abort(communicator)

    def communicators(self) -> list[Communicator]:
        """The communicators that have not ended, the latest first, so that a split one comes before its parent."""
        with self._lock:
            return self._communicators[::-1]

    def _abort_all(self) -> None:
        for communicator in self.communicators():
            self._start_abort(communicator)

    def _start_abort(self, communicator: Communicator) -> None:
        """Aborts on a thread of its own: an abort waits until the GPU has run past what was launched, and that may wait for
        operations of other communicators, which have to be aborted at the same time."""
        if not self._remove(communicator, aborts=1):
            return
        over = threading.Event()
        stay = self._exit_later(self._seconds + FROZEN_SECONDS, EXIT_RETRY)
        with contextlib.suppress(LimitExceededError):  # then the exit above is the only one
            self._clock.call_at(self._clock.now() + self._seconds, lambda: self._check(over))
        try:
            self._clock.start(lambda: self._abort(communicator, over, stay), "ferrorpc-device-abort")
        except LimitExceededError as refusal:
            _log.critical(
                "no communicator can be aborted: %s; the process ends with code %d in %g s",
                refusal.message,
                EXIT_RETRY,
                self._seconds + FROZEN_SECONDS,
            )

    def _abort(self, communicator: Communicator, over: threading.Event, stay: Callable[[], None]) -> None:
        try:
            with contextlib.ExitStack() as stack:
                with contextlib.suppress(Exception):  # a GPU that has failed refuses it, and NCCL ends what it can
                    stack.enter_context(self._on_device())
                communicator.abort()
        except Exception as problem:  # noqa: BLE001  whatever it is, the abort is over
            _log.warning("aborting a communicator: %s", getattr(problem, "message", problem))
        finally:
            over.set()
            stay()
            with self._lock:
                self._aborts -= 1
            self._let_go_soon()

    def _check(self, over: threading.Event) -> None:
        if not over.is_set():
            _log.critical(
                "an abort did not return within %g s after the generation ended (%s); the process ends with code %d",
                self._seconds,
                self._latch.cause.message if self._latch.cause is not None else "closed",
                EXIT_RETRY,
            )
            self._leave(EXIT_RETRY)

    def close(self, communicators: Sequence[Communicator], until: float) -> None:
        """Finalizes and destroys communicators. Those that are not finished by clock time `until`, or fail, are aborted."""
        for communicator in communicators:
            if self._closed(communicator, until):
                self._remove(communicator)
            else:
                self._start_abort(communicator)
        self._let_go_soon()

    def _remove(self, communicator: Communicator, aborts: int = 0) -> bool:
        """Whether it was there: it is aborted by who removes it, once."""
        with self._lock:
            if communicator not in self._communicators:
                return False
            self._communicators.remove(communicator)
            self._aborts += aborts
            return True

    def _closed(self, communicator: Communicator, until: float) -> bool:
        """Whether it is destroyed, or is still being destroyed, which waits for the other ranks of its host."""
        try:
            with self._on_device():
                if self._settled(communicator, until):
                    communicator.finalize()
                if not self._settled(communicator, until):
                    return False
        except Exception as problem:  # noqa: BLE001  such as CuPy's, where the GPU has failed: it is aborted instead
            _log.debug("closing a communicator: %s", problem)
            return False
        if not on_own_thread(self._clock, self._on_device, communicator.destroy, until):
            _log.debug("a communicator is still being destroyed: another rank has not begun to")
        return True

    def _settled(self, communicator: Communicator, until: float) -> bool:
        """Whether the communicator has finished what it was asked for; before that it takes no other call."""
        parker = self._clock.parker()
        while (state := communicator.state()) is State.IN_PROGRESS and self._clock.now() < until:
            parker.park(self._clock.now() + POLL_SECONDS)
        return state is State.SUCCESS

    def keep(self, stream: Stream, event: Event | None, buffers: object) -> None:
        """Keeps buffers of an operation that the end of its generation has cut off, as long as the GPU may use them.

        Args:
            event: recorded in the stream behind the operation; None where a communicator has not said that all is launched. Its
                own thread may launch until an abort joins it.
        """
        with self._lock:
            self._kept.append((stream, event, buffers))
        self._let_go_soon()

    def _let_go_soon(self) -> None:
        """Starts to let go of what is kept, if nothing launches any more."""
        with self._lock:
            if self._communicators or self._aborts or self._lets_go or not self._kept:
                return
            self._lets_go = True
        with contextlib.suppress(LimitExceededError):  # then all of it stays
            self._clock.start(self._let_go, THREAD)

    def _let_go(self) -> None:
        while True:
            with self._lock:
                kept, self._kept = self._kept, []
                self._lets_go = bool(kept)
            if not kept:
                return
            while kept:
                self._wait_past(*kept[-1][:2])
                kept.pop()  # without the lock: finalizers run

    def _wait_past(self, stream: Stream, event: Event | None) -> None:
        """Waits until the GPU has come past an event in a stream; None: past all that is in it now."""
        parker, until = self._clock.parker(), self._clock.now() + KEPT_SECONDS
        try:
            if event is None:
                with self._on_device():
                    event = stream.record()
            while not event.done and self._clock.now() < until:
                parker.park(self._clock.now() + POLL_SECONDS)
        except Exception as problem:  # noqa: BLE001  a GPU that has failed records no event, and uses nothing any more
            _log.debug("nothing has to be kept for the GPU: %s", problem)


def on_own_thread(
    clock: Clock, on_device: Callable[[], AbstractContextManager[Any]], work: Callable[[], None], until: float
) -> bool:
    """Runs a call that may block on a thread of its own. Returns whether it was over by clock time `until`; where the system
    refuses the thread it is left out, and logged."""
    over: list[bool] = []
    parker = clock.parker()

    def body() -> None:
        try:
            with on_device():
                work()
        except Exception as problem:  # noqa: BLE001  whatever it is, the call is over
            _log.debug("ending a communicator: %s", problem)
        finally:
            over.append(True)
            parker.unpark()

    try:
        clock.start(body, THREAD)
    except LimitExceededError as refusal:
        _log.warning("a communicator is not ended: %s", refusal.message)
        return False
    while not over and parker.park(until):
        pass
    return bool(over)
