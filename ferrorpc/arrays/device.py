"""A GPU: memory, streams, events, copies. The rest of the library uses GPUs only through it.

Nothing here blocks the host: a stream is a queue that the GPU works off in order, an event is a mark in it, and `Event.done`
tells whether the GPU has reached that. Arrays are CuPy's, of any number of dimensions, always C-contiguous and in storage
dtypes (bfloat16 as uint16).

Written against CuPy 14 (`cupy.cuda.runtime.memcpyAsync`, `Stream`, `Event`, `alloc_pinned_memory`). Some of its behaviour needs
care. The null stream is 0 on every GPU, so its device must be current when it is used. On leaving, `with stream:` does not
restore a stream that the program made current by `use()`. `Event.done` is False for ever once the GPU has failed. A thread that
has used no GPU stands on the first one, and if it calls CUDA there, or `with Device(1):` takes it back there, CUDA creates a
context on that GPU: half a gigabyte of it, for every process of the host.

The caller's stream is CuPy's current one; where that is the null stream, CuPy's default, it is torch's current one.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar
from uuid import UUID

import numpy as np

from ferrorpc.arrays import capture_mode
from ferrorpc.arrays.cupy_ipc import CupyIpc
from ferrorpc.arrays.event import CAPTURING, Event, translated
from ferrorpc.arrays.torch_cuda import current_of_torch
from ferrorpc.errors import BackendUnavailableError, UsageError
from ferrorpc.kernels.cuda.folds import Folds
from ferrorpc.kernels.cuda.launcher import DeviceKernels
from ferrorpc.shared_property import shared_property

DeviceArray: TypeAlias = Any
"""An array in a GPU's memory."""
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


class Stream:
    """A queue of work on one GPU: one of CuPy's streams. Only a null stream needs its GPU to be current, as its number is the
    same on all.

    Attributes:
        pointer: the CUDA stream, for libraries that take one.
    """

    __slots__ = ("_device", "own", "pointer")

    def __init__(self, device: Device, stream: Any) -> None:
        self._device = device
        self.own = stream
        self.pointer = int(stream.ptr)

    def record(self) -> Event:
        """Records a new event behind everything that is in the queue now."""
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

    def wait(self, event: Event) -> None:
        """Makes work queued from now on wait for the event, which may be in another stream. The host does not wait."""
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
        try:
            found = things.popleft()
        except IndexError:  # other threads look at the last ones
            break
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


