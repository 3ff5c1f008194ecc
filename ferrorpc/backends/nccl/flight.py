"""What is left of an operation when its caller has gone on: waiting until the GPU has come past it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

from ferrorpc.backends.nccl.api import State
from ferrorpc.collectives.execution import Execution
from ferrorpc.errors import FerroError, NcclError

SUSPICION_SECONDS: Final = 5.0
"""How long the coordinator has to say who died where NCCL says that somebody, or the network, did; longer than its grace."""


class Airborne(Execution):
    """An operation that a GPU may still be busy with when its driver is through.

    Attributes:
        over: it holds nothing any more: it has landed, or failed. Another thread than the one that looks may have seen to that.
    """

    over = False
    _verdict_by: float | None = None

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


class Flight(Execution):
    """Drives it from there to its landing."""

    def __init__(self, execution: Airborne) -> None:
        self.guard = execution.guard
        self.polling = execution.polling
        self.device = execution.device
        self.results, self.specs = [], []
        self._execution = execution

    @property
    def label(self) -> str:
        return self._execution.label

    def advance(self) -> bool:
        return self._execution.land()

    def waiting_on(self) -> list[int]:
        return self._execution.waiting_on()

    def probe(self) -> None:
        self._execution.probe()

    def explain(self) -> str:
        return self._execution.explain()

    def timeout_error(self) -> FerroError:
        return self._execution.timeout_error()

    def finish(self) -> None:
        self._execution.release()
