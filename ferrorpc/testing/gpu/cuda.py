"""`cupy.cuda` on fake GPUs: devices, streams, events and runtime calls that behave like CuPy's.

It reproduces these less obvious behaviours:

- The null stream, number 0, belongs to the device that is current when it is used.
- Leaving `with stream:` restores the stream of the enclosing `with`, never one that `use()` made current.
- A stream is destroyed with its object.
- An event is not done if the GPU has failed. All but the calls that give something back then answer with that failure.
- A UUID is cut before its first zero byte, like a C string.
- While a graph is captured, a thread that is not in relaxed mode may not query or wait for an event, allocate or free memory
  outside of pools, or pin any: the call fails, and so does the capture.
- A thread begins on GPU 0. A context is created on the current GPU by whatever sets it, creates or queries something there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final, Self, TypeVar

from ferrorpc.arrays.capture_mode import RELAXED
from ferrorpc.testing.gpu.ipc import FakeIpc
from ferrorpc.testing.gpu.machine import FakeEvent, FakeStream, Gpu, Machine

T = TypeVar("T")
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
NOT_READY: Final = 600
INVALID_HANDLE: Final = 400
INVALID_DEVICE: Final = 101
CAPTURE_UNSUPPORTED: Final = 900
FORBIDDEN: Final = ("malloc", "free", "eventSynchronize", "ipcOpenMemHandle", "ipcCloseMemHandle")
"""What threads that are not in relaxed mode may not call while a graph is captured."""
FREEING: Final = ("free", "eventDestroy", "ipcCloseMemHandle")
"""What gives something back, also after the GPU has failed."""
PER_THREAD: Final = 2
"""The number of the per-thread default stream."""


class _Thread(threading.local):
    """The per-thread state: of CUDA, the current device; of CuPy, the current stream of each device."""

    def __init__(self) -> None:
        self.device = 0
        self.has_context = False
        self.capture_mode = 0
        self.devices: list[int] = []
        """The device to restore at the end of each open `with device:`."""
        self.current: dict[int, _Stream] = {}
        self.inside: list[tuple[int, _Stream]] = []
        """The device and stream of each open `with stream:`."""


class Driver:
    """A machine's GPUs as the threads of a process use them: each thread has a current device and current streams."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.thread = _Thread()

    @property
    def gpu(self) -> Gpu:
        """The calling thread's current device, for what is asked for there."""
        self.set_device(self.thread.device)
        return self.machine.gpus[self.thread.device]

    @property
    def stream(self) -> FakeStream:
        """The calling thread's current stream."""
        current = self.thread.current.get(self.thread.device)
        return self.gpu.default if current is None else current.fake

    def check(self) -> None:
        """Raises the error of a GPU that has failed, which nearly every call of CUDA returns from then on."""
        if self.machine.failure:
            raise CUDARuntimeError(self.machine.failure)

    def set_device(self, device: int) -> None:
        """As cudaSetDevice. Creates a context, as everything does that is asked for on the current device."""
        self.thread.device, self.thread.has_context = device, True
        self.machine.gpus[device].has_context = True

    def context(self) -> int:
        """As cuCtxGetCurrent: 0 where the calling thread has no context."""
        return self.thread.device + 1 if self.thread.has_context else 0

    def current(self, device: int) -> int:
        """The number of a device; -1 means the calling thread's current device."""
        return self.thread.device if device < 0 else device

    def exchange_capture_mode(self, mode: int) -> int:
        """As cuThreadExchangeStreamCaptureMode."""
        before, self.thread.capture_mode = self.thread.capture_mode, mode
        return before

    def query(self, event: int) -> int:
        """The status of an event, or the error of the machine if a GPU has failed."""
        self.set_device(self.thread.device)
        if self.machine.failure:
            return self.machine.failure
        if self.breaks_captures():
            return CAPTURE_UNSUPPORTED
        return 0 if self.machine.event(event).done else NOT_READY

    def breaks_captures(self) -> bool:
        """Whether a call that captures forbid has failed, and the captures with it."""
        if self.thread.capture_mode == RELAXED:
            return False
        captured = [stream for gpu in self.machine.gpus for stream in list(gpu.streams.values()) if stream.captured]
        for stream in captured:
            stream.capture_failed = True
        return bool(captured)

    def unless_captured(self, call: Callable[..., T]) -> Callable[..., T]:
        """A call that captures forbid."""

        def checked(*arguments: Any) -> T:
            if self.breaks_captures():
                raise CUDARuntimeError(CAPTURE_UNSUPPORTED)
            return call(*arguments)

        return checked

    def unless_failed(self, call: Callable[..., T]) -> Callable[..., T]:
        """A call that a GPU that has failed refuses."""

        def checked(*arguments: Any) -> T:
            self.check()
            return call(*arguments)

        return checked


