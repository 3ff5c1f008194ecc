"""The order in which streams use some memory of a GPU, such as a bucket, and in which it returns to its pool."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import ClassVar

from ferrorpc.arrays.device import Device, Stream
from ferrorpc.errors import BackendUnavailableError


class StreamOrder:
    """Serialises the uses of some memory by different streams. The current stream is the first.

    Instances are kept alive in a class attribute until `release`: in a reference cycle that becomes garbage, a stream's own
    finalizer, which destroys it, could run before that of the memory.

    Args:
        last: says in errors which stream that of the last use is.
    """

    _alive: ClassVar[set[StreamOrder]] = set()
    _unreleased: ClassVar[deque[tuple[StreamOrder, Mapping[str, object]]]] = deque()
    """What was dropped while a graph was captured from one of its streams."""

    def __init__(self, device: Device, last: str) -> None:
        self.release_late()
        self._device = device
        self._name = last
        self._last = device.current()
        self._allocators: list[Stream] = []
        self._alive.add(self)

    def check(self) -> None:
        """Raises UsageError if a graph is being captured from the current stream, or from that of the last use."""
        self._device.current()
        self._device.check_not_captured(self._last, self._name)

    @property
    def is_in_last(self) -> bool:
        """Whether the current stream is that of the last use. This costs less than `enter`, and checks nothing."""
        return self._device.is_callers(self._last)

    def enter(self) -> Stream:
        """Orders what the current stream is given from now on after all earlier uses. Returns that stream.

        Raises:
            UsageError: as `check`.
        """
        stream = self._device.current()
        if stream.pointer != self._last.pointer:
            self._device.check_not_captured(self._last, self._name)
            stream.wait(self._last.record())
        self._last = stream
        return stream

    def allocating(self) -> None:
        """A part of the memory is about to be allocated in the current stream."""
        self._allocators.append(self.enter())

    def release(self, memory: Mapping[str, object]) -> None:
        """Orders the memory's return to its pools, in the streams it was allocated in, after all uses. That would become a part
        of a graph that is captured from one of these streams: then the memory is kept until after the capture. Any thread may
        call this, as it collects garbage."""
        if sys.is_finalizing():
            return
        with self._device.here(), suppress(BackendUnavailableError):  # a GPU that has failed uses no memory any more
            if any(self._device.is_captured(stream) for stream in (self._last, *self._allocators)):
                self._unreleased.append((self, memory))
                return
            used = self._last.record()
            for stream in self._allocators:
                if stream.pointer != self._last.pointer:
                    stream.wait(used)
            # The header of an abandoned step may still be in transfer, and the memory returns in a stream's order only while
            # that stream exists.
            self._device.staging.uploads.keep((memory.get("_pinned"), self), used)
        self._alive.discard(self)

    @classmethod
    def release_late(cls) -> None:
        """Releases what was dropped during captures that are over."""
        for _ in range(len(cls._unreleased)):
            try:
                order, memory = cls._unreleased.popleft()
            except IndexError:  # another thread took it
                return
            order.release(memory)
