"""The interface of a GPU: memory, streams, events, copies. The rest of the library uses GPUs only through it.

`CupyDevice` implements it. Nothing here blocks the host: a stream is a queue that the GPU works off in order, an event is a
mark in it, and `Event.done` tells whether the GPU has reached that. Arrays are those of the device's library, of any number of
dimensions, always C-contiguous and in storage dtypes (bfloat16 as uint16).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from ferrorpc.arrays.cupy_ipc import CupyIpc
    from ferrorpc.kernels.cuda.folds import Folds
    from ferrorpc.kernels.cuda.launcher import DeviceKernels

DeviceArray: TypeAlias = Any
"""An array in a GPU's memory."""


class Event(Protocol):
    """A mark in a stream."""

    @property
    def done(self) -> bool:
        """Whether the GPU has reached it. Any thread may ask, also while a CUDA graph is being captured, and whichever device
        is its current one. A thread that has used no GPU stands on the event's from then on."""


class Stream(Protocol):
    """A queue of work on one GPU."""

    @property
    def pointer(self) -> int:
        """The CUDA stream, for libraries that take one."""

    def record(self) -> Event:
        """Records a new event behind everything that is in the queue now."""

    def wait(self, event: Event) -> None:
        """Makes work queued from now on wait for the event, which may be in another stream. The host does not wait."""


class Device(Protocol):
    """One GPU, as one process uses it."""

    @property
    def index(self) -> int:
        """Its number in this process."""

    def make_current(self) -> None:
        """Makes it the calling thread's current device."""

    def enter_own_thread(self) -> None:
        """As `make_current`, for a thread of the library's own, whose calls then leave alone the CUDA graphs that other threads
        capture (`capture_mode`)."""

    def beside_captures(self) -> AbstractContextManager[None]:
        """A context for any thread, in which it is the current device, and pinning memory, as other calls, leaves captures
        alone, also those of the calling thread (`capture_mode`)."""

    def here(self) -> AbstractContextManager[Any]:
        """A context in which it is the calling thread's current device, for what is done in the caller's stream."""

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """A context in which it is the calling thread's current device, and the stream its current one."""

    @property
    def kernels(self) -> DeviceKernels:
        """The library's CUDA kernels, compiled when first asked for."""

    @property
    def folds(self) -> Folds:
        """The reduction kernels for memory that ranks share, compiled when first asked for."""

    @property
    def ipc(self) -> CupyIpc:
        """Memory and events that processes share (CUDA IPC). To be used where the device is the current one."""

    @property
    def staging(self) -> Any:
        """Copies to host memory and back (staging.Staging)."""

    @property
    def uuid(self) -> str:
        """Identifies the GPU, alike in every process of every container on the host."""

    def holds(self, array: DeviceArray) -> bool:
        """Whether an array is in its memory."""

    def current(self) -> Stream:
        """The calling thread's current stream."""

    def marked(self) -> tuple[Stream, Event]:
        """The current stream, and an event recorded in it now. To be used where the device is current (`here`)."""

    def new_stream(self) -> Stream:
        """A stream of its own, of the highest priority, that does not wait for the legacy default stream."""

    def adopt(self, stream: Any) -> Stream:
        """Wraps a stream that a caller has made: one of the device's library, or a CUDA stream as a number."""

    def is_captured(self, stream: Stream) -> bool:
        """Whether a CUDA graph is being captured from a stream. Null streams cannot be.

        Raises:
            BackendUnavailableError: the GPU has failed.
        """

    def check_not_captured(self, stream: Stream, which: str) -> None:
        """Raises UsageError if a CUDA graph is being captured from a stream.

        Args:
            which: says in the error which stream it is.
        """

    def empty(self, shape: Sequence[int], storage: np.dtype[Any], stream: Stream | None = None) -> DeviceArray:
        """A new array, its contents undefined, whose memory belongs to that stream; None for the current one.

        Work that the stream holds may still use the memory. When the array is deleted, work queued in that stream later may
        get it.
        """

    def empty_each(self, shapes: Sequence[tuple[int, ...]], storage: np.dtype[Any]) -> list[DeviceArray]:
        """As `empty` in the current stream, an array for each shape."""

    def pointer(self, array: DeviceArray) -> int:
        """Its address."""

    def copy(self, target: DeviceArray, source: DeviceArray, stream: Stream) -> None:
        """target[:] = source, on the device, in that stream. Both are C-contiguous and of equal size in bytes."""

    def upload(self, target: DeviceArray, source: np.ndarray[Any, Any], stream: Stream) -> None:
        """target[:] = source, in that stream. Pinned memory must not change before the GPU has finished the copy."""

    def download(self, target: np.ndarray[Any, Any], source: DeviceArray, stream: Stream) -> None:
        """target[:] = source, in that stream. Into pinned memory the host does not wait."""

    def pinned(self, size_bytes: int) -> np.ndarray[Any, Any]:
        """New host memory that the GPU reads and writes by DMA, as uint8. It stays pinned while it is referenced.

        Raises:
            BackendUnavailableError: the host has no memory for it, or the GPU has failed.
        """


def is_host(array: Any) -> bool:
    """Whether an array is in host memory."""
    return isinstance(array, np.ndarray)
