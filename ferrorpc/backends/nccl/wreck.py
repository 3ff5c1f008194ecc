"""What was in its stream when its generation ended: the GPU may still use its memory, and nobody else may have it until then.

An abort does not take back what was launched: kernels end, sooner or later, and the copies behind them run. To let go of arrays
at once would give their memory to whoever asks next, and have it written over.
"""

from __future__ import annotations

import threading
from collections import deque

from ferrorpc.arrays.device import Device, Event
from ferrorpc.backends.nccl.airborne import nobody
from ferrorpc.backends.nccl.flight import EMPTY_SECONDS, IDLE_SECONDS
from ferrorpc.collectives.execution import Execution
from ferrorpc.collectives.polling import Polling
from ferrorpc.errors import BackendUnavailableError, CollectiveTimeoutError, FerroError
from ferrorpc.guard import Clock, Guard, Latch


class Wreck(Execution):
    """Keeps what was in one stream until the GPU has come past it.

    Args:
        device: the GPU.
        clock: of the driver.
    """

    def __init__(self, device: Device, clock: Clock, polling: Polling) -> None:
        self.guard = Guard(clock, Latch(), EMPTY_SECONDS)  # what has ended is the other one's
        self.wake = nobody
        self.polling = polling
        self.device = device
        self.results, self.specs = [], []
        self._lock = threading.Lock()
        self._is_over = False
        self._kept: deque[tuple[Event, object]] = deque()

    def keep(self, mark: Event, things: object) -> bool:
        """Keeps things until the GPU has come past a mark, unless this is over. To be called in the order of the marks."""
        with self._lock:
            if not self._is_over:
                self._kept.append((mark, things))
            return not self._is_over

    @property
    def label(self) -> str:
        return f"{len(self._kept)} operations of a generation that has ended"

    @property
    def nap_seconds(self) -> float:
        return IDLE_SECONDS

    def advance(self) -> bool:
        while self._kept:
            if not self._has_passed(self._kept[0][0]):
                return False
            self._kept.popleft()
            self.position += 1
        with self._lock:
            self._is_over = not self._kept
            return self._is_over

    def _has_passed(self, mark: Event) -> bool:
        try:
            return mark.done
        except BackendUnavailableError:  # the GPU has failed, and uses nothing any more
            return True

    def waiting_on(self) -> list[int]:
        return []

    def probe(self) -> None:
        """There is nobody to ask."""

    def explain(self) -> str:
        return f"the GPU has not come past {self.label}, whose arrays are kept for it"

    def timeout_error(self) -> FerroError:
        return CollectiveTimeoutError([], self.explain())

    def finish(self) -> None:
        self._kept.clear()
