"""CUDA IPC through CuPy: memory and events that one process creates and others open by handles of 64 bytes.

A memory handle stands for a whole allocation of `cudaMalloc`, so shared memory is allocated outside of CuPy's pools. A handle
cannot be opened in the process that created it, where the address is valid anyway. Written against `cupy.cuda.runtime` of
CuPy 14. On an H100 opened memory stays readable after the process that created it was killed.
"""

from __future__ import annotations

from typing import Any, Final

HANDLE_BYTES: Final = 64
PAGE_BYTES: Final = 2 << 20
"""Smaller allocations share a page of the driver, all of which would be opened."""


class CupyIpc:
    """The calls for the current GPU. Addresses, events and streams are CUDA's, as integers.

    Args:
        runtime: the module `cupy.cuda.runtime`.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    @property
    def error_class(self) -> type[Exception]:
        """The class of errors that all of these raise where CUDA refuses."""
        found: type[Exception] = self._runtime.CUDARuntimeError
        return found

    def allocate(self, size_bytes: int) -> int:
        """Allocates memory that others may open. Returns its address."""
        return int(self._runtime.malloc(-(-size_bytes // PAGE_BYTES) * PAGE_BYTES))

    def free(self, address: int) -> None:
        """Frees memory, after waiting until the GPU is idle."""
        self._runtime.free(address)

    def memory_handle(self, address: int) -> bytes:
        """The handle with which another process opens it."""
        return bytes(self._runtime.ipcGetMemHandle(address))

    def open_memory(self, handle: bytes) -> int:
        """Opens another process's memory. Returns its address here."""
        return int(self._runtime.ipcOpenMemHandle(handle))

    def close_memory(self, address: int) -> None:
        """Closes memory that was opened here."""
        self._runtime.ipcCloseMemHandle(address)

    def new_event(self) -> int:
        """A new event that others may open. To wait for one that was never recorded is not to wait at all."""
        flags = self._runtime.eventDisableTiming | self._runtime.eventInterprocess
        return int(self._runtime.eventCreateWithFlags(flags))

    def destroy_event(self, event: int) -> None:
        """Destroys an event that was created or opened here."""
        self._runtime.eventDestroy(event)

    def event_handle(self, event: int) -> bytes:
        """The handle with which another process opens it."""
        return bytes(self._runtime.ipcGetEventHandle(event))

    def open_event(self, handle: bytes) -> int:
        """Opens another process's event."""
        return int(self._runtime.ipcOpenEventHandle(handle))

    def record(self, event: int, stream: int) -> None:
        """Records an event in a stream. Streams that wait for its earlier record still wait for that one."""
        self._runtime.eventRecord(event, stream)

    def wait(self, stream: int, event: int) -> None:
        """Makes work queued in the stream from now on wait for the latest record of the event."""
        self._runtime.streamWaitEvent(stream, event)

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Copies bytes on the device, in the stream's order; also from memory that was opened."""
        if size_bytes and target != source:
            self._runtime.memcpyAsync(target, source, size_bytes, self._runtime.memcpyDeviceToDevice, stream)

    def settle(self, event: int) -> None:
        """Blocks the host until the GPU has reached the latest record of the event."""
        self._runtime.eventSynchronize(event)
