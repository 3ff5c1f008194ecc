"""Where results on GPUs are complete: at events behind what their streams hold."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from ferrorpc.arrays.device import Device, Stream
from ferrorpc.arrays.event import Event
from ferrorpc.arrays.kinds import kind_of
from ferrorpc.arrays.staging import COPY_SECONDS, until_true
from ferrorpc.errors import CollectiveTimeoutError
from ferrorpc.guard import FOREVER, Clock, Latch

POLL_SECONDS: Final = 100e-6
"""How often a thread that waits for GPUs looks at them."""
LANDINGS: Final = 16
"""From how many on it is looked which of them the GPU has reached."""


class Landing:
    """Where the streams of arrays on GPUs are now: at events behind what they hold. There a result is complete that was just
    made, and what the caller did before may no longer write an `out` that was just passed in.

    Args:
        given: the result, or the `out`: an array, or a list of arrays; those on the host do not count.
    """

    __slots__ = ("_marks",)

    def __init__(self, given: Any) -> None:
        devices = {
            kind.staging.device
            for kind in map(kind_of, given if isinstance(given, list | tuple) else (given,))
            if kind.on_device
        }
        self._marks: list[tuple[Device, Stream, Event]] = []
        for device in devices:
            with device.here():
                self._marks.append((device, *device.marked()))

    @property
    def streams(self) -> tuple[tuple[int, int], ...]:
        """The streams that it was made in, by the numbers of their GPUs and their own."""
        return tuple((device.index, stream.pointer) for device, stream, _ in self._marks)

    @property
    def is_reached(self) -> bool:
        """Whether the GPU has come there. Never blocks."""
        return all(event.done for _, _, event in self._marks)

    def let_go(self) -> None:
        """Drops what was kept until the GPU is there."""
        for device, _, _ in self._marks:
            device.staging.let_go()

    def follow(self) -> None:
        """Makes the stream that is current now wait until there."""
        for device, stream, event in self._marks:
            current = device.current()
            if current.pointer != stream.pointer:
                current.wait(event)

    def settle(self, clock: Clock, until: float) -> None:
        """Blocks the host until the GPU is there.

        Raises:
            CollectiveTimeoutError: it was not by clock time `until`; where that is FOREVER, within COPY_SECONDS.
        """
        until_true(lambda: self.is_reached, clock, COPY_SECONDS if until == FOREVER else until - clock.now())
        self.let_go()


class Landings:
    """The latest landing in each stream of a group's results.

    Args:
        latch: of the group's generation.
    """

    def __init__(self, clock: Clock, latch: Latch) -> None:
        self._clock = clock
        self._latch = latch
        self._lock = threading.Lock()
        self._latest: dict[tuple[tuple[int, int], ...], Landing] = {}
        """By the streams that they were made in."""

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._latest)

    def note(self, make: Callable[[Any], Landing | None], given: Any) -> Landing | None:
        """Called when a result on a GPU has been given to the caller. `make`: `Result.landing`."""
        with self._lock:  # so that the latest of a stream is the one that is kept
            landing = make(given)
            if landing is not None:
                if len(self._latest) > LANDINGS:  # streams have come and gone
                    self._latest = {streams: each for streams, each in self._latest.items() if not each.is_reached}
                self._latest[landing.streams] = landing
        return landing

    def settle(self, until: float) -> None:
        """Blocks the host until the results that were given so far are complete on their GPUs.

        Raises:
            CollectiveTimeoutError: they were not by clock time `until`.
            FerroError: the generation's first cause.
        """
        parker, clock = self._clock.parker(), self._clock
        with self._lock:
            waiting = list(self._latest.items())
        for streams, landing in waiting:
            while not landing.is_reached:
                self._latch.check()
                now = clock.now()
                if now >= until:
                    raise CollectiveTimeoutError([], "the GPU had not brought earlier results to their arrays in time")
                parker.park(min(until, now + POLL_SECONDS))
            landing.let_go()
            with self._lock:
                if self._latest.get(streams) is landing:
                    del self._latest[streams]
