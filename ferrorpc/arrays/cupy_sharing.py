"""What processes share of a GPU, through CuPy: memory and events that one makes and others open by handles of 64 bytes.

A handle of memory names a whole allocation of `cudaMalloc`, never part of one, and an opened one is the whole of it: so what is
shared is allocated apart from CuPy's pools. Whoever has made a handle cannot open it in its own process; there the address
does. Written against `cupy.cuda.runtime` of CuPy 14. On an H100 what is opened stays readable when its maker has been killed.
"""

from __future__ import annotations

from typing import Any, Final

HANDLE_BYTES: Final = 64
PAGE_BYTES: Final = 2 << 20
"""Smaller allocations share one page of the driver's, which would be opened with them."""


class CupySharing:
    """Of the current GPU. Addresses, events and streams are numbers of CUDA's.

    Args:
        runtime: the module `cupy.cuda.runtime`.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    @property
    def problems(self) -> type[Exception]:
        """What any of this raises where CUDA refuses."""
        problems: type[Exception] = self._runtime.CUDARuntimeError
        return problems

    def allocate(self, size_bytes: int) -> int:
        """New memory that others may open."""
        return int(self._runtime.malloc(-(-size_bytes // PAGE_BYTES) * PAGE_BYTES))

    def free(self, address: int) -> None:
        """Gives it back; waits until the GPU is through with it."""
        self._runtime.free(address)

    def memory_handle(self, address: int) -> bytes:
        """By which another process opens it."""
        return bytes(self._runtime.ipcGetMemHandle(address))

    def open_memory(self, handle: bytes) -> int:
        """Where another process's memory lies in this one's address space."""
        return int(self._runtime.ipcOpenMemHandle(handle))

    def close_memory(self, address: int) -> None:
        """It is not used here any more."""
        self._runtime.ipcCloseMemHandle(address)

    def new_event(self) -> int:
        """A mark that others may open. As long as it was never recorded nobody waits for it."""
        flags = self._runtime.eventDisableTiming | self._runtime.eventInterprocess
        return int(self._runtime.eventCreateWithFlags(flags))

    def destroy_event(self, event: int) -> None:
        """An event that was made or opened here."""
        self._runtime.eventDestroy(event)

    def event_handle(self, event: int) -> bytes:
        """By which another process opens it."""
        return bytes(self._runtime.ipcGetEventHandle(event))

    def open_event(self, handle: bytes) -> int:
        """Another process's event."""
        return int(self._runtime.ipcOpenEventHandle(handle))

    def record(self, event: int, stream: int) -> None:
        """Marks the end of a stream's queue. Who waited for the mark before still waits for that."""
        self._runtime.eventRecord(event, stream)

    def wait(self, stream: int, event: int) -> None:
        """What is queued in the stream from now on begins after the latest mark."""
        self._runtime.streamWaitEvent(stream, event)

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Bytes on the device, in the stream's order; also from memory that was opened."""
        if size_bytes and target != source:
            self._runtime.memcpyAsync(target, source, size_bytes, self._runtime.memcpyDeviceToDevice, stream)

    def settle(self, event: int) -> None:
        """Waits until the GPU has come past the latest mark."""
        self._runtime.eventSynchronize(event)
