"""A GPU through CuPy, which is imported only when a device is opened.

Written against CuPy 14 (`cupy.cuda.runtime.memcpyAsync`, `Stream`, `Event`, `alloc_pinned_memory`). Some of its behaviour needs
care. The null stream is 0 on every GPU, so its device must be current when it is used. On leaving, `with stream:`
does not restore a stream that the program made current by `use()`. `Event.done` is False for ever once the GPU has failed. A
thread that has used no GPU stands on the first one, and if it calls CUDA there, or `with Device(1):` takes it back there, CUDA
creates a context on that GPU: half a gigabyte of it, for every process of the host.

The caller's stream is CuPy's current one; where that is the null stream, CuPy's default, it is torch's current one.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from uuid import UUID

import numpy as np

from ferrorpc.arrays import capture_mode
from ferrorpc.arrays.cupy_event import CAPTURING, CupyEvent, translated
from ferrorpc.arrays.cupy_ipc import CupyIpc
from ferrorpc.arrays.device import DeviceArray, Event, Stream
from ferrorpc.arrays.staging import Staging
from ferrorpc.arrays.torch_cuda import current_of_torch
from ferrorpc.errors import BackendUnavailableError, UsageError
from ferrorpc.kernels.cuda.folds import Folds
from ferrorpc.kernels.cuda.launcher import DeviceKernels
from ferrorpc.shared_property import shared_property

INSTALL: Final = "pip install 'ferrorpc[gpu]' (CUDA 12) or 'ferrorpc[gpu-cuda13]' (CUDA 13)"
T = TypeVar("T")
_UUID_BYTES: Final = 16
_HIGHEST_PRIORITY: Final = -5
"""The highest of today's GPUs; CUDA clamps a priority to its range."""
_NULL_NUMBERS: Final = 1
"""Up to this number streams are null streams."""
_SHARED_NUMBERS: Final = 2
"""Up to this number streams are special: the null stream of every GPU, and the per-thread default stream."""
_MPS_ENABLED: Final = 133
"""cudaDevAttrMpsEnabled."""
EVENTS_LOOKED_AT: Final = 8
"""How many events that are in use are looked at before a new one is made."""
_AS_IT_IS: Final = nullcontext()
_MODULES: Final = sys.modules


class CupyStream:
    """One of CuPy's streams, on that GPU, which only a null stream needs to be current: its number is the same on all."""

    __slots__ = ("_device", "own", "pointer")

    def __init__(self, device: CupyDevice, stream: Any) -> None:
        self._device = device
        self.own = stream
        self.pointer = int(stream.ptr)

    def record(self) -> Event:
        """As `Stream.record`."""
        device = self._device
        event = device.event()
        try:
            if self.pointer > _SHARED_NUMBERS or device.current_index() == device.index:
                device.runtime.eventRecord(event.number, self.pointer)
            else:
                with device.here():
                    device.runtime.eventRecord(event.number, self.pointer)
        except device.runtime.CUDARuntimeError as failure:
            raise translated(failure) from None
        return event

    def wait(self, event: Any) -> None:
        """As `Stream.wait`, for a CupyEvent."""
        device = self._device
        try:
            if self.pointer > _SHARED_NUMBERS or device.current_index() == device.index:
                device.runtime.streamWaitEvent(self.pointer, event.number)
            else:
                with device.here():
                    device.runtime.streamWaitEvent(self.pointer, event.number)
        except device.runtime.CUDARuntimeError as failure:
            raise translated(failure) from None

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """A context in which it is the calling thread's current stream. Its GPU must be the current device."""
        before = self._device.cupy.cuda.get_current_stream()
        self.own.use()
        try:
            yield
        finally:
            before.use()


def _spare(things: deque[T], alone: int) -> T | None:
    """A thing to which nobody else refers, if one is among the first EVENTS_LOOKED_AT; these are moved to the end.

    Where several threads look at the same thing, the first one's reference makes the others pass it over.

    Args:
        alone: the reference count of a thing to which nobody else refers.
    """
    for _ in range(min(EVENTS_LOOKED_AT, len(things))):
        found = things.popleft()
        things.append(found)
        if sys.getrefcount(found) == alone:
            return found
    return None


_ALONE: Final = next(count for count in range(1, 9) if _spare(deque([object()]), count))
"""Differs among versions of Python, so it is measured."""


@dataclass(frozen=True, slots=True)
class _Foreign:
    """A CUDA stream made by another library, in the form that CuPy takes."""

    pointer: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


