"""The CUDA IPC functions of `cupy.cuda.runtime`, for memory and events that processes share, on fake GPUs.

Every rank of a test is a thread of one process, but may claim to be a process of its own. It then opens the memory and events
of other ranks by their handles, as real processes must. Opened memory has the same address as for its owner.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from ferrorpc.testing.gpu.machine import STUCK_SECONDS, FakeEvent, FakeStream, Gpu, GpuFault, Machine

HANDLE_BYTES: Final = 64
DISABLE_TIMING, INTERPROCESS = 2, 4


class FakeIpc:
    """Of all threads of a process.

    Args:
        gpu: says which GPU is the calling thread's.
        gone: what the runtime raises for a handle whose memory or event is not there any more.
    """

    def __init__(self, machine: Machine, gpu: Callable[[], Gpu], gone: Callable[[], Exception]) -> None:
        self._machine = machine
        self._gpu = gpu
        self._gone = gone
        self._shared: set[int] = set()
        """Numbers of events that other processes may open."""
        self._opened: Counter[int] = Counter()

    def functions(self) -> dict[str, Any]:
        """The runtime's functions and constants, by name."""
        return {
            "malloc": self.malloc,
            "free": self.free,
            "ipcGetMemHandle": _handle,
            "ipcOpenMemHandle": self.open_memory,
            "ipcCloseMemHandle": self.close_memory,
            "eventDisableTiming": DISABLE_TIMING,
            "eventInterprocess": INTERPROCESS,
            "eventCreateWithFlags": self.create,
            "eventDestroy": self._machine.events.pop,
            "ipcGetEventHandle": self.event_handle,
            "ipcOpenEventHandle": self.open_event,
            "eventRecord": lambda event, stream: self._machine.event(event).record(self._stream(stream)),
            "streamWaitEvent": lambda stream, event: self._machine.event(event).hold(self._stream(stream)),
            "eventSynchronize": self.synchronize,
        }

    def malloc(self, size_bytes: int) -> int:
        with self._machine.lock:
            address = self._gpu().memory.allocate(size_bytes)
            self._machine.shared.add(address)
            return address

    def free(self, address: int) -> None:
        """Waits for the GPU, as cudaFree does."""
        with self._machine.lock:
            self._machine.settle()
            self._gpu().memory.free(address)
            self._machine.shared.remove(address)

    def open_memory(self, handle: bytes) -> int:
        address = int.from_bytes(handle, "little")
        with self._machine.lock:
            if address not in self._machine.shared:
                raise self._gone()
            self._opened[address] += 1
        return address

    def close_memory(self, address: int) -> None:
        with self._machine.lock:
            if not self._opened[address]:
                raise GpuFault(f"memory at {address:#x} is not open")
            self._opened[address] -= 1

    def create(self, flags: int) -> int:
        if flags not in (DISABLE_TIMING, DISABLE_TIMING | INTERPROCESS):
            raise GpuFault(f"an event with flags {flags} is slow, or cannot be shared")
        number = self._machine.know(FakeEvent(self._machine, self._gpu()))
        if flags & INTERPROCESS:
            self._shared.add(number)
        return number

    def event_handle(self, event: int) -> bytes:
        if event not in self._shared:
            raise self._gone()
        return _handle(event)

    def open_event(self, handle: bytes) -> int:
        event = self._machine.events.get(int.from_bytes(handle, "little"))
        if event is None:
            raise self._gone()
        return self._machine.know(event)

    def _stream(self, pointer: int) -> FakeStream:
        """The stream with this number. The null stream is the default stream of the current GPU."""
        return self._machine.stream(pointer) if pointer else self._gpu().default

    def synchronize(self, event: int) -> None:
        """Blocks until the event is done. Raises GpuFault after STUCK_SECONDS."""
        until = time.monotonic() + STUCK_SECONDS
        while not self._machine.event(event).done:
            if time.monotonic() > until:
                raise GpuFault("nothing moves before a mark that the host waits for")


def _handle(number: int) -> bytes:
    return number.to_bytes(HANDLE_BYTES, "little")
