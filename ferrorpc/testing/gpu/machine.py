"""Fake GPUs built on NumPy: memory, streams and events that behave like CUDA's where their users can tell.

What is modelled:

- Nothing runs when it is queued. Each query of an event advances every stream by one task, so buffers are read and written as
  late as possible.
- Freed memory is overwritten and invalid, in the order of the stream that it was allocated on. A task that accesses it later
  causes a fault, like an illegal address on a GPU. `Machine.faults` keeps the faults.
- Host memory that is not pinned is read when the copy is queued, as in CUDA.

Not modelled: time, and contention between the streams of a GPU.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np

Task: TypeAlias = Callable[[], bool]
"""Does its work and returns True, or returns False if it has to wait."""

ALIGNMENT_BYTES: Final = 256
FREED: Final = 0xCB
"""The byte that fills freed memory."""
UUID: Final = b"fake GPU\0\xff\xfe\xfd"
"""The first bytes of each UUID. One is zero, as in one of seventeen real UUIDs."""
STUCK_SECONDS: Final = 20.0
"""How long `FakeStream.synchronize` waits without progress of any stream before it raises."""


_MAPPINGS: Final = itertools.count(1 << 60, 1 << 40)
"""Addresses at which nothing is on the host: only a fake GPU knows them."""


class GpuFault(RuntimeError):
    """An error that would be fatal to the process on a real GPU."""


class Memory:
    """An allocator of one kind of memory: that of a GPU, or the host's pinned memory."""

    def __init__(self) -> None:
        self._blocks: dict[int, np.ndarray[Any, Any]] = {}
        self._starts: list[int] = []

    def allocate(self, size_bytes: int) -> int:
        """Allocates a block and returns its address."""
        room = np.full(size_bytes + 2 * ALIGNMENT_BYTES, FREED, np.uint8)
        skip = -room.ctypes.data % ALIGNMENT_BYTES
        block = room[skip : skip + max(size_bytes, 1)]
        return self._add(int(block.ctypes.data), block)

    def free(self, address: int) -> None:
        """Frees the block at an address and overwrites it."""
        self.block(address)[:] = FREED
        self.unmap(address)

    def block(self, address: int) -> np.ndarray[Any, Any]:
        """All of the block that begins at an address, as uint8."""
        return self._blocks[address]

    def map(self, block: np.ndarray[Any, Any]) -> int:
        """Maps a block of another process, at an address of its own. Returns that."""
        return self._add(next(_MAPPINGS), block)

    def _add(self, address: int, block: np.ndarray[Any, Any]) -> int:
        self._blocks[address] = block
        insort(self._starts, address)
        return address

    def unmap(self, address: int) -> None:
        """Ends a mapping, whose block stays as it is."""
        del self._blocks[address]
        self._starts.remove(address)

    def find(self, address: int, size_bytes: int) -> np.ndarray[Any, Any] | None:
        """`size_bytes` bytes at an address, as uint8; None unless all of them are in one block."""
        place = bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        start = self._starts[place]
        block = self._blocks[start]
        if address + size_bytes > start + block.size:
            return None
        return block[address - start : address - start + size_bytes]

    @property
    def live_blocks(self) -> int:
        """The number of allocated blocks."""
        return len(self._starts)


class FakeStream:
    """A queue of tasks. `pointer` is 0 for a GPU's default stream."""

    def __init__(self, gpu: Gpu, pointer: int) -> None:
        self.gpu = gpu
        self.pointer = pointer
        self.destroyed = False
        """A destroyed stream must not be used any more, but its queued tasks still run."""
        self.captured = False
        """Whether a CUDA graph is being captured from it, in CUDA's default mode, which forbids some calls to every thread."""
        self.capture_failed = False
        """Whether a thread that was not in relaxed mode has made such a call."""
        self.tasks: deque[Task] = deque()

    def enqueue(self, task: Task) -> None:
        """Queues a task. Raises GpuFault while a graph is being captured, which the task would become a part of."""
        if self.captured:
            raise GpuFault(f"stream {self.pointer:#x} was given work while a graph is being captured from it")
        with self.gpu.machine.lock:
            self.tasks.append(task)

    def synchronize(self) -> None:
        """Blocks until the queue is empty. Raises GpuFault after STUCK_SECONDS without progress."""
        machine = self.gpu.machine
        with machine.lock:
            while self.tasks:
                if not machine.step() and not machine.moved.wait(STUCK_SECONDS):
                    raise GpuFault(f"nothing moves on GPU {self.gpu.index}: {len(self.tasks)} tasks wait")


