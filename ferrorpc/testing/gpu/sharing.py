"""What `cupy.cuda.runtime` has for memory and events that processes share, over fake GPUs.

Every rank of a test is a thread of one process, and may say that it is a process of its own: then it opens by handles what
others have made, as it would have to. What was opened lies where its owner has it.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from ferrorpc.testing.gpu.machine import STUCK_SECONDS, FakeEvent, Gpu, GpuFault, Machine

HANDLE_BYTES: Final = 64
DISABLE_TIMING, INTERPROCESS = 2, 4


class Sharing:
    """Of all threads of a process.

    Args:
        gpu: says which GPU is the calling thread's.
        gone: what the runtime raises for a handle whose memory or event is not there any more.
    """

    def __init__(self, machine: Machine, gpu: Callable[[], Gpu], gone: Callable[[], Exception]) -> None:
        self._machine = machine
        self._gpu = gpu
        self._gone = gone
        self._events: dict[int, FakeEvent] = {}
        self._numbers = itertools.count(0x7000)
        self._opened: Counter[int] = Counter()

    def functions(self) -> dict[str, Any]:
        """The runtime's, by name."""
        return {
            "malloc": self.malloc,
            "free": self.free,
            "ipcGetMemHandle": _handle,
            "ipcOpenMemHandle": self.open_memory,
            "ipcCloseMemHandle": self.close_memory,
            "eventDisableTiming": DISABLE_TIMING,
            "eventInterprocess": INTERPROCESS,
            "eventCreateWithFlags": self.create,
            "eventDestroy": self._events.pop,
            "ipcGetEventHandle": _handle,
            "ipcOpenEventHandle": self.open_event,
            "eventRecord": lambda event, stream: self._events[event].record(self._gpu().stream(stream)),
            "streamWaitEvent": lambda stream, event: self._events[event].hold(self._gpu().stream(stream)),
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
        if address not in self._machine.shared:
            raise self._gone()
        self._opened[address] += 1
        return address

    def close_memory(self, address: int) -> None:
        if not self._opened[address]:
            raise GpuFault(f"memory at {address:#x} is not open")
        self._opened[address] -= 1

    def create(self, flags: int) -> int:
        if flags != DISABLE_TIMING | INTERPROCESS:
            raise GpuFault(f"an event with flags {flags} cannot be shared")
        return self._known(FakeEvent(self._machine))

    def open_event(self, handle: bytes) -> int:
        event = self._events.get(int.from_bytes(handle, "little"))
        if event is None:
            raise self._gone()
        return self._known(event)

    def _known(self, event: FakeEvent) -> int:
        number = next(self._numbers)
        self._events[number] = event
        return number

    def synchronize(self, event: int) -> None:
        """Blocks until the mark is passed. Raises GpuFault when it is not for long."""
        until = time.monotonic() + STUCK_SECONDS
        while not self._events[event].done:
            if time.monotonic() > until:
                raise GpuFault("nothing moves before a mark that the host waits for")


def _handle(number: int) -> bytes:
    return number.to_bytes(HANDLE_BYTES, "little")
