"""The base of every operation that runs on a GPU: it stays in flight after its launch, until the GPU has finished it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Final, TypeVar

from ferrorpc.arrays.event import Event
from ferrorpc.backends.device.communicator import State
from ferrorpc.backends.device.launch_queue import LaunchQueue
from ferrorpc.collectives.execution import Execution
from ferrorpc.errors import FerroError, NcclError
from ferrorpc.guard import wake_nobody

SUSPICION_SECONDS: Final = 5.0
"""How long a remote error of a communicator is held back for the coordinator to name the dead peer. Longer than its grace."""


class InFlightExecution(Execution):
    """An operation that the GPU may still be running after its driver has returned.

    Attributes:
        launch_queue: gives it its turn, its communicator and its stream.
        end_event: recorded behind the operation in its stream; None until all of it has been launched.
        in_launch_order: the end event is in the launch queue's stream, so the GPU reaches it after those of earlier operations.
        end_reached: the GPU is known to have reached the end event.
        has_completed: the GPU reached the end event while the generation went on, so the result is valid.
        is_joined: a stream of the caller's waits for it on the GPU, so the caller takes its result for valid.
        released: it holds no resources any more, because it has completed or failed; any thread may have released it.
        is_awaited: somebody wants to know soon of its completion.
        on_complete: called once, with None or the error that ended the operation.
    """

    launch_queue: LaunchQueue
    end_event: Event | None = None
    in_launch_order = True
    end_reached = False
    has_completed = False
    is_joined = False
    released = False
    is_awaited = False
    on_complete: Callable[[FerroError | None], None] | None = None
    _early_error: Exception | None = None
    _verdict_by: float | None = None

    def begin(self) -> bool:
        """Advances once on the caller's thread, which costs less than waking a driver. Returns whether it is complete.

        An error is kept, and the next `advance` raises it to the driver by `raise_early_error`.
        """
        self.wake = wake_nobody
        try:
            return self.advance()
        except Exception as problem:  # noqa: BLE001  drivers know what to do about each kind
            self._early_error = problem.with_traceback(None)  # which would refer to this execution
            return False

    def raise_early_error(self) -> None:
        """Raises the error that `begin` kept, if there is one."""
        if self._early_error is not None:
            error, self._early_error = self._early_error, None
            try:
                raise error
            finally:
                del error

    def may_be_lost_peer(self, error: NcclError) -> bool:
        """Whether the error may come from a dead peer that the coordinator has not named yet; NCCL does not say which rank."""
        if error.fields.get("status") != State.REMOTE_ERROR:
            return False
        now = self.guard.clock.now()
        if self._verdict_by is None:
            self._verdict_by = now + SUSPICION_SECONDS
        return now < self._verdict_by

    @abstractmethod
    def try_complete(self) -> bool:
        """Completes and releases the operation if the GPU has reached its end event. Returns whether it is complete.

        Raises:
            FerroError: the communicator reported an error, or the generation has ended.
        """

    @abstractmethod
    def release(self) -> None:
        """Drops the resources that the operation holds. Idempotent."""


Checked = TypeVar("Checked", bound=InFlightExecution)


def first_cause(check: Callable[[Checked], bool]) -> Callable[[Checked], bool]:
    """Decorates a method that asks a communicator, so that it raises the generation's first cause in place of an NcclError.

    When a generation ends, its communicators are aborted and report nothing but that. When NCCL notices the loss of a peer
    before the coordinator does, the method returns False for up to SUSPICION_SECONDS, until the cause is known. An error is
    ignored if another thread has completed the operation, and perhaps closed the group, in the meantime.
    """

    @wraps(check)
    def checked(execution: Checked) -> bool:
        try:
            return check(execution)
        except NcclError as error:
            if execution.has_completed:
                return True
            execution.guard.latch.check()
            if execution.released:
                return True
            if execution.may_be_lost_peer(error):
                return False
            raise

    return checked


def notify(execution: InFlightExecution, error: FerroError | None) -> bool:
    """Calls `on_complete`. Of several threads only the first does, which gets True. An interrupt leaves it to a second call."""
    on_complete = execution.on_complete
    if on_complete is None:
        return False
    try:
        if vars(execution).pop("on_complete", None) is None:
            return False
        on_complete(error)
    except BaseException:
        execution.on_complete = on_complete
        raise
    return True