class Device:
    """One GPU, as one process uses it. Threads may share it: every call that depends on the current device sets it for itself.

    Args:
        cupy: the module.
        index: its number in this process.
        make_staging: makes `staging` when that is first asked for.

    Attributes:
        uuid: identifies the GPU, alike in every process of every container on the host.
    """

    def __init__(self, cupy: Any, index: int, make_staging: Callable[[Device], Any]) -> None:
        self.cupy = cupy
        self._make_staging = make_staging
        self.runtime = cupy.cuda.runtime
        self._copy = self.runtime.memcpyAsync
        self.current_index = self.runtime.getDevice
        self._current_stream = cupy.cuda.get_current_stream
        self._per_thread = int(self.runtime.streamPerThread)
        self.index = index
        self._null_stream = Stream(self, cupy.cuda.Stream(null=True))
        self.uuid = _identity(self.runtime, index)
        self.events: deque[Event] = deque()
        """All events that were made: somewhat more than were ever in use at once."""
        self._adopted: dict[int, Stream] = {}
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
        if self.current_index() == self.index:
            return _AS_IT_IS
        if self.cupy.cuda.driver.ctxGetCurrent():
            return self.cupy.cuda.Device(self.index)
        self._use()
        return _AS_IT_IS

    def follows_torch(self) -> bool:
        """Whether the caller's stream is torch's, in a program that uses torch."""
        return not self._current_stream(self.index).ptr

    @contextmanager
    def _following(self, pointer: int) -> Iterator[None]:
        with self._as_current_device(), self.adopt(pointer).as_current():
            yield

    def event(self) -> Event:
        """An event to which nobody refers, for streams of this GPU.

        Creating and destroying an event costs more than recording it, so events are reused. Reference counts tell which are
        free, not finalizers: in a garbage cycle a finalizer may run before that of an object which still uses the event.
        """
        events = self.events
        try:
            found = events.popleft()  # as `_spare` does, whose call would take as long
        except IndexError:  # there is none, or other threads look at them
            other = None
        else:
            events.append(found)
            if sys.getrefcount(found) == _ALONE:
                return found
            other = _spare(events, _ALONE)
        if other is not None:
            return other
        with self._telling(), self.here():
            number = self.runtime.eventCreateWithFlags(self.runtime.eventDisableTiming)
        made = Event(self.runtime, number, self.have_context)
        self.events.append(made)
        return made

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """A context in which it is the calling thread's current device, and the stream its current one."""
        with self.here(), stream.as_current():
            yield

    @shared_property
    def kernels(self) -> DeviceKernels:
        """The library's CUDA kernels, compiled when first asked for."""
        with self.here():
            return DeviceKernels(self.cupy)

    @shared_property
    def folds(self) -> Folds:
        """The reduction kernels for memory that ranks share, compiled when first asked for."""
        with self.here():
            return Folds(self.cupy)

    @shared_property
    def ipc(self) -> CupyIpc:
        """Memory and events that processes share (CUDA IPC). To be used where the device is the current one."""
        return CupyIpc(self.runtime)

    @shared_property
    def staging(self) -> Any:
        """Copies to host memory and back (staging.Staging). One in a process, so that pinned memory is bounded."""
        return self._make_staging(self)

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

    def make_current(self) -> None:
        """Makes it the calling thread's current device. Where it is that already, the program may still choose another."""
        if self.current_index() != self.index:
            self._use()

    def _use(self) -> None:
        with self._telling():
            self.cupy.cuda.Device(self.index).use()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """A context that tells whether the GPU has failed (`translated`). The calls of each operation do so themselves, which
        costs less."""
        try:
            yield
        except self.runtime.CUDARuntimeError as failure:
            raise translated(failure) from None

    def enter_own_thread(self) -> None:
        """As `make_current`, for a thread of the library's own, whose calls then leave alone the CUDA graphs that other threads
        capture (`capture_mode`)."""
        self._use()  # a thread without a context may have no mode
        capture_mode.exchange(capture_mode.RELAXED)

    def have_context(self) -> None:
        """Makes it the calling thread's device where that has used no GPU, so that CUDA creates no context on another."""
        if not self.cupy.cuda.driver.ctxGetCurrent():
            self._use()

    @contextmanager
    def beside_captures(self) -> Iterator[None]:
        """A context for any thread, in which it is the current device, and pinning memory, as other calls, leaves captures
        alone, also those of the calling thread (`capture_mode`)."""
        self.have_context()
        with self._as_current_device():
            before = capture_mode.exchange(capture_mode.RELAXED)
            try:
                yield
            finally:
                capture_mode.exchange(before)

    def holds(self, array: DeviceArray) -> bool:
        """Whether an array is in its memory."""
        return bool(array.device.id == self.index)

    def current(self) -> Stream:
        """The calling thread's current stream.

        Raises:
            UsageError: it is CUDA's per-thread default stream, which other threads cannot name; or a graph is captured from it.
        """
        with self.here():
            return self._current_here()

    def is_callers(self, stream: Stream) -> bool:
        """Whether it is the calling thread's current stream; False for CUDA's per-thread default stream."""
        return bool((self._current_stream(self.index).ptr or current_of_torch(self.index)) == stream.pointer)

    def marked(self) -> tuple[Stream, Event]:
        """The current stream, and an event recorded in it now. To be used where the device is current (`here`). Raises as
        `current`."""
        stream, event = self._current_here(), self.event()
        try:
            self.runtime.eventRecord(event.number, stream.pointer)
        except self.runtime.CUDARuntimeError as failure:
            raise translated(failure) from None
        return stream, event

    def _current_here(self) -> Stream:
        current = self._current_stream()
        if not current.ptr:
            return self._null_stream
        stream = Stream(self, current)
        if stream.pointer == self._per_thread:
            raise UsageError(
                "the current stream is CUDA's per-thread default stream, which other threads cannot wait for",
                hint="leave CUPY_CUDA_PER_THREAD_DEFAULT_STREAM away, or work in a cupy.cuda.Stream(non_blocking=True)",
            )
        if stream.pointer > _NULL_NUMBERS:
            self.check_not_captured(stream, "current")
        return stream

    def is_captured(self, stream: Stream) -> bool:
        """Whether a CUDA graph is being captured from a stream. Null streams cannot be.

        Raises:
            BackendUnavailableError: the GPU has failed.
        """
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
        """Raises UsageError if a CUDA graph is being captured from a stream.

        Args:
            which: says in the error which stream it is.
        """
        if self.is_captured(stream):
            raise UsageError(
                f"a CUDA graph is being captured from the {which} stream",
                hint="operations cannot be captured: begin them, and wait for them, before the capture or after it",
            )

    def new_stream(self) -> Stream:
        """A stream of its own, of the highest priority, that does not wait for the legacy default stream."""
        with self._telling(), self.here():
            return Stream(self, self.cupy.cuda.Stream(non_blocking=True, priority=_HIGHEST_PRIORITY))

    def adopt(self, stream: Any) -> Stream:
        """Wraps a stream that a caller has made: one of the device's library, or a CUDA stream as a number."""
        if not isinstance(stream, int):
            return Stream(self, stream)
        found = self._adopted.get(stream)
        if found is None:
            with self._as_current_device():  # which CuPy takes for the stream's
                foreign = self.cupy.cuda.Stream.from_external(_Foreign(stream))
            found = self._adopted.setdefault(stream, Stream(self, foreign))
        return found

    def empty(self, shape: Sequence[int], storage: np.dtype[Any], stream: Stream | None = None) -> DeviceArray:
        """A new array, its contents undefined, whose memory belongs to that stream; None for the current one.

        Work that the stream holds may still use the memory. When the array is deleted, work queued in that stream later may
        get it.
        """
        if stream is not None:
            with self.on(stream):
                return self.cupy.empty(tuple(shape), storage)
        with self.here():
            return self.cupy.empty(tuple(shape), storage)

    def empty_each(self, shapes: Sequence[tuple[int, ...]], storage: np.dtype[Any]) -> list[DeviceArray]:
        """As `empty` in the current stream, an array for each shape."""
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
        """Its address."""
        return int(array.data.ptr)

    def copy(self, target: DeviceArray, source: DeviceArray, stream: Stream) -> None:
        """target[:] = source, on the device, in that stream. Both are C-contiguous and of equal size in bytes."""
        kind = self.runtime.memcpyDeviceToDevice
        self._transfer(target.data.ptr, source.data.ptr, source.nbytes, kind, stream)

    def upload(self, target: DeviceArray, source: np.ndarray[Any, Any], stream: Stream) -> None:
        """target[:] = source, in that stream. Pinned memory must not change before the GPU has finished the copy."""
        kind = self.runtime.memcpyHostToDevice
        self._transfer(target.data.ptr, source.ctypes.data, source.nbytes, kind, stream)

    def download(self, target: np.ndarray[Any, Any], source: DeviceArray, stream: Stream) -> None:
        """target[:] = source, in that stream. Into pinned memory the host does not wait."""
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
        """New host memory that the GPU reads and writes by DMA, as uint8. It stays pinned while it is referenced.

        Raises:
            BackendUnavailableError: the host has no memory for it, or the GPU has failed.
        """
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


def _identity(runtime: Any, index: int) -> str:
    """A GPU's UUID as text, the same in every process. CuPy reads the 16 bytes as a C string, which ends before a zero byte; a
    shortened one is completed by the PCI bus id."""
    found = bytes(runtime.getDeviceProperties(index)["uuid"])[:_UUID_BYTES]
    if len(found) == _UUID_BYTES:
        return f"GPU-{UUID(bytes=found)}"
    return f"GPU-{found.hex()}-at-{runtime.deviceGetPCIBusId(index)}"


def is_host(array: Any) -> bool:
    """Whether an array is in host memory."""
    return isinstance(array, np.ndarray)