class _Mark:
    """A position in a stream, and whether the GPU has passed it."""

    __slots__ = ("passed",)

    def __init__(self) -> None:
        self.passed = False


class FakeEvent:
    """An event. As in CUDA, one that was never recorded is done, and a wait refers to the latest record at the time of the
    call, even if the event is recorded again later."""

    def __init__(self, machine: Machine, gpu: Gpu) -> None:
        self.gpu = gpu
        self._machine = machine
        self._latest: _Mark | None = None
        self.passed_at = 0.0
        """When the event last became done, in seconds of time.perf_counter. GPU time is not modelled."""

    def record(self, stream: FakeStream) -> None:
        """Records the event at the end of a stream's queue. Raises GpuFault for a stream of another GPU."""
        if stream.gpu is not self.gpu:
            raise GpuFault(f"an event of GPU {self.gpu.index} cannot mark a stream of GPU {stream.gpu.index}")
        with self._machine.lock:
            self._latest = mark = _Mark()

            def passed() -> bool:
                mark.passed = True
                self.passed_at = time.perf_counter()
                return True

            stream.enqueue(passed)

    def hold(self, stream: FakeStream) -> None:
        """Makes tasks that are queued in `stream` from now on wait for the latest record of the event."""
        with self._machine.lock:
            mark = self._latest
            if mark is not None and not mark.passed:
                stream.enqueue(lambda: mark.passed)

    @property
    def done(self) -> bool:
        """Whether the latest record was passed. The query advances every stream."""
        with self._machine.lock:
            if self._latest is not None and not self._latest.passed:
                self._machine.step()
            return self._latest is None or self._latest.passed


class Gpu:
    """One GPU."""

    def __init__(self, machine: Machine, index: int, uuid: bytes) -> None:
        self.machine = machine
        self.index = index
        self.uuid = uuid
        self.memory = Memory()
        self.has_context = False
        """Whether a context was created on it, which takes memory of a real one."""
        self.streams: dict[int, FakeStream] = {}
        self.default = self.new_stream(pointer=0)

    def new_stream(self, pointer: int | None = None) -> FakeStream:
        """A new stream. Its number is unique on the machine, except that every default stream has number 0."""
        with self.machine.lock:
            number = self.machine.next_pointer() if pointer is None else pointer
            stream = self.streams[number] = FakeStream(self, number)
            return stream

    def stream(self, pointer: int) -> FakeStream:
        """The stream with this number. Raises GpuFault if it was destroyed."""
        found = self.streams[pointer]
        if found.destroyed:
            raise GpuFault(f"stream {pointer:#x} of GPU {self.index} was destroyed")
        return found

    def bytes_at(self, address: int, size_bytes: int) -> np.ndarray[Any, Any]:
        """A view of its memory at an address, as uint8. Raises GpuFault for an illegal address."""
        found = self.memory.find(address, size_bytes) if size_bytes else np.empty(0, np.uint8)
        if found is None:
            raise GpuFault(f"illegal address on GPU {self.index}: {size_bytes} bytes at {address:#x} are not allocated")
        return found


