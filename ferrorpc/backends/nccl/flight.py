"""What is left of an operation when its caller has gone on: waiting until the GPU has come past it."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final

from ferrorpc.arrays.device import Device
from ferrorpc.backends.nccl.api import State
from ferrorpc.backends.nccl.lineup import Lineup
from ferrorpc.collectives.execution import Execution
from ferrorpc.errors import FerroError, NcclError
from ferrorpc.work import Work

SUSPICION_SECONDS: Final = 5.0
"""How long the coordinator has to say who died where NCCL says that somebody, or the network, did; longer than its grace."""


class Airborne(Execution):
    """An operation that a GPU may still be busy with when its driver is through.

    Attributes:
        lineup: where it is launched.
        over: it holds nothing any more: it has landed, or failed. Another thread than the one that looks may have seen to that.
        told: of its landing, or of what ended its flight, where somebody wants to know.
    """

    lineup: Lineup
    over = False
    told: Callable[[FerroError | None], None] | None = None
    _met: Exception | None = None
    _verdict_by: float | None = None

    def begin(self) -> bool:
        """Does on the caller's thread what can be done at once: to wake another one costs more. Whether it is complete.

        What it meets is kept for its driver, whose next `advance` raises it by `raise_met`.
        """
        self.wake = _nobody
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


class Flight(Execution):
    """Drives what one lineup has launched, one operation after the other, to their landings: the GPU comes past their marks in
    that order, so what is behind the first needs no look. Others join it while it lasts, and wake nobody."""

    def __init__(self, first: Airborne, device: Device) -> None:
        self.guard = first.guard
        self.polling = first.polling
        self.device = device
        self.results, self.specs = [], []
        self._lock = threading.Lock()
        self._is_over = False
        self._flying = deque([first])

    def join(self, execution: Airborne) -> bool:
        """Takes along what was launched after the others, unless this is over, or its deadline would not be the last."""
        with self._lock:
            fits = not self._is_over and execution.guard.deadline >= self._flying[-1].guard.deadline
            if fits:
                self._flying.append(execution)
            return fits

    @property
    def label(self) -> str:
        return self._flying[0].label

    def advance(self) -> bool:
        while self._flying[0].land():
            _tell(self._flying[0], None)
            self.position += 1
            with self._lock:
                self._flying.popleft()
                self._is_over = not self._flying
                if self._is_over:
                    return True
                self.guard = self._flying[0].guard
        return False

    def waiting_on(self) -> list[int]:
        return self._flying[0].waiting_on()

    def probe(self) -> None:
        self._flying[0].probe()

    def explain(self) -> str:
        return self._flying[0].explain()

    def timeout_error(self) -> FerroError:
        return self._flying[0].timeout_error()

    def finish(self) -> None:
        with self._lock:
            self._is_over = True
        for execution in self._flying:
            execution.release()

    def fail(self, error: FerroError) -> bool:
        """What is left of it has ended with this error. Whether anybody was told."""
        left, self._flying = self._flying, deque()
        return [_tell(execution, error.again()) for execution in left].count(True) > 0


class Arrival(Work[None]):
    """That of a flight: an error is that of each of its operations."""

    def __init__(self, flight: Flight) -> None:
        super().__init__(flight.guard.clock, flight.label)
        self._flight = flight

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, FerroError) or not self._flight.fail(error):
            super().fail(error)


def _tell(execution: Airborne, error: FerroError | None) -> bool:
    told, execution.told = execution.told, None  # which refers to what holds the execution
    if told is not None:
        told(error)
    return told is not None


def _nobody() -> None:
    """The wake of an operation that is looked at."""
