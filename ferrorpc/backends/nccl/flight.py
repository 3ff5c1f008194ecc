"""What is left of an operation when its caller has gone on: waiting until the GPU has come past it."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from typing import Final

from ferrorpc.arrays.device import Device
from ferrorpc.backends.nccl.airborne import Airborne, nobody, tell
from ferrorpc.collectives.execution import Execution
from ferrorpc.errors import FerroError
from ferrorpc.guard import FOREVER, Guard
from ferrorpc.work import Work

IDLE_SECONDS: Final = 1e-3
"""Between two looks where nobody waits to be told, and memory alone is kept."""
TELLING_SECONDS: Final = 200e-6
"""The same where somebody may wait."""
LINGER_SECONDS: Final = 5e-3
"""How long a flight waits for others when all have landed."""
EMPTY_SECONDS: Final = 3600.0
"""Its deadline meanwhile: none that comes."""


class Flight(Execution):
    """Drives what one lineup has launched, one operation after the other, to their landings. Others join it while it lasts, and
    wake nobody.

    Every question to the GPU lets go of the interpreter, and so does waking the thread that asks; whoever launches the next
    operation has to wait until it gets the interpreter back, which takes longer than all else that a launch does. So it is
    asked seldom, and few questions: the GPU comes past marks in their order, so where it is past one it is past all before. And
    a flight lasts a while longer than what is in it: what small operations leave has landed before the next is launched.
    """

    def __init__(self, first: Airborne, device: Device) -> None:
        self.guard = first.guard
        self.wake = nobody
        self.polling = first.polling
        self.device = device
        self.results, self.specs = [], []
        self._lock = threading.Lock()
        self._is_over = False
        self._flying = deque([first])
        self._empty_since = FOREVER
        self._tells = first.told is not None
        """Whether somebody may wait to be told of what joined last."""

    def join(self, execution: Airborne) -> bool:
        """Takes along what was launched after the others, unless this is over, or its deadline would not be the last."""
        with self._lock:
            flying = self._flying
            if self._is_over or (flying and execution.guard.deadline < flying[-1].guard.deadline):
                return False
            if not flying:
                self.guard = execution.guard
            tells, self._tells = self._tells, execution.told is not None
            flying.append(execution)
        if self._tells and not tells:
            self.wake()  # it sleeps for longer
        return True

    @property
    def label(self) -> str:
        return self._flying[0].label if self._flying else "nothing in flight"

    @property
    def nap_seconds(self) -> float:
        return TELLING_SECONDS if self._tells else IDLE_SECONDS

    def advance(self) -> bool:
        self._ask()
        while self._flying:
            first = self._flying[0]
            if not first.land():
                return False
            tell(first, None)
            self.position += 1
            self._leave_behind()
        with self._lock:
            self._is_over = not self._flying and self.guard.clock.now() >= self._empty_since + LINGER_SECONDS
            return self._is_over

    def _ask(self) -> None:
        """Finds by halves what the GPU has come past."""
        with self._lock:
            flying = [each for each in self._flying if each.in_turn and not each.over]
        for each in flying[: bisect_left(flying, True, key=lambda each: each.mark is None or not each.mark.done)]:
            each.is_past = True

    def _leave_behind(self) -> None:
        """The first one has landed."""
        with self._lock:
            self._flying.popleft()
            if self._flying:
                self.guard = self._flying[0].guard
            else:
                self.guard = Guard(self.guard.clock, self.guard.latch, EMPTY_SECONDS)
                self._empty_since = self.guard.started

    def waiting_on(self) -> list[int]:
        return self._flying[0].waiting_on() if self._flying else []

    def probe(self) -> None:
        if self._flying:
            self._flying[0].probe()

    def explain(self) -> str:
        return self._flying[0].explain() if self._flying else self.label

    def timeout_error(self) -> FerroError:
        return self._flying[0].timeout_error()

    def finish(self) -> None:
        with self._lock:
            self._is_over = True
        for execution in self._flying:
            execution.release()

    def fail(self, error: FerroError) -> bool:
        """Ends what is left of it with this error, but for what others saw land. Whether nobody else needs to be told."""
        left, self._flying = self._flying, deque()
        told = [tell(execution, None if execution.has_landed else error.again()) for execution in left]
        return any(told) or all(execution.has_landed for execution in left)


class Arrival(Work[None]):
    """That of a flight: an error is that of each of its operations."""

    def __init__(self, flight: Flight) -> None:
        super().__init__(flight.guard.clock, flight.label)
        self._flight = flight

    def fail(self, error: BaseException) -> None:
        self.label = self._flight.label
        if not isinstance(error, FerroError) or not self._flight.fail(error):
            super().fail(error)
