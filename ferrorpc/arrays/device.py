"""What is asked of a GPU: memory, streams, events, copies. The rest of the library knows GPUs only through this.

`CupyDevice` is the one there is. Nothing here blocks the host: a stream is a queue that the GPU works off in order, an event
is a mark in it, and whoever wants to know looks at `Event.done`. Arrays are those of the device's library, one-dimensional or
not, always C-contiguous and in storage dtypes (bfloat16 as uint16).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from ferrorpc.arrays.cupy_sharing import CupySharing
    from ferrorpc.kernels.cuda.folds import Folds
    from ferrorpc.kernels.cuda.launcher import DeviceKernels

DeviceArray: TypeAlias = Any
"""An array in a GPU's memory."""


class Event(Protocol):
    """A mark in a stream."""

    @property
    def done(self) -> bool:
        """Whether the GPU has come past it."""


class Stream(Protocol):
    """A queue of work on one GPU."""

    @property
    def pointer(self) -> int:
        """The CUDA stream, for libraries that take one."""

    def record(self) -> Event:
        """A new mark after everything that is in the queue now."""

    def wait(self, event: Event) -> None:
        """What is queued from now on begins after the mark, which may be in another stream. The host does not wait."""


class Device(Protocol):
    """One GPU, as one process uses it."""

    @property
    def index(self) -> int:
        """Its number in this process."""

    def make_current(self) -> None:
        """It is the calling thread's current device from now on."""

    def here(self) -> AbstractContextManager[Any]:
        """A context in which it is the calling thread's current device, for what is done in the caller's stream."""

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """A context in which it is the calling thread's current device, and the stream its current one."""

    @property
    def kernels(self) -> DeviceKernels:
        """The library's CUDA kernels, compiled when first asked for."""

    @property
    def folds(self) -> Folds:
        """The kernels for memory that ranks share, compiled when first asked for."""

    @property
    def sharing(self) -> CupySharing:
        """What it shares with other processes; asked where it is the current device."""

    @property
    def staging(self) -> Any:
        """Its way to host memory and back (staging.Staging)."""

    @property
    def uuid(self) -> str:
        """Which GPU it is, the same in every process of every container on the host."""

    def holds(self, array: DeviceArray) -> bool:
        """Whether an array is in its memory."""

    def current(self) -> Stream:
        """The stream that the calling thread works on now."""

    def marked(self) -> tuple[Stream, Event]:
        """That stream, and a mark of what it holds now."""

    def new_stream(self) -> Stream:
        """A stream of its own, of the highest priority, that does not wait for the legacy default stream."""

    def adopt(self, stream: Any) -> Stream:
        """A stream that a caller has made: one of the library's, or a CUDA stream as a number."""

    def empty(self, shape: Sequence[int], storage: np.dtype[Any], stream: Stream | None = None) -> DeviceArray:
        """A new array, its contents undefined, whose memory belongs to that stream; None for the current one.

        What the stream holds may still use the memory, and when the array goes, what comes in that stream next may have it.
        """

    def pointer(self, array: DeviceArray) -> int:
        """Where it begins."""

    def copy(self, target: DeviceArray, source: DeviceArray, stream: Stream) -> None:
        """target[:] = source, on the device, in that stream. Both are C-contiguous and of as many bytes."""

    def upload(self, target: DeviceArray, source: np.ndarray[Any, Any], stream: Stream) -> None:
        """target[:] = source, in that stream. Pinned memory must not change before the stream has come past this."""

    def download(self, target: np.ndarray[Any, Any], source: DeviceArray, stream: Stream) -> None:
        """target[:] = source, in that stream. Into pinned memory the host does not wait."""

    def pinned(self, size_bytes: int) -> np.ndarray[Any, Any]:
        """New host memory that the GPU reads and writes itself, as uint8. It stays pinned while it is referenced."""


def is_host(array: Any) -> bool:
    """Whether the processor can read an array."""
    return isinstance(array, np.ndarray)