class Pinned:
    """Pinned host memory: `cupy.cuda.PinnedMemoryPointer`."""

    def __init__(self, machine: Machine, size_bytes: int) -> None:
        self._machine = machine
        self.size = size_bytes
        with machine.lock:
            self.ptr = machine.pinned.allocate(size_bytes)

    def __del__(self) -> None:
        with self._machine.lock:
            self._machine.pinned.free(self.ptr)


class _Unowned:
    """`cupy.cuda.UnownedMemory`: GPU memory that another object owns. It keeps that object alive."""

    driver: Driver

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.gpu = self.driver.machine.gpus[self.driver.current(device_id)]
        self.ptr = ptr
        self._owner = owner


class MemoryPointer:
    """`cupy.cuda.MemoryPointer`: an address in a block of memory, which it keeps alive."""

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem = mem
        self.ptr = mem.ptr + offset
        self.device_id = mem.gpu.index

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)


class _Device:
    """`cupy.cuda.Device`."""

    driver: Driver

    def __init__(self, device: int | None = None) -> None:
        self.id = self.driver.thread.device if device is None else device

    def use(self) -> None:
        if not 0 <= self.id < len(self.driver.machine.gpus):
            raise CUDARuntimeError(INVALID_DEVICE)
        self.driver.check()
        self.driver.set_device(self.id)

    def __enter__(self) -> Self:
        self.driver.thread.devices.append(self.driver.thread.device)
        self.use()
        return self

    def __exit__(self, *error: object) -> None:
        self.driver.set_device(self.driver.thread.devices.pop())


class _Event:
    """`cupy.cuda.Event`."""

    driver: Driver
    ptr = 0

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        """`block` and `interprocess` change nothing."""
        self.driver.check()
        self.fake = FakeEvent(self.driver.machine, self.driver.gpu)
        self.ptr = self.driver.machine.know(self.fake)
        self.timing = not disable_timing

    def __del__(self) -> None:
        """Destroys the event, as in CuPy. In a reference cycle this may run before the finalizers of objects that use it."""
        self.driver.machine.events.pop(self.ptr, None)

    @property
    def done(self) -> bool:
        return bool(self.driver.query(self.ptr) == 0)

    def record(self, stream: _Stream | None = None) -> None:
        self.driver.machine.event(self.ptr).record(self.driver.stream if stream is None else stream.fake)


class _Stream:
    """`cupy.cuda.Stream`."""

    driver: Driver

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None) -> None:
        """`non_blocking` and `priority` change nothing: neither waits for the null stream nor contention is modelled."""
        self._own = None
        if null or ptds:
            self.device_id = -1
            self.ptr = PER_THREAD if ptds else 0
        else:
            self.driver.check()
            self._own = self.driver.gpu.new_stream()
            self.device_id = self.driver.thread.device
            self.ptr = self._own.pointer

    def __del__(self) -> None:
        """Destroys the stream, as in CuPy. In a reference cycle this may run before the finalizers of objects that use it."""
        if self._own is not None:
            self._own.destroyed = True

    @classmethod
    def from_external(cls, obj: Any) -> _Stream:
        """A stream that another library has created, from an object with `__cuda_stream__`."""
        found = cls(null=True)
        _, found.ptr = obj.__cuda_stream__()
        found.device_id = cls.driver.thread.device
        return found

    @property
    def fake(self) -> FakeStream:
        """The fake stream. For the null stream it is the default stream of the current device."""
        return self.driver.gpu.default if self.ptr == 0 else self.driver.machine.stream(self.ptr)

    def wait_event(self, event: _Event) -> None:
        event.fake.hold(self.fake)

    def synchronize(self) -> None:
        self.fake.synchronize()

    def _on_device(self) -> int:
        """The current device. Raises RuntimeError if the stream is known to belong to another."""
        device = self.driver.thread.device
        if self.device_id not in (-1, device):
            raise RuntimeError(f"the stream is GPU {self.device_id}'s, but GPU {device} is current")
        return device

    def use(self) -> Self:
        self.driver.thread.current[self._on_device()] = self
        return self

    def __enter__(self) -> Self:
        self.driver.thread.inside.append((self._on_device(), self))
        return self.use()

    def __exit__(self, *error: object) -> None:
        device, _ = self.driver.thread.inside.pop()
        around = [stream for other, stream in self.driver.thread.inside if other == device]
        self.driver.thread.current[device] = around[-1] if around else type(self)(null=True)


