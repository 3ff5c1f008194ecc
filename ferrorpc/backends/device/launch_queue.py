"""The order in which the operations of one communicator are launched. It has to be the same on every rank, or NCCL deadlocks.

There are two orders. Operations in program order are launched in the order in which they were started on this rank, even where
an earlier one still waits for an announcement. Operations of streams, which ranks may start in different orders, are launched
in the order in which rank 0 of the group started them: it numbers them, and announces the numbers (announcement.py).
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from ferrorpc.arrays.device import Stream
from ferrorpc.arrays.event import Event
from ferrorpc.backends.device.communicator import Communicator, State, failed
from ferrorpc.guard import SYSTEM_CLOCK

LAUNCH_SECONDS: Final = 200e-6
"""How long a launch is waited for at once. With other ranks, NCCL launches each operation of a non-blocking communicator from a
new thread, some tens of microseconds after it was asked (2.28, group.cc). Nothing else can be launched until then."""


class LaunchQueue:
    """A communicator, its CUDA stream, and the operations that wait for their launch, in program order.

    Args:
        check: raises UsageError where nothing may be launched in the stream: a CUDA graph is being captured from it.

    Attributes:
        lock: held during a launch, because a communicator serves one thread at a time.
        last_event: the end event of the operation that was launched last.
        next_number: greater than the number of every operation launched so far. Numbers mean the same on all ranks.
    """

    def __init__(self, communicator: Communicator, stream: Stream, check: Callable[[], None] = lambda: None) -> None:
        self.communicator = communicator
        self.stream = stream
        self.check = check
        self.lock = threading.Lock()
        self.last_event: Event | None = None
        self.next_number = 0
        self._waiting: deque[Any] = deque()

    def enqueue(self, operation: Any) -> int:
        """Adds an operation that was started on this rank. Returns its number, which counts where this rank gives numbers. The
        caller holds the lock."""
        self._waiting.append(operation)
        number = self.next_number
        self.next_number = number + 1
        return number

    def is_next(self, operation: Any, number: int) -> bool:
        """Whether the operation may be launched now."""
        return bool(self._waiting) and self._waiting[0] is operation

    def dequeue(self, operation: Any, number: int) -> None:
        """Removes an operation that is wholly launched, or that will not be launched at all. The caller holds the lock."""
        self._waiting.remove(operation)

    def discard(self, operation: Any) -> None:
        """Removes an operation that has failed, if it is still waiting."""
        with self.lock, suppress(ValueError):
            self._waiting.remove(operation)

    def launches(self, operation: Any) -> bool:
        """As `has_launched`, but waits for it for a moment."""
        until = SYSTEM_CLOCK.now() + LAUNCH_SECONDS
        while not self.has_launched(operation):
            if SYSTEM_CLOCK.now() >= until:
                return False
            os.sched_yield()
        return True

    def has_launched(self, operation: Any) -> bool:
        """Whether the communicator has put everything that it was asked for into the stream.

        Raises:
            NcclError: the communicator has met an error, which is reported as one of this operation.
        """
        state = self.communicator.state()
        if state is State.SUCCESS:
            return True
        if state is State.IN_PROGRESS:
            return False
        raise failed(operation.label, state, self.communicator.last_error())


class NumberedLaunchQueue(LaunchQueue):
    """A launch queue for the operations of all streams of a group, in the order of their numbers."""

    def __init__(self, communicator: Communicator, stream: Stream, check: Callable[[], None] = lambda: None) -> None:
        super().__init__(communicator, stream, check)
        self._given = itertools.count()
        self._dequeued: set[int] = set()
        """Numbers above `next_number` whose operations were dequeued without a launch."""

    def enqueue(self, operation: Any) -> int:
        self._waiting.append(operation)
        return next(self._given)

    def is_next(self, operation: Any, number: int) -> bool:
        return number == self.next_number

    def dequeue(self, operation: Any, number: int) -> None:
        super().dequeue(operation, number)
        self._dequeued.add(number)
        while self.next_number in self._dequeued:
            self._dequeued.remove(self.next_number)
            self.next_number += 1
