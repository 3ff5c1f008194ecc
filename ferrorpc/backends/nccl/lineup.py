"""In which order the operations of one communicator are launched: the same on every rank, or NCCL waits for ever.

Two orders are enough. Operations in program order are launched as they were started, also where an earlier one still has to
learn what arrives. Operations of streams, which ranks start in different orders, are launched in the order in which the first
rank of the group started them: it numbers them, and the number travels to the others (announcement.py).
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from contextlib import suppress
from typing import Any

from ferrorpc.arrays.device import Event, Stream
from ferrorpc.backends.nccl.api import Communicator, State, failed


class Lineup:
    """One communicator, its stream, and whose turn it is.

    Attributes:
        lock: held while operations are launched: one thread at a time may use a communicator.
        latest: the mark of the operation that was launched last.
        through: what was launched on a rank that has nothing in flight has lower numbers, on every rank.
    """

    def __init__(self, communicator: Communicator, stream: Stream) -> None:
        self.communicator = communicator
        self.stream = stream
        self.lock = threading.Lock()
        self.latest: Event | None = None
        self.through = 0
        self._waiting: deque[Any] = deque()

    def join(self, operation: Any) -> int:
        """An operation was started on this rank. Its number, where this rank gives numbers."""
        with self.lock:
            self._waiting.append(operation)
            self.through += 1
            return self.through - 1

    def is_next(self, operation: Any, number: int) -> bool:
        """Whether it may be launched."""
        return bool(self._waiting) and self._waiting[0] is operation

    def passed(self, operation: Any, number: int) -> None:
        """It is in the stream, whole, or will not be launched at all. The lock is held."""
        self._waiting.remove(operation)

    def forget(self, operation: Any) -> None:
        """It has failed, wherever it stood."""
        with self.lock, suppress(ValueError):
            self._waiting.remove(operation)

    def has_launched(self, operation: Any) -> bool:
        """Whether NCCL has launched everything that it was given. Raises NcclError, of this operation, for what it has met."""
        state = self.communicator.state()
        if state is State.SUCCESS:
            return True
        if state is State.IN_PROGRESS:
            return False
        raise failed(operation.label, state, self.communicator.last_error())


class NumberedLineup(Lineup):
    """That of a group's streams together."""

    def __init__(self, communicator: Communicator, stream: Stream) -> None:
        super().__init__(communicator, stream)
        self._given = itertools.count()
        self._through: set[int] = set()
        """Numbers beyond the next one that will not be launched."""

    def join(self, operation: Any) -> int:
        with self.lock:
            self._waiting.append(operation)
            return next(self._given)

    def is_next(self, operation: Any, number: int) -> bool:
        return number == self.through

    def passed(self, operation: Any, number: int) -> None:
        super().passed(operation, number)
        self._through.add(number)
        while self.through in self._through:
            self._through.remove(self.through)
            self.through += 1
