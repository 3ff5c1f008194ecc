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

import threading
from abc import abstractmethod
from collections import deque
from typing import Any

import numpy as np

from ferrorpc.collectives.execution import Execution
from ferrorpc.collectives.ferry import Ferry
from ferrorpc.guard import Guard
from ferrorpc.types import TensorSpec


class _Thread(threading.local):
    """What one thread is at."""

    agenda: deque[EventDrivenExecution] | None = None
    """Executions it is to advance; None while it advances none."""


_thread = _Thread()


class EventDrivenExecution(Execution):
    """An execution with a turn. Subclasses say in `step` what can be done, and give out `notify` to those who may have news.

    Args:
        ferry: carries its arrays where some are on a device. A GPU wakes nobody, so its driver looks again and again.
    """

    def __init__(self, guard: Guard, ferry: Ferry | None = None) -> None:
        self.guard = guard
        self.ferry = ferry
        self.polling = None if ferry is None else ferry.polling
        self.device = None if ferry is None else ferry.device
        self.results: list[np.ndarray[Any, Any]] = []
        self.specs: list[TensorSpec] = []
        self._turn = threading.Lock()
        self._news = False
        self._moved = False
        self._driven = False
        self._ended = False
        self._told = False
        self._finished = False
        self._failure: BaseException | None = None

    @abstractmethod
    def step(self) -> bool:
        """Does what can be done without waiting; True when the operation is complete. Never called by two threads at once."""

    @abstractmethod
    def leave(self) -> None:
        """Frees what the operation held; called once, and nothing of it is called after."""

    def advance(self) -> bool:
        ferry = self.ferry
        if ferry is None:
            return self._driven_on()
        ferry.land()
        over = self._driven_on()
        ferry.rise()
        brought = ferry.brought(self.results) if over else None
        if brought is None:
            return False
        self.results = brought
        return True

    @property
    def position(self) -> int:  # type: ignore[override]
        """How far its arrays have come from a device and there."""
        return 0 if self.ferry is None else self.ferry.position

    def arrive(self) -> None:
        if self.ferry is not None:
            self.ferry.arrive()

    def _driven_on(self) -> bool:
        self._driven = True
        self.notify()
        self._driven = False
        # Whoever ended it while the driver was here had nobody to wake.
        if not self._ended:
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def notify(self) -> None:
        """There may be news. Called from any thread, once the first `advance` has begun; it never blocks."""
        self._news = True
        if _thread.agenda is not None:
            _thread.agenda.append(self)
            return
        agenda = _thread.agenda = deque((self,))
        try:
            while agenda:
                agenda.popleft()._attend()
        finally:
            _thread.agenda = None

    def _attend(self) -> None:
        """Takes the turn as long as there is news and nobody else has it. Whoever ends the operation wakes its driver."""
        while self._news and self._turn.acquire(blocking=False):
            try:
                self._news = False
                if not self._ended:
                    self._take_turn()
            finally:
                self._turn.release()
        if self._ended and not self._driven and not self._told:
            self._told = True
            self.wake()

    def _take_turn(self) -> None:
        self._moved = not self._driven
        try:
            self._ended = self.step()
        except BaseException as error:  # noqa: BLE001  its driver raises it, whichever thread met it
            self._failure = error
            self._ended = True

    def moved(self) -> bool:
        """Whether anybody but the driver advanced it since this was last asked."""
        moved, self._moved = self._moved, False
        return moved

    def finish(self) -> None:
        with self._turn:
            finished, self._finished = self._finished, True
            self._ended = self._told = True
        self._failure = None  # it refers to whom it was raised in: with this in a circle, arrays would outlive the operation
        if not finished:
            self.leave()
            if self.ferry is not None:
                self.ferry.finish()
