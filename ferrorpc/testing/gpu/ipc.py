"""The CUDA IPC functions of `cupy.cuda.runtime`, for memory and events that processes share, on fake GPUs.

Every rank of a test is a thread of one process, but may claim to be a process of its own. It then opens the memory and events
of other ranks by their handles, as real processes must. Opened memory has an address of its own until it is closed. What CUDA
leaves undefined is a fault: to free memory that another process has open, and to use an event that its owner has destroyed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from ferrorpc.testing.gpu.machine import STUCK_SECONDS, FakeEvent, FakeStream, Gpu, GpuFault, Machine, Memory

HANDLE_BYTES: Final = 64
DISABLE_TIMING, INTERPROCESS = 2, 4


class FakeIpc:
    """What all threads of a process share. Its public attributes are the runtime's, by their names there.

    Args:
        gpu: says which GPU is the calling thread's.
        gone: what the runtime raises for a handle whose memory or event is not there any more.
    """

    eventDisableTiming, eventInterprocess = DISABLE_TIMING, INTERPROCESS

    def __init__(self, machine: Machine, gpu: Callable[[], Gpu], gone: Callable[[], Exception]) -> None:
        self._machine = machine
        self._gpu = gpu
        self._gone = gone
        self._shared: set[int] = set()
        """Numbers of events that other processes may open."""
        self._exported: dict[int, int] = {}
        """Events that were opened here -> the event of their owner."""
        self._opened: dict[int, tuple[Memory, int]] = {}
        """Addresses of opened memory -> the memory of the GPU that it was opened on, and its address for its owner."""

    def malloc(self, size_bytes: int) -> int:
        with self._machine.lock:
            address = self._gpu().memory.allocate(size_bytes)
            self._machine.shared[address] = self._gpu()
            return address

    def ipcGetMemHandle(self, address: int) -> bytes:
        if address not in self._machine.shared:
            raise self._gone()
        return _handle(address)

    def free(self, address: int) -> None:
        """Waits for the GPU, as cudaFree does."""
        with self._machine.lock:
            self._machine.settle()
            if any(owners == address for _, owners in self._opened.values()):
                self._machine.faults.append(GpuFault(f"memory at {address:#x} was freed while another process had it open"))
            self._machine.shared.pop(address).memory.free(address)

    def ipcOpenMemHandle(self, handle: bytes) -> int:
        owners = int.from_bytes(handle, "little")
        with self._machine.lock:
            owner, memory = self._machine.shared.get(owners), self._gpu().memory
            if owner is None:
                raise self._gone()
            address = memory.map(owner.memory.block(owners))
            self._opened[address] = memory, owners
            return address

    def ipcCloseMemHandle(self, address: int) -> None:
        with self._machine.lock:
            if address not in self._opened:
                raise GpuFault(f"memory at {address:#x} is not open")
            memory, _ = self._opened.pop(address)
            memory.unmap(address)

    def eventCreateWithFlags(self, flags: int) -> int:
        if flags not in (DISABLE_TIMING, DISABLE_TIMING | INTERPROCESS):
            raise GpuFault(f"an event with flags {flags} is slow, or cannot be shared")
        number = self._machine.know(FakeEvent(self._machine, self._gpu()))
        if flags & INTERPROCESS:
            self._shared.add(number)
        return number

    def ipcGetEventHandle(self, event: int) -> bytes:
        if event not in self._shared:
            raise self._gone()
        return _handle(event)

    def ipcOpenEventHandle(self, handle: bytes) -> int:
        owners = int.from_bytes(handle, "little")
        event = self._machine.events.get(owners)
        if event is None:
            raise self._gone()
        found = self._machine.know(event)
        self._exported[found] = owners
        return found

    def eventDestroy(self, event: int) -> None:
        del self._machine.events[event]
        self._exported.pop(event, None)

    def eventRecord(self, event: int, stream: int) -> None:
        """Creates a context on the current GPU, whose stream it need not be, as CUDA does."""
        self._gpu()
        self._event(event).record(self._stream(stream))

    def _event(self, number: int) -> FakeEvent:
        """An event that is to be used."""
        if self._exported.get(number, number) not in self._machine.events:
            raise GpuFault(f"the owner of event {number:#x} has destroyed it")
        return self._machine.event(number)

    def _stream(self, pointer: int) -> FakeStream:
        """The stream with this number. The null stream is the default stream of the current GPU."""
        return self._machine.stream(pointer) if pointer else self._gpu().default

    def streamWaitEvent(self, stream: int, event: int) -> None:
        self._event(event).hold(self._stream(stream))

    def eventSynchronize(self, event: int) -> None:
        """Blocks until the event is done. Raises GpuFault after STUCK_SECONDS."""
        until = time.monotonic() + STUCK_SECONDS
        while not self._event(event).done:
            if time.monotonic() > until:
                raise GpuFault("nothing moves before a mark that the host waits for")


def _handle(number: int) -> bytes:
    return number.to_bytes(HANDLE_BYTES, "little")
