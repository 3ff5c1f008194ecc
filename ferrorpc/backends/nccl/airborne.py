"""An operation on a GPU, as long as the GPU may be busy with it: what all such operations have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Final, TypeVar

from ferrorpc.arrays.device import Event
from ferrorpc.backends.nccl.api import State
from ferrorpc.backends.nccl.lineup import Lineup
from ferrorpc.collectives.execution import Execution
from ferrorpc.errors import FerroError, NcclError

SUSPICION_SECONDS: Final = 5.0
"""How long the coordinator has to say who died where NCCL says that somebody, or the network, did; longer than its grace."""


class Airborne(Execution):
    """An operation that a GPU may still be busy with when its driver is through.

    Attributes:
        lineup: where it is launched.
        mark: its end in its stream, once it is in there.
        in_turn: its mark is in the lineup's stream, so the GPU comes past it after those that were launched before.
        is_past: it is known already that the GPU has come past the mark.
        has_landed: the GPU was seen to have come past the mark while the generation went on: its result is there.
        over: it holds nothing any more: it has landed, or failed. Another thread than the one that looks may have seen to that.
        told: of its landing, or of what ended its flight, where somebody wants to know.
    """

    lineup: Lineup
    mark: Event | None = None
    in_turn = True
    is_past = False
    has_landed = False
    over = False
    told: Callable[[FerroError | None], None] | None = None
    _met: Exception | None = None
    _verdict_by: float | None = None

    def begin(self) -> bool:
        """Does on the caller's thread what can be done at once: to wake another one costs more. Whether it is complete.

        What it meets is kept for its driver, whose next `advance` raises it by `raise_met`.
        """
        self.wake = nobody
        try:
            return self.advance()
        except Exception as problem:  # noqa: BLE001  drivers know what to do about each kind
            self._met = problem.with_traceback(None)  # which would refer to this execution
            return False

    def raise_met(self) -> None:
        """Raises what `begin` met."""
        if self._met is not None:
            met, self._met = self._met, None
            try:
                raise met
            finally:
                del met

    def suspects(self, error: NcclError) -> bool:
        """Whether an error may be the death of a peer that the coordinator has not told of yet: NCCL does not know whose."""
        if error.fields.get("status") != State.REMOTE_ERROR:
            return False
        now = self.guard.clock.now()
        if self._verdict_by is None:
            self._verdict_by = now + SUSPICION_SECONDS
        return now < self._verdict_by

    @abstractmethod
    def land(self) -> bool:
        """Whether the GPU has come past it. Raises what became of it otherwise."""

    @abstractmethod
    def release(self) -> None:
        """Lets go of what it holds. Idempotent."""


Looker = TypeVar("Looker", bound=Airborne)


def first_cause(look: Callable[[Looker], bool]) -> Callable[[Looker], bool]:
    """Where a generation has ended, NCCL says only that its communicators are gone: the cause is raised instead.

    NCCL may be the first to notice that a peer is gone. Then the cause is waited for a while. What another thread has brought
    to its end during the look, and closed the group, has lost nothing.
    """

    @wraps(look)
    def looking(execution: Looker) -> bool:
        try:
            return look(execution)
        except NcclError as error:
            if execution.has_landed:
                return True
            execution.guard.latch.check()
            if execution.over:
                return True
            if execution.suspects(error):
                return False
            raise

    return looking


def tell(execution: Airborne, error: FerroError | None) -> bool:
    """Tells who wants to know what became of an operation, once, whichever thread comes first. Whether that was here."""
    told: Callable[[FerroError | None], None] | None = vars(execution).pop("told", None)
    if told is not None:
        told(error)
    return told is not None


def nobody() -> None:
    """The wake of an operation that is looked at: it stands in the mailbox for those who ask where this rank is."""
