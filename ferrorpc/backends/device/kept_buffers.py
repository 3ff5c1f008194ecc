"""Keeps the buffers of operations that were in flight when their generation ended, until the GPU no longer uses them.

To abort a communicator does not take back what was launched: its kernels end sooner or later, and the copies queued behind
them still run. If the arrays were released at once, the allocator could give their memory to other arrays, and the GPU would
overwrite those.
"""

from __future__ import annotations

import threading
from collections import deque

from ferrorpc.arrays.device import Device, Event
from ferrorpc.backends.device.completion import EMPTY_SECONDS, IDLE_SECONDS
from ferrorpc.collectives.execution import Execution
from ferrorpc.collectives.polling import Polling
from ferrorpc.errors import BackendUnavailableError, CollectiveTimeoutError, FerroError
from ferrorpc.guard import Clock, Guard, Latch, wake_nobody


class KeptBuffers(Execution):
    """The buffers of operations in one stream.

    Args:
        device: the GPU.
        clock: of the driver.
    """

    def __init__(self, device: Device, clock: Clock, polling: Polling) -> None:
        self.guard = Guard(clock, Latch(), EMPTY_SECONDS)  # a latch of its own: that of the generation has tripped
        self.wake = wake_nobody
        self.polling = polling
        self.device = device
        self.results, self.specs = [], []
        self._lock = threading.Lock()
        self._is_over = False
        self._kept: deque[tuple[Event, object]] = deque()

    def keep(self, event: Event, buffers: object) -> bool:
        """Keeps buffers until the GPU has reached an event, in the order of the events. Returns False if this has ended."""
        with self._lock:
            if not self._is_over:
                self._kept.append((event, buffers))
            return not self._is_over

    @property
    def label(self) -> str:
        return f"{len(self._kept)} operations of a generation that has ended"

    @property
    def nap_seconds(self) -> float:
        return IDLE_SECONDS

    def advance(self) -> bool:
        while self._kept:
            if not self._is_reached(self._kept[0][0]):
                return False
            self._kept.popleft()
            self.position += 1
        with self._lock:
            self._is_over = not self._kept
            return self._is_over

    def _is_reached(self, event: Event) -> bool:
        try:
            return event.done
        except BackendUnavailableError:  # the GPU has failed, and uses no memory any more
            return True

    def waiting_on(self) -> list[int]:
        return []

    def probe(self) -> None:
        """No rank is waited for."""

    def explain(self) -> str:
        return f"the GPU has not come past {self.label}, whose arrays are kept for it"

    def timeout_error(self) -> FerroError:
        return CollectiveTimeoutError([], self.explain())

    def finish(self) -> None:
        self._kept.clear()