class CupyDevice:
    """One GPU. Threads may share it: every call that depends on the current device sets it for itself."""

    def __init__(self, cupy: Any, index: int) -> None:
        self.cupy = cupy
        self.runtime = cupy.cuda.runtime
        self._copy = self.runtime.memcpyAsync
        self.current_index = self.runtime.getDevice
        self._current_stream = cupy.cuda.get_current_stream
        self._per_thread = int(self.runtime.streamPerThread)
        self.index = index
        self._null_stream = CupyStream(self, cupy.cuda.Stream(null=True))
        self.uuid = _identity(self.runtime, index)
        self.events: deque[CupyEvent] = deque()
        """All events that were made: somewhat more than were ever in use at once."""
        self._adopted: dict[int, CupyStream] = {}
        """Streams of other libraries. CuPy's MemoryAsyncPool frees memory in another stream once the object is gone that was
        the current stream when it was allocated."""

    def here(self) -> Any:
        """A context in which it is the current device, and torch's stream is CuPy's current one where it is the caller's.

        Where nothing changes it is an empty context, because CuPy's costs more than most calls.
        """
        if "torch" in _MODULES:
            followed = current_of_torch(self.index)
            if followed and self.follows_torch():
                return self._following(followed)
        return _AS_IT_IS if self.current_index() == self.index else self._as_current_device()

    def _as_current_device(self) -> Any:
        """As `here`, whatever the streams are. A thread that has used no GPU stays on this one."""
        if self.is_current():
            return _AS_IT_IS
        if self.cupy.cuda.driver.ctxGetCurrent():
            return self.cupy.cuda.Device(self.index)
        self.make_current()
        return _AS_IT_IS

    def follows_torch(self) -> bool:
        """Whether the caller's stream is torch's, in a program that uses torch."""
        return not self._current_stream(self.index).ptr

    @contextmanager
    def _following(self, pointer: int) -> Iterator[None]:
        with self._as_current_device(), self.adopt(pointer).as_current():
            yield

    def event(self) -> CupyEvent:
        """An event to which nobody refers, for streams of this GPU.

        Creating and destroying an event costs more than recording it, so events are reused. Reference counts tell which are
        free, not finalizers: in a garbage cycle a finalizer may run before that of an object which still uses the event.
        """
        events = self.events
        if events:
            found = events.popleft()  # as `_spare` does, whose call would take as long
            events.append(found)
            if sys.getrefcount(found) == _ALONE:
                return found
            other = _spare(events, _ALONE)
            if other is not None:
                return other
        with self.here():
            number = self.runtime.eventCreateWithFlags(self.runtime.eventDisableTiming)
            made = CupyEvent(self.runtime, number, self.have_context)
        self.events.append(made)
        return made

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """As `Device.on`, for a CupyStream."""
        with self.here(), stream.as_current():
            yield

    @shared_property
    def kernels(self) -> DeviceKernels:
        """As `Device.kernels`."""
        with self.here():
            return DeviceKernels(self.cupy)

    @shared_property
    def folds(self) -> Folds:
        """As `Device.folds`."""
        with self.here():
            return Folds(self.cupy)

    @shared_property
    def ipc(self) -> CupyIpc:
        """As `Device.ipc`."""
        return CupyIpc(self.runtime)

    @shared_property
    def staging(self) -> Staging:
        """As `Device.staging`. One in a process, so that pinned memory is bounded."""
        return Staging(self)

    @property
    def count(self) -> int:
        """How many GPUs this process sees."""
        return int(self.runtime.getDeviceCount())

    @property
    def takes_turns(self) -> bool:
        """Whether processes that use it run one after the other, because MPS is off. False where CUDA does not tell."""
        try:
            return not self.runtime.deviceGetAttribute(_MPS_ENABLED, self.index)
        except self.runtime.CUDARuntimeError:
            return False

    def is_current(self) -> bool:
        """Whether it is the calling thread's current device. What every operation asks compares the numbers itself, because
        this call would take as long."""
        return bool(self.current_index() == self.index)

    def make_current(self) -> None:
        """As `Device.make_current`. Where it is the current one already, the program may still choose another."""
        if not self.is_current():
            self.cupy.cuda.Device(self.index).use()

    def enter_own_thread(self) -> None:
        """As `Device.enter_own_thread`."""
        self.cupy.cuda.Device(self.index).use()  # a thread without a context may have no mode
        capture_mode.exchange(capture_mode.RELAXED)

    def have_context(self) -> None:
        """Makes it the calling thread's device where that has used no GPU, so that CUDA creates no context on another."""
        if not self.cupy.cuda.driver.ctxGetCurrent():
            self.cupy.cuda.Device(self.index).use()

    @contextmanager
    def beside_captures(self) -> Iterator[None]:
        """As `Device.beside_captures`."""
        self.have_context()
        with self._as_current_device():
            before = capture_mode.exchange(capture_mode.RELAXED)
            try:
                yield
            finally:
                capture_mode.exchange(before)

    def holds(self, array: DeviceArray) -> bool:
        """As `Device.holds`."""
        return bool(array.device.id == self.index)

    def current(self) -> Stream:
        """As `Device.current`.

        Raises:
            UsageError: it is CUDA's per-thread default stream, which other threads cannot name; or a graph is captured from it.
        """
        with self.here():
            return self._current_here()

    def marked(self) -> tuple[Stream, Event]:
        """As `Device.marked`. Raises as `current`."""
        stream, event = self._current_here(), self.event()
        try:
            self.runtime.eventRecord(event.number, stream.pointer)
        except self.runtime.CUDARuntimeError as failure:
            raise translated(failure) from None
        return stream, event

    def _current_here(self) -> CupyStream:
        current = self._current_stream()
        if not current.ptr:
            return self._null_stream
        stream = CupyStream(self, current)
        if stream.pointer == self._per_thread:
            raise UsageError(
                "the current stream is CUDA's per-thread default stream, which other threads cannot wait for",
                hint="leave CUPY_CUDA_PER_THREAD_DEFAULT_STREAM away, or work in a cupy.cuda.Stream(non_blocking=True)",
            )
        if stream.pointer > _NULL_NUMBERS:
            self.check_not_captured(stream, "current")
        return stream

    def is_captured(self, stream: Stream) -> bool:
        """As `Device.is_captured`."""
        if stream.pointer <= _NULL_NUMBERS:
            return False
        try:
            return bool(self.runtime.streamIsCapturing(stream.pointer))
        except self.runtime.CUDARuntimeError as failure:
            if failure.status not in CAPTURING:
                raise translated(failure) from None
        except RuntimeError:  # CuPy's own: an error has ended the capture
            pass
        return True

    def check_not_captured(self, stream: Stream, which: str) -> None:
        """As `Device.check_not_captured`."""
        if self.is_captured(stream):
            raise UsageError(
                f"a CUDA graph is being captured from the {which} stream",
                hint="operations cannot be captured: begin them, and wait for them, before the capture or after it",
            )

    def new_stream(self) -> Stream:
        """As `Device.new_stream`."""
        with self.here():
            return CupyStream(self, self.cupy.cuda.Stream(non_blocking=True, priority=_HIGHEST_PRIORITY))

    def adopt(self, stream: Any) -> CupyStream:
        """As `Device.adopt`."""
        if not isinstance(stream, int):
            return CupyStream(self, stream)
        found = self._adopted.get(stream)
        if found is None:
            with self._as_current_device():  # which CuPy takes for the stream's
                foreign = self.cupy.cuda.Stream.from_external(_Foreign(stream))
            found = self._adopted.setdefault(stream, CupyStream(self, foreign))
        return found

    def empty(self, shape: Sequence[int], storage: np.dtype[Any], stream: Stream | None = None) -> DeviceArray:
        """As `Device.empty`."""
        if stream is not None:
            with self.on(stream):
                return self.cupy.empty(tuple(shape), storage)
        with self.here():
            return self.cupy.empty(tuple(shape), storage)

    def empty_each(self, shapes: Sequence[tuple[int, ...]], storage: np.dtype[Any]) -> list[DeviceArray]:
        """As `Device.empty_each`."""
        with self.here():
            return [self.cupy.empty(shape, storage) for shape in shapes]

    def over(
        self, address: int, shape: Sequence[int], storage: np.dtype[Any], strides: Sequence[int], owner: object
    ) -> DeviceArray:
        """An array over memory of this GPU that `owner` owns; the array keeps the owner alive.

        Args:
            strides: in bytes, none of them negative.
        """
        shape, cuda = tuple(shape), self.cupy.cuda
        if 0 in shape:
            return self.empty(shape, storage)
        extent = storage.itemsize + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
        memory = cuda.UnownedMemory(address, extent, owner, self.index)
        return self.cupy.ndarray(shape, storage, cuda.MemoryPointer(memory, 0), tuple(strides))

    def pointer(self, array: DeviceArray) -> int:
        """As `Device.pointer`."""
        return int(array.data.ptr)

    def copy(self, target: DeviceArray, source: DeviceArray, stream: Stream) -> None:
        """As `Device.copy`."""
        kind = self.runtime.memcpyDeviceToDevice
        self._transfer(target.data.ptr, source.data.ptr, source.nbytes, kind, stream)

    def upload(self, target: DeviceArray, source: np.ndarray[Any, Any], stream: Stream) -> None:
        """As `Device.upload`."""
        kind = self.runtime.memcpyHostToDevice
        self._transfer(target.data.ptr, source.ctypes.data, source.nbytes, kind, stream)

    def download(self, target: np.ndarray[Any, Any], source: DeviceArray, stream: Stream) -> None:
        """As `Device.download`."""
        kind = self.runtime.memcpyDeviceToHost
        self._transfer(target.ctypes.data, source.data.ptr, source.nbytes, kind, stream)

    def _transfer(self, target: int, source: int, size_bytes: int, kind: int, stream: Stream) -> None:
        if size_bytes:
            try:
                with self.here():
                    self._copy(target, source, size_bytes, kind, stream.pointer)
            except self.runtime.CUDARuntimeError as failure:
                raise translated(failure) from None

    def pinned(self, size_bytes: int) -> np.ndarray[Any, Any]:
        """As `Device.pinned`."""
        try:
            with self.beside_captures():
                memory = self.cupy.cuda.alloc_pinned_memory(size_bytes)
        except self.runtime.CUDARuntimeError as failure:
            problem = translated(failure)
            if problem is failure:
                what = f"no {size_bytes} bytes of the host's memory can be pinned for GPU {self.index}: {failure}"
                problem = BackendUnavailableError(what, "free memory on the host, or allow its container more")
            raise problem from None
        room: Any = (ctypes.c_uint8 * size_bytes).from_address(memory.ptr)
        room.owner = memory  # lives as long as any view of it
        return np.ctypeslib.as_array(room)


