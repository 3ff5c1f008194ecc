"""A recv in two steps: it takes its place in the queue at once, and the caller waits later, when it needs the array.

In between, the threads that receive chunks copy them to their place. So most of a message is usually here when it is needed,
and no thread is woken for it except the one that waits.
"""

from __future__ import annotations

from typing import Any

from ferrorpc.arrays.kinds import NUMPY
from ferrorpc.errors import UsageError
from ferrorpc.guard import seconds_of
from ferrorpc.operations.dispatch import Dispatch
from ferrorpc.operations.results import New


class Expected:
    """The next message from a rank with a tag, in the order in which they were expected; made by `ProcessGroup.expect`.

    Over a backend that has only send, recv and barrier, they come in the order in which they are taken.
    """

    def __init__(self, dispatch: Dispatch, peer: int, tag: int, awaited: object) -> None:
        dispatch.check_open()
        self._dispatch = dispatch
        self._execution = dispatch.backend.start_recv(peer, tag, None, None, dispatch.guard_of_recv(dispatch.timeout))
        self._execution.awaited = awaited
        self._is_over = False
        dispatch.let_events_advance(self._execution)

    def take(self, timeout: float | None = None) -> Any:
        """The array, in NumPy. To be called once: what did not come in time is to be expected again.

        Args:
            timeout: seconds from now; None for the group's.

        Raises:
            CollectiveTimeoutError: it did not come in time. It is kept for the next recv.
            UsageError: it was taken or given up already, also by a call that raised.
            FerroError: what ended the generation.
        """
        guard = self._dispatch.guard_of_recv(seconds_of(timeout, self._dispatch.timeout))
        if self._is_over:
            raise UsageError(
                f"{self._execution.label} was taken or given up already", hint="call group.expect() again for the next message"
            )
        self._execution.guard, self._is_over = guard, True
        try:
            return self._dispatch.finish(self._execution, New(NUMPY), False)
        except BaseException:
            self._execution.give_back()  # also a message that was taken, but not made into an array
            raise

    def forget(self) -> None:
        """Gives up the place: the message is for the next recv."""
        self._is_over = True
        try:
            self._execution.finish()
        except BaseException:  # an interrupt
            self._execution.finish()
            raise
