"""Executions that whoever brings them news advances, such as a stream's reader that has a chunk.

Their driver is a thread that sleeps. To wake it for every chunk would cost two changes of threads each, more than most
chunks take to be folded in; so it sleeps until the operation is over, and the thread that has the news does what it allows.
The driver is woken where a full lane has room again, for several chunks at a time: the lane's writer has to write, not to copy
the next chunks. Many threads may have news at once: one takes the turn, the others leave a flag and go. None waits for another.

Advancing one execution can be news for another of the same thread (where ranks share a process, its message arrives there on
the same stack). Such news is kept until the first is done with, so that it cannot pile up calls.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from typing import Any

import numpy as np

from ferrorpc.collectives.device_transfers import DeviceTransfers
from ferrorpc.collectives.execution import Execution
from ferrorpc.guard import Guard
from ferrorpc.types import TensorSpec


class _Thread(threading.local):
    """What one thread is at."""

    agenda: deque[Advancing] | None = None
    """Executions it is to advance; None while it advances none."""


_thread = _Thread()


class Advancing(Execution):
    """An execution with a turn. Subclasses say in `step` what can be done, and give out `poke` to those who may have news.

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
        transfers = self.transfers
        if transfers is None:
            return self._driven_on()
        transfers.advance_downloads()
        over = self._driven_on()
        transfers.advance_uploads()
        results = transfers.finished(self.results) if over else None
        if results is None:
            return False
        self.results = results
        return True

    @property
    def position(self) -> int:  # type: ignore[override]
        """The progress of its transfers from and to a GPU."""
        return 0 if self.transfers is None else self.transfers.position

    def make_stream_wait(self) -> None:
        if self.transfers is not None:
            self.transfers.make_stream_wait()

    def _driven_on(self) -> bool:
        self._driven = True
        self.poke()
        self._driven = False
        # Whoever ended it while the driver was here had nobody to wake.
        if not self._ended:
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def poke(self) -> None:
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
            if self.transfers is not None:
                self.transfers.finish()
