"""What the operations of one rank in one group share: the GPU, the host lanes, the launch queues, and the set in flight."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, suppress
from typing import Any, Final

from ferrorpc.arrays.device import Device
from ferrorpc.backends.device.completion import CompletionWatcher, WatcherWork
from ferrorpc.backends.device.departures import Counts, Departures
from ferrorpc.backends.device.ending import Ending
from ferrorpc.backends.device.in_flight import InFlightExecution
from ferrorpc.backends.device.launch_queue import LaunchQueue, NumberedLaunchQueue
from ferrorpc.backends.message import MessageBackend
from ferrorpc.collectives.driver import drive
from ferrorpc.collectives.polling import Polling
from ferrorpc.collectives.progress import progress_of
from ferrorpc.errors import FerroError, LimitExceededError
from ferrorpc.wire.frames import Key

PROBE_THREAD: Final = "ferrorpc-device-probe"
"""The name of threads that probe other ranks."""


class GroupContext:
    """The shared state of a group's operations on one rank.

    Args:
        lanes: the same ranks' backend for host memory.
        device: this rank's GPU.
        program: the launch queue of operations in program order.
        departures: those of this rank's generation.
        ending: that of this rank's generation.

    Attributes:
        numbered: the launch queue of operations of streams; None before the first stream is opened.
        others: world ranks of the group without this one.
        add: adds an operation that was started to those in flight.
        remove: removes one that was released.
    """

    def __init__(
        self, lanes: MessageBackend, device: Device, program: LaunchQueue, departures: Departures, ending: Ending
    ) -> None:
        self.lanes = lanes
        self.device = device
        self.program = program
        self.numbered: NumberedLaunchQueue | None = None
        self.rank, self.size = lanes.rank, lanes.size
        self.others = [rank for place, rank in enumerate(lanes.world_ranks) if place != lanes.rank]
        self.polling = Polling(1)
        self._lock = threading.Lock()
        self._in_flight: set[InFlightExecution] = set()
        """Needs no lock: each use is a single call into the set, which the GIL makes atomic."""
        self.add = self._in_flight.add
        self.remove = self._in_flight.discard
        self._watchers: dict[LaunchQueue, CompletionWatcher] = {}
        """The latest watcher of each launch queue."""
        self.departures = departures
        self.ending = ending
        departures.register(lanes.group_id, self._counts)

    def launch_queue(self, stream: int) -> LaunchQueue:
        """The launch queue of a stream's operations; stream 0 is program order."""
        if stream == 0:
            return self.program
        if self.numbered is None:
            raise AssertionError(f"stream {stream} was not opened")
        return self.numbered

    def in_flight(self) -> list[InFlightExecution]:
        """The operations that this rank has started and not released."""
        return list(self._in_flight)

    def _counts(self) -> Counts | None:
        numbered = self.numbered
        return None if self.in_flight() else [self.program.next_number, 0 if numbered is None else numbered.next_number]

    def probe(self, key: Key, signature: str, number: int) -> None:
        """Probes the other ranks about an operation that was launched here, except those that closed after finishing theirs.

        It does so on a thread of its own, because it reads the job's store, which may take long.
        """

        def body() -> None:
            with suppress(FerroError):  # it is the generation's, which the operation's driver finds as well
                for rank in self.departures.still_needed(self.others, key, number):
                    self.lanes.transport.probe(rank, key, signature)

        with suppress(LimitExceededError):  # the next probe may get a thread
            self.lanes.clock.start(body, PROBE_THREAD)

    def drive(self, execution: InFlightExecution) -> list[Any]:
        """Drives an operation on the caller's thread until it is complete. Releases one that fails."""
        try:
            if not execution.begin():
                return drive(execution)
            execution.finish()
            return execution.results
        except BaseException:
            execution.release()
            raise

    def watch(self, execution: InFlightExecution) -> None:
        """Has the progress thread complete an operation that is launched, so that its caller can go on."""
        queue = execution.launch_queue
        latest = self._watchers.get(queue)
        if latest is not None and latest.join(execution):
            return
        with self._lock:
            if self._watchers.get(queue) is not latest and self._watchers[queue].join(execution):
                return
            watcher = CompletionWatcher(execution, self.device)
            progress_of(self.lanes.clock).submit(watcher, lambda _: None, WatcherWork(watcher))
            self._watchers[queue] = watcher  # only now: others join it, and the system may have refused its thread

    def hurry(self, execution: InFlightExecution) -> None:
        """Has an operation that is watched noticed sooner when it completes."""
        execution.is_awaited = True
        watcher = self._watchers.get(execution.launch_queue)
        if watcher is not None:
            watcher.wake()  # it sleeps for the longer interval

    def copying_to_host(self) -> AbstractContextManager[None]:
        """A context for copying finished results to the host. Its current stream holds copies alone, so these do not wait for
        the program's blocking streams, as they would in the null stream."""
        return self.device.on(self.device.staging.downloads.stream)