_devices: dict[tuple[Any, int], CupyDevice] = {}
_lock = threading.Lock()


def device_of(cupy: Any, index: int) -> CupyDevice:
    """The device with this number; the same object each time."""
    found = _devices.get((cupy, index))
    if found is None:
        with _lock:
            found = _devices.setdefault((cupy, index), CupyDevice(cupy, index))
    return found


def forget(cupy: Any) -> None:
    """Forgets the devices of a CuPy module, such as a stand-in for it whose test is over."""
    with _lock:
        for known in [known for known in _devices if known[0] is cupy]:
            del _devices[known]


def open_device(index: int | None = None) -> CupyDevice:
    """The GPU with this number, or CuPy's current one.

    Raises:
        BackendUnavailableError: there is no CuPy, or no GPU that it can use; the hint is the command that installs it.
    """
    try:
        cupy = importlib.import_module("cupy")
    except Exception as problem:  # noqa: BLE001  one that does not fit what is installed beside it may raise anything
        raise BackendUnavailableError(f"GPU arrays need CuPy, which cannot be imported: {problem}", INSTALL) from None
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as problem:  # noqa: BLE001  CuPy's own error class is not known before it is imported
        raise BackendUnavailableError(
            f"CuPy finds no GPU: {problem}", "start the process where a GPU and its driver are visible, or use backend='grpc'"
        ) from None
    chosen = int(cupy.cuda.Device().id) if index is None else index
    if not 0 <= chosen < count:
        raise BackendUnavailableError(
            f"there is no GPU {chosen}; CuPy sees {count}", "look at FERRORPC_DEVICE and CUDA_VISIBLE_DEVICES"
        )
    return device_of(cupy, chosen)


def _identity(runtime: Any, index: int) -> str:
    """A GPU's UUID as text, the same in every process. CuPy reads the 16 bytes as a C string, which ends before a zero byte; a
    shortened one is completed by the PCI bus id."""
    found = bytes(runtime.getDeviceProperties(index)["uuid"])[:_UUID_BYTES]
    if len(found) == _UUID_BYTES:
        return f"GPU-{UUID(bytes=found)}"
    return f"GPU-{found.hex()}-at-{runtime.deviceGetPCIBusId(index)}"