class CUDARuntimeError(RuntimeError):
    """`cupy.cuda.runtime.CUDARuntimeError`."""

    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")
        self.status = status


class CUDADriverError(RuntimeError):
    """`cupy.cuda.driver.CUDADriverError`, which launches of kernels raise."""

    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA error {status}")
        self.status = status


def cuda(driver: Driver) -> SimpleNamespace:
    """`cupy.cuda` on these GPUs."""
    own: dict[str, Any] = {"driver": driver}
    stream = type("Stream", (_Stream,), own)
    classes = {
        "Device": type("Device", (_Device,), own),
        "Event": type("Event", (_Event,), own),
        "Stream": stream,
    }
    return SimpleNamespace(
        **classes,
        get_current_stream=lambda device=-1: driver.thread.current.get(driver.current(device)) or stream(null=True),
        UnownedMemory=type("UnownedMemory", (_Unowned,), own),
        MemoryPointer=MemoryPointer,
        get_elapsed_time=_elapsed,
        alloc_pinned_memory=driver.unless_failed(driver.unless_captured(lambda size_bytes: Pinned(driver.machine, size_bytes))),
        runtime=_runtime(driver),
        driver=SimpleNamespace(ctxGetCurrent=driver.context, CUDADriverError=CUDADriverError),
    )


def _elapsed(start: _Event, end: _Event) -> float:
    """Milliseconds between two events, which must have been created with timing and be done."""
    if not (start.timing and end.timing):
        raise CUDARuntimeError(INVALID_HANDLE)
    if not (start.done and end.done):
        raise CUDARuntimeError(NOT_READY)
    return (end.fake.passed_at - start.fake.passed_at) * 1e3


def _runtime(driver: Driver) -> SimpleNamespace:
    """`cupy.cuda.runtime`."""
    machine = driver.machine

    def memcpy_async(target: int, source: int, size_bytes: int, kind: int, stream: int) -> None:
        gpu = driver.gpu
        copy = {
            HOST_TO_DEVICE: machine.copy_in,
            DEVICE_TO_HOST: machine.copy_out,
            DEVICE_TO_DEVICE: machine.copy_on,
        }[kind]
        copy(gpu, target, source, size_bytes, gpu.stream(stream))

    def check_status(status: int) -> None:
        if status:
            raise CUDARuntimeError(status)

    shared = FakeIpc(machine, lambda: driver.gpu, lambda: CUDARuntimeError(INVALID_HANDLE))
    functions = {name: getattr(shared, name) for name in dir(shared) if not name.startswith("_")}
    functions |= {name: driver.unless_captured(functions[name]) for name in FORBIDDEN}
    refused = [name for name in functions if callable(functions[name]) and name not in FREEING]
    functions |= {name: driver.unless_failed(functions[name]) for name in refused}
    return SimpleNamespace(
        memcpyAsync=driver.unless_failed(memcpy_async),
        memcpyHostToDevice=HOST_TO_DEVICE,
        memcpyDeviceToHost=DEVICE_TO_HOST,
        memcpyDeviceToDevice=DEVICE_TO_DEVICE,
        streamPerThread=PER_THREAD,
        CUDARuntimeError=CUDARuntimeError,
        check_status=check_status,
        eventQuery=driver.query,
        streamIsCapturing=driver.unless_failed(lambda stream: machine.stream(stream).captured),
        getDevice=lambda: driver.thread.device,
        getDeviceCount=lambda: len(machine.gpus),
        getDeviceProperties=lambda index: {"name": b"fake", "uuid": machine.gpus[index].uuid.split(b"\0")[0]},
        deviceGetPCIBusId=lambda index: _bus(machine.gpus[index]),
        deviceGetAttribute=lambda attribute, index: 0,
        **functions,
    )


def _bus(gpu: Gpu) -> str:
    return f"0000:{0x17 + gpu.index:02X}:00.0"