class Machine:
    """The GPUs of one host, and the host's pinned memory.

    Attributes:
        gpus: by number.
        faults: exceptions raised in tasks. A test that ends with any has found a bug.
        copying: called when a copy between pinned memory and a GPU is next in its stream, with "down" or "up", the number of
            the GPU and the size in bytes. If it returns False, the copy is postponed until its stream advances again. Tests use
            it to control the order of copies.
    """

    def __init__(self, count: int = 1) -> None:
        self.lock = threading.RLock()
        self.moved = threading.Condition(self.lock)
        self.pinned = Memory()
        self.shared: dict[int, Gpu] = {}
        """GPU memory that other processes may open: its address for its owner, and its GPU."""
        self.faults: list[Exception] = []
        self.copying: Callable[[str, int, int], bool] = lambda direction, gpu, size_bytes: True
        self.events: dict[int, FakeEvent] = {}
        """The events that exist, by their number, which stands for CUDA's handle."""
        self.failure = 0
        """The CUDA error, such as 700, that a failed GPU answers to nearly every call; 0 before."""
        self._pointers = 0x5000
        self.gpus = [Gpu(self, index, UUID + index.to_bytes(4, "big")) for index in range(count)]

    def stream(self, pointer: int) -> FakeStream:
        """The stream with this number, which must not be 0, of any GPU."""
        return next(gpu.stream(pointer) for gpu in self.gpus if pointer in gpu.streams)

    def know(self, event: FakeEvent) -> int:
        """Registers an event and returns its number."""
        with self.lock:
            number = self.next_pointer()
            self.events[number] = event
            return number

    def event(self, number: int) -> FakeEvent:
        """The event with this number. Raises GpuFault if it was destroyed."""
        found = self.events.get(number)
        if found is None:
            raise GpuFault(f"event {number:#x} was destroyed, or never was")
        return found

    def next_pointer(self) -> int:
        """A new number for a stream or an event."""
        self._pointers += 0x10
        return self._pointers

    def step(self) -> bool:
        """Advances every stream by one task. Returns whether any stream made progress."""
        with self.lock:
            moved = False
            for gpu in self.gpus:
                for stream in list(gpu.streams.values()):
                    moved = self._advance(stream) or moved
            if moved:
                self.moved.notify_all()
            return moved

    def _advance(self, stream: FakeStream) -> bool:
        if not stream.tasks:
            return False
        try:
            if not stream.tasks[0]():
                return False
        except Exception as fault:  # noqa: BLE001  the stream goes on as if the kernel had ended; the test sees the fault
            self.faults.append(fault)
        stream.tasks.popleft()
        return True

    def settle(self) -> None:
        """Advances all streams until none makes progress."""
        while self.step():
            pass

    def copy_in(self, gpu: Gpu, target: int, source: int, size_bytes: int, stream: FakeStream) -> None:
        """Queues a copy from the host to a device."""
        with self.lock:
            is_pinned = self.pinned.find(source, size_bytes) is not None
            early = None if is_pinned else host_bytes(source, size_bytes).copy()

            def run() -> bool:
                if early is None and not self.copying("up", gpu.index, size_bytes):
                    return False
                gpu.bytes_at(target, size_bytes)[:] = self._pinned_at(source, size_bytes) if early is None else early
                return True

            stream.enqueue(run)

    def copy_out(self, gpu: Gpu, target: int, source: int, size_bytes: int, stream: FakeStream) -> None:
        """Queues a copy from a device to the host. If the target is not pinned, the call waits for the copy, as in CUDA."""
        with self.lock:
            is_pinned = self.pinned.find(target, size_bytes) is not None

            def run() -> bool:
                if is_pinned and not self.copying("down", gpu.index, size_bytes):
                    return False
                there = self._pinned_at(target, size_bytes) if is_pinned else host_bytes(target, size_bytes)
                there[:] = gpu.bytes_at(source, size_bytes)
                return True

            stream.enqueue(run)
        if not is_pinned:
            stream.synchronize()

    def copy_on(self, gpu: Gpu, target: int, source: int, size_bytes: int, stream: FakeStream) -> None:
        """Queues a copy within a device."""

        def run() -> bool:
            gpu.bytes_at(target, size_bytes)[:] = gpu.bytes_at(source, size_bytes).copy()
            return True

        stream.enqueue(run)

    def _pinned_at(self, address: int, size_bytes: int) -> np.ndarray[Any, Any]:
        found = self.pinned.find(address, size_bytes)
        if found is None:
            raise GpuFault(f"{size_bytes} bytes at {address:#x} are pinned no longer, and a copy still needed them")
        return found


def host_bytes(address: int, size_bytes: int) -> np.ndarray[Any, Any]:
    """A view of this process's memory at an address, as uint8."""
    if not size_bytes:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))
