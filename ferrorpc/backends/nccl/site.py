"""Where a group's operations take place: its GPU, its host lanes, the order of launches, and what the GPU may be busy with."""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager, suppress
from typing import Any, Final

from ferrorpc.arrays.device import Device, Event
from ferrorpc.backends.message import MessageBackend
from ferrorpc.backends.nccl.airborne import Airborne
from ferrorpc.backends.nccl.departures import Departures, Through
from ferrorpc.backends.nccl.flight import Arrival, Flight
from ferrorpc.backends.nccl.lineup import Lineup, NumberedLineup
from ferrorpc.backends.nccl.wreck import Wreck
from ferrorpc.collectives.execution import Execution
from ferrorpc.collectives.polling import Polling
from ferrorpc.collectives.progress import drive, progress_of
from ferrorpc.errors import FerroError
from ferrorpc.wire.frames import Key

_log = logging.getLogger("ferrorpc.backends.nccl")
ASKING: Final = "ferrorpc-nccl-ask"
"""The name of threads that ask others where they stand."""


class Site:
    """What operations of one rank of one group ask.

    Args:
        lanes: the same ranks' backend for host memory.
        device: this rank's GPU.
        program: where operations in program order are launched.
        departures: those of this rank's generation.

    Attributes:
        numbered: where those of streams are; None before the first stream is opened.
        others: world ranks of the group but this one.
    """

    def __init__(self, lanes: MessageBackend, device: Device, program: Lineup, departures: Departures) -> None:
        self.lanes = lanes
        self.device = device
        self.program = program
        self.numbered: NumberedLineup | None = None
        self.rank, self.size = lanes.rank, lanes.size
        self.others = [rank for place, rank in enumerate(lanes.world_ranks) if place != lanes.rank]
        self.polling = Polling(1)
        self._lock = threading.Lock()
        self._flying: set[Airborne] = set()
        """Whatever is asked of it is one step of the interpreter's."""
        self._flights: dict[Lineup, Flight] = {}
        """The latest of each lineup."""
        self._wrecks: dict[Lineup, Wreck] = {}
        """The same, once the generation has ended."""
        self.departures = departures
        departures.count(lanes.group_id, self._through)

    def lineup(self, stream: int) -> Lineup:
        """Where operations of a stream are launched; 0 is program order."""
        if stream == 0:
            return self.program
        if self.numbered is None:
            raise AssertionError(f"stream {stream} was not opened")
        return self.numbered

    def took_off(self, execution: Airborne) -> None:
        """An operation was started."""
        self._flying.add(execution)

    def landed(self, execution: Airborne) -> None:
        """It holds nothing any more."""
        self._flying.discard(execution)

    def in_flight(self) -> list[Airborne]:
        """What this rank has started that has not landed."""
        return list(self._flying)

    def _through(self) -> Through | None:
        numbered = self.numbered
        return None if self.in_flight() else [self.program.through, 0 if numbered is None else numbered.through]

    def ask(self, key: Key, signature: str, number: int) -> None:
        """Asks the others where they stand in an operation that was launched here, but for those that left with theirs done.

        On a thread of its own: who has left stands in the job's store, which may be far away.
        """

        def body() -> None:
            with suppress(FerroError):  # it is the generation's, which its driver finds as well
                for rank in self.departures.staying(self.others, key, number):
                    self.lanes.transport.probe(rank, key, signature)

        self.lanes.clock.start(body, ASKING)

    def drive(self, execution: Airborne) -> list[Any]:
        """Drives it on the caller's thread until it is complete; one that fails lets go of what it holds."""
        try:
            if not execution.begin():
                return drive(execution, self.lanes.abort)
            execution.finish()
            return execution.results
        except BaseException:
            execution.release()
            raise

    def see_off(self, execution: Airborne) -> None:
        """Its caller goes on; the progress thread waits until the GPU has come past it."""
        latest = self._flights.get(execution.lineup)
        if latest is not None and latest.join(execution):
            return
        with self._lock:
            if self._flights.get(execution.lineup) is not latest and self._flights[execution.lineup].join(execution):
                return
            flight = self._flights[execution.lineup] = Flight(execution, self.device)
        progress_of(self.lanes.clock).submit(flight, self.lanes.abort, _nothing, Arrival(flight))

    def keep(self, lineup: Lineup, mark: Event | None, things: object) -> None:
        """Keeps things until the GPU has come past a mark of a lineup's stream, or where that is None past all it holds now."""
        with self._lock:
            try:
                mark = lineup.stream.record() if mark is None else mark
            except Exception as problem:  # noqa: BLE001  a GPU that has failed takes no mark, and uses nothing any more
                _log.debug("nothing has to be kept for the GPU: %s", problem)
                return
            wreck = self._wrecks.get(lineup)
            if wreck is None or not wreck.keep(mark, things):
                clock = self.lanes.clock
                wreck = self._wrecks[lineup] = Wreck(self.device, clock, self.polling)
                wreck.keep(mark, things)
                progress_of(clock).submit(wreck, _log_only, _nothing)

    def homewards(self) -> AbstractContextManager[None]:
        """For copies home of what the GPU is through with: they wait for copies alone, not, as in the null stream, for what the
        program's blocking streams hold."""
        return self.device.on(self.device.staging.descents.stream)

    def sentence(self, label: str) -> str:
        """What an operation waits for once it is in its stream, as far as anybody knows: NCCL does not say."""
        return f"{label} waits for ranks {self.others}, or for what their GPUs and this one were given before it"


def _log_only(error: FerroError) -> None:
    """There is no generation that it could end."""
    _log.warning("%s", error.message)


def _nothing(execution: Execution) -> None:
    """A flight's result: its caller had it long ago."""
