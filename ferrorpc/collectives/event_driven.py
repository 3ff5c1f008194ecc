"""Executions that are advanced by the thread that brings an event, such as the reader of a stream that has received a chunk.

The driver of such an execution sleeps until the operation is complete. Waking it for every chunk would cost two context
switches each, more than most chunks take to be folded. So the thread with the event advances the execution itself. The driver
is woken earlier only when a full lane has room again, once for several chunks: the lane's writer should write rather than copy
the next chunks. Several threads may have events at once: one advances the execution, the others set a flag and return. No
thread waits for another.

Advancing one execution can cause an event of another on the same thread: where ranks share a process, its message arrives on
the same stack. Such events are queued until the first execution has been advanced, so that calls do not nest without bound.
"""

from __future__ import annotations

import contextlib
import threading
from abc import abstractmethod
from collections import deque
from typing import Any

import numpy as np

from ferrorpc.collectives.device_transfers import DeviceTransfers
from ferrorpc.collectives.driver import interrupted
from ferrorpc.collectives.execution import Execution
from ferrorpc.guard import Guard
from ferrorpc.types import TensorSpec


class _Thread(threading.local):
    """State of one thread."""

    agenda: deque[EventDrivenExecution] | None = None
    """Executions with events to process; None while the thread processes none."""


_thread = _Thread()


class EventDrivenExecution(Execution):
    """An execution that one thread at a time advances. Subclasses implement `step`, and register `notify` for events.

    Args:
        transfers: of its arrays that are on a GPU. A GPU notifies nobody, so the driver polls it.
    """

    def __init__(self, guard: Guard, transfers: DeviceTransfers | None = None) -> None:
        self.guard = guard
        self.transfers = transfers
        self.polling = None if transfers is None else transfers.polling
        self.device = None if transfers is None else transfers.device
        self.results: list[np.ndarray[Any, Any]] = []
        self.specs: list[TensorSpec] = []
        self._step_lock = threading.RLock()
        """Held during a step. It knows its owner, which an interrupted thread does not."""
        self._event = False
        self._moved = False
        self._driven = False
        self._has_woken = False
        self._finished = False
        self._failure: Exception | None = None

    @abstractmethod
    def step(self) -> bool:
        """Does what can be done without waiting, on one thread at a time. Returns whether the operation is complete."""

    @abstractmethod
    def leave(self) -> None:
        """Frees what the operation held, as the last call; called again where an interrupt has cut it short."""

    def begin_failed(self, error: Exception) -> None:
        self._failure, self.has_ended = error, True

    def advance(self) -> bool:
        if self.transfers is None:
            return self._drive()
        over = self.transfers.advance(self, self._drive)
        self.position = self.transfers.position
        return over

    @property
    def waits_for_own_gpu(self) -> bool:
        """Whether this rank's GPU holds it up."""
        return self.transfers is not None and self.transfers.waits_for_gpu

    @property
    def can_be_assisted(self) -> bool:
        return self.device is None

    def make_stream_wait(self) -> None:
        if self.transfers is not None:
            self.transfers.make_stream_wait()

    def _drive(self) -> bool:
        self._driven = True
        self.notify()
        self._driven = False
        # A thread that ended it while the driver was here has not woken the driver.
        if not self.has_ended:
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def notify(self) -> None:
        """Reports an event. Called from any thread, once the first `advance` has begun. Never blocks."""
        self._event = True
        if _thread.agenda is not None:
            _thread.agenda.append(self)
            return
        agenda = _thread.agenda = deque((self,))
        try:
            while agenda:
                agenda.popleft()._process_events()
        finally:
            _thread.agenda = None
            for left in agenda:  # after an interrupt; their drivers advance them
                left.wake()

    def _process_events(self) -> None:
        """Steps while there are events and no other thread does. The thread that ends the operation wakes its driver."""
        try:
            while self._event and self._step_lock.acquire(blocking=False):
                self._event = False
                if not self.has_ended:
                    self._try_step()
                self._step_lock.release()
        except BaseException:  # an interrupt, wherever it struck
            with contextlib.suppress(RuntimeError):  # another thread has it, or none
                self._step_lock.release()
            raise
        finally:
            if self.has_ended and not self._driven and not self._has_woken:
                self._has_woken = True
                self.wake()

    def _try_step(self) -> None:
        self._moved = not self._driven
        try:
            self.has_ended = self.step()
        except Exception as error:  # noqa: BLE001  the driver raises it, whichever thread it occurred on
            self._failure, self.has_ended = error, True
        except BaseException as interrupt:
            # Ctrl-C, or an exit, is for this thread, which may be another than the driver's. What the step left is unknown.
            self._failure, self.has_ended = interrupted(self.label, interrupt), True
            raise

    def moved(self) -> bool:
        """Whether another thread than the driver has advanced it since the last call."""
        moved, self._moved = self._moved, False
        return moved

    def finish(self) -> None:
        with self._step_lock:
            self.has_ended = self._has_woken = True
        self._failure = None  # its traceback refers to this execution: a reference cycle would keep the arrays alive
        if not self._finished:
            self.leave()
            if self.transfers is not None:
                self.transfers.finish()
            self._finished = True  # only now: after an interrupt the rest is for a second call
