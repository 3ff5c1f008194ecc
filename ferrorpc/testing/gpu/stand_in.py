"""A module that stands in for CuPy: the part of its API that ferrorpc and its tests use, on fake GPUs.

    with stand_in(Machine(2)) as cupy:
        with cupy.cuda.Device(1):
            x = cupy.asarray(numpy_array)

While it is installed, `sys.modules["cupy"]` is this module, so the code that handles CuPy arrays runs unchanged. Operations on
arrays are queued on the current stream. As in CuPy, only `asnumpy`, `get` and `synchronize` wait.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.lib.stride_tricks import as_strided

from ferrorpc.arrays import capture_mode
from ferrorpc.arrays.devices import forget
from ferrorpc.testing.gpu.cuda import CUDADriverError, Driver, MemoryPointer, cuda
from ferrorpc.testing.gpu.kernels import raw_module
from ferrorpc.testing.gpu.machine import FakeStream, Gpu, GpuFault, Machine

TINY: Final = np.finfo(np.float32).tiny

_byte_bounds: Final[Any] = getattr(np, "byte_bounds", None) or np.lib.array_utils.byte_bounds
"""NumPy 2 moved this function to another module."""


class _Block:
    """Owns a block of device memory and frees it in the order of the stream it was allocated on, like CuPy's memory pools.

    If that stream is destroyed by then, the block is freed in the order of the current stream, as by `cupy.cuda.malloc_async`.
    """

    def __init__(self, driver: Driver, size_bytes: int) -> None:
        self.gpu = gpu = driver.gpu
        self._driver = driver
        self._stream = driver.stream
        if self._stream.captured:
            raise GpuFault(f"memory is allocated while a graph is being captured from stream {self._stream.pointer:#x}")
        with gpu.machine.lock:
            self.ptr = gpu.memory.allocate(size_bytes)

    def __del__(self) -> None:
        gpu, address = self.gpu, self.ptr

        def free() -> bool:
            gpu.memory.free(address)
            return True

        (self._driver.stream if self._stream.destroyed else self._stream).tasks.append(free)  # also during a capture


class Array(NDArrayOperatorsMixin):
    """A `cupy.ndarray`. It holds an address and a layout, never values. NumPy ufuncs on it run on its GPU."""

    cupy: StandIn

    def __init__(self, shape: Any, dtype: Any, memptr: Any, strides: Any = None) -> None:
        self._lie(memptr.mem, memptr.ptr, as_strided(np.empty(1, dtype), shape, strides))

    @classmethod
    def lying(cls, block: Any, address: int, layout: np.ndarray[Any, Any]) -> Array:
        """An array over a block of memory.

        Args:
            layout: an array with the shape, dtype and strides. Its own memory is never accessed.
        """
        found = cls.__new__(cls)
        found._lie(block, address, layout)
        return found

    def _lie(self, block: Any, address: int, layout: np.ndarray[Any, Any]) -> None:
        self._block = block
        self._address = address
        self._layout = layout
        self.data = MemoryPointer(block, address - block.ptr)
        self.device = SimpleNamespace(id=block.gpu.index)
        self.shape, self.dtype, self.strides = layout.shape, layout.dtype, layout.strides
        self.size, self.nbytes, self.ndim, self.flags = layout.size, layout.nbytes, layout.ndim, layout.flags

    def _derived(self, layout: np.ndarray[Any, Any]) -> Array:
        return self.lying(self._block, self._address + layout.ctypes.data - self._layout.ctypes.data, layout)

    def view(self, dtype: Any) -> Array:
        """The same memory as another dtype of the same size."""
        return self._derived(self._layout.view(dtype))

    def reshape(self, *shape: Any) -> Array:
        """The same memory in another shape; a copy if the array is not C-contiguous."""
        if not self.flags.c_contiguous:
            return self.copy().reshape(*shape)
        return self._derived(self._layout.reshape(*shape))

    @property
    def T(self) -> Array:
        """The same memory with reversed axes."""
        return self._derived(self._layout.T)

    def __getitem__(self, place: Any) -> Array:
        places = place if isinstance(place, tuple) else (place,)
        if any(isinstance(each, Array) for each in places):
            return self.cupy.apply(lambda x, *found: x[found], [self, *places])
        if any(isinstance(each, list | np.ndarray) for each in places):
            raise TypeError("the stand-in takes no lists and no NumPy arrays for an index")
        return self._derived(self._layout[places if any(each is Ellipsis for each in places) else (*places, ...)])

    def __setitem__(self, place: Any, value: Any) -> None:
        places = place if isinstance(place, tuple) else (place,)
        if isinstance(value, list | tuple | str | np.ndarray) and np.ndim(value):
            raise ValueError("CuPy takes no lists and no NumPy arrays for its own: use cupy.asarray")
        if isinstance(value, complex) and self.dtype.kind != "c":
            raise TypeError("a complex number does not fit into reals")
        if any(isinstance(each, Array) for each in places):
            self.cupy.launch(_scattered, [self, value, *places], self)
        else:
            self.cupy.launch(lambda x: x, [value], self[place])

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: tuple[Any, ...] = (), **named: Any) -> Any:
        if method != "__call__" or named:
            return NotImplemented
        if any(isinstance(each, np.ndarray) for each in inputs):
            raise TypeError("CuPy takes no NumPy arrays for its own: use cupy.asarray")
        return self.cupy.apply(ufunc, inputs, *out)

    def __array_function__(self, function: Any, types: Any, args: Any, named: Any) -> Any:
        """Refuses NumPy's functions. CuPy implements most of them; the stand-in implements none."""
        raise TypeError(f"the stand-in knows no numpy.{function.__name__} of GPU arrays")

    def sum(self, axis: int | None = None, keepdims: bool = False) -> Array:
        """As in NumPy."""
        return self.cupy.apply(lambda x: x.sum(axis=axis, keepdims=keepdims), [self])

    def max(self, axis: int | None = None, keepdims: bool = False) -> Array:
        """As in NumPy."""
        return self.cupy.apply(lambda x: x.max(axis=axis, keepdims=keepdims), [self])

    def mean(self) -> Array:
        """As in NumPy, of all elements."""
        return self.cupy.apply(lambda x: x.mean(), [self])

    def argmax(self, axis: int | None = None) -> Array:
        """As in NumPy."""
        return self.cupy.apply(lambda x: x.argmax(axis=axis), [self])

    def tobytes(self) -> bytes:
        """As in NumPy. Waits for the current stream."""
        return self.get().tobytes()

    def __array__(self, *args: Any, **named: Any) -> Any:
        """Refuses implicit conversion to NumPy, as CuPy does."""
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __bool__(self) -> bool:
        return bool(self.get())

    def __iter__(self) -> Iterator[Any]:
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[place] for place in range(len(self)))

    def __float__(self) -> float:
        return float(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def copy(self) -> Array:
        """A C-contiguous copy."""
        target: Array = self.cupy.empty(self.shape, self.dtype)
        self.cupy.launch(lambda x: x, [self], target)
        return target

    def get(self) -> np.ndarray[Any, Any]:
        """A copy on the host. Waits for the current stream."""
        return self.cupy.asnumpy(self)

    def __len__(self) -> int:
        return len(self._layout)

    def seen(self) -> np.ndarray[Any, Any]:
        """Its current values, as a view of the memory, for tasks. Raises GpuFault if the memory was freed."""
        if not self.size:
            return np.empty(self.shape, self.dtype)
        low, high = _byte_bounds(self._layout)
        first = self._address + low - self._layout.ctypes.data
        memory = self._block.gpu.bytes_at(first, high - low)
        return np.ndarray(self.shape, self.dtype, memory, self._address - first, self.strides)


class StandIn(ModuleType):
    """The module that replaces `cupy`."""

    def __init__(self, machine: Machine) -> None:
        super().__init__("cupy")
        self.machine = machine
        self._driver = Driver(machine)
        self.exchange_capture_mode = self._driver.exchange_capture_mode
        self.ndarray: Any = type("ndarray", (Array,), {"cupy": self})
        self.cuda = cuda(self._driver)
        self.RawModule = raw_module(self._driver)
        self.tanh, self.exp, self.log = map(_of_arrays, (np.tanh, np.exp, np.log))

    @property
    def gpu(self) -> Gpu:
        """The calling thread's current device."""
        return self._driver.gpu

    @property
    def stream(self) -> FakeStream:
        """The calling thread's current stream."""
        return self._driver.stream

    def empty(self, shape: Any, dtype: Any = "float64") -> Any:
        """As `cupy.empty`."""
        return self._laid_out(np.empty(shape, dtype))

    def _laid_out(self, layout: np.ndarray[Any, Any]) -> Any:
        """A new array with this shape, dtype and order. As in CuPy, the address of an empty array is 0."""
        block = _Block(self._driver, layout.nbytes)
        return self.ndarray.lying(block, block.ptr if layout.nbytes else 0, layout)

    def zeros(self, shape: Any, dtype: Any = "float64") -> Any:
        """As `cupy.zeros`."""
        target = self.empty(shape, dtype)
        target[...] = 0
        return target

    def zeros_like(self, x: Any) -> Any:
        """As `cupy.zeros_like`: keeps the memory order of x."""
        target = self._laid_out(np.empty_like(x._layout))
        target[...] = 0
        return target

    def arange(self, count: int) -> Any:
        """As `cupy.arange`."""
        return self.asarray(np.arange(count))

    def asarray(self, x: Any) -> Any:
        """As `cupy.asarray`: in C order, or in Fortran order if x is Fortran-contiguous.

        Raises:
            GpuFault: x is an array on another device. CuPy would copy it.
        """
        if isinstance(x, Array):
            if x.device.id != self.gpu.index:
                raise GpuFault(f"an array of GPU {x.device.id} was asked for while GPU {self.gpu.index} was current")
            return x
        given = np.asarray(x)
        source = given.copy("F" if given.flags.f_contiguous and not given.flags.c_contiguous else "C")
        target = self._laid_out(np.empty_like(source))
        self.machine.copy_in(self.gpu, target.data.ptr, source.ctypes.data, source.nbytes, self.stream)
        return target

    def asnumpy(self, x: Any) -> np.ndarray[Any, Any]:
        """As `cupy.asnumpy`: waits for the current stream."""
        found: np.ndarray[Any, Any] = np.empty(x.shape, x.dtype)
        with self.cuda.Device(x.device.id):
            self.launch(lambda values: found.__setitem__(..., values), [x], None)
            self.stream.synchronize()
        return found

    def launch(self, apply: Callable[..., Any], operands: Sequence[Any], target: Array | None) -> None:
        """Queues target[...] = apply(*operands) on the current stream. Like a kernel, it keeps no array alive.

        Raises:
            CUDADriverError: a GPU has failed.
            GpuFault: an array is not on the current device. CuPy would access it without ordering by any stream of its device.
        """
        if self.machine.failure:
            raise CUDADriverError(self.machine.failure)
        for each in (*operands, target):
            if isinstance(each, Array) and each.device.id != self.gpu.index:
                raise GpuFault(f"an array of GPU {each.device.id} was used while GPU {self.gpu.index} was current")
        reads, writes = [_place(x) for x in operands], None if target is None else _place(target)

        def run() -> bool:
            with np.errstate(all="ignore"):
                result = apply(*[read() for read in reads])
            if writes is not None:
                writes()[...] = result
            return True

        self.stream.enqueue(run)

    def apply(self, function: Callable[..., Any], operands: Sequence[Any], out: Array | None = None) -> Array:
        """Queues `function` on the operands and returns the array of its results, which is `out` if given.

        CuPy compiles its kernels with -ftz=true, so subnormal float32 inputs and results become zero.
        """
        fitting = self._fitting(function, operands)
        if out is not None and not np.can_cast(fitting.dtype, out.dtype, "same_kind"):
            raise TypeError(f"output (typecode {fitting.dtype.char!r}) could not be coerced to {out.dtype.char!r}")
        target = self._laid_out(fitting) if out is None else out
        self.launch(lambda *values: _flushed(function(*map(_flushed, values))), operands, target)
        return target

    def _fitting(self, function: Callable[..., Any], operands: Sequence[Any]) -> np.ndarray[Any, Any]:
        """An array with the shape and dtype of the function's result, found by applying it to arrays of ones."""
        with np.errstate(all="ignore"):
            example = np.asarray(function(*[np.ones(x.shape, x.dtype) if isinstance(x, Array) else x for x in operands]))
        return np.empty(example.shape, example.dtype)


def _flushed(x: Any) -> Any:
    """float32 or complex64 values with subnormal numbers replaced by zeros."""
    if getattr(x, "dtype", None) not in (np.float32, np.complex64):
        return x
    reals = np.array(x, ndmin=1).view(np.float32)
    reals[np.abs(reals) < TINY] *= 0
    return reals.view(x.dtype).reshape(x.shape)


def _of_arrays(ufunc: np.ufunc) -> Callable[[Any], Any]:
    """A ufunc that accepts GPU arrays (through `Array.__array_ufunc__`) and numbers, but not NumPy arrays."""

    def function(x: Any) -> Any:
        if not isinstance(x, Array | int | float | complex):
            raise TypeError(f"Unsupported type {type(x)}")
        return ufunc(x)

    return function


def _scattered(x: np.ndarray[Any, Any], value: Any, *places: Any) -> np.ndarray[Any, Any]:
    """A copy of x with `value` at the given indices."""
    changed = x.copy()
    changed[places] = value
    return changed


def _place(x: Any) -> Callable[[], Any]:
    """A function with which a task reads an array later, without keeping the array alive. A number is returned as it is."""
    if not isinstance(x, Array):
        return lambda: x
    gpu, address, layout = x._block.gpu, x._address, x._layout
    block = SimpleNamespace(gpu=gpu, ptr=0)
    return lambda: Array.lying(block, address, layout).seen()


@contextmanager
def stand_in(machine: Machine) -> Iterator[StandIn]:
    """Installs the stand-in as `cupy` for the duration of a `with`. Raises the first fault of the machine's GPUs at the end."""
    before = sys.modules.get("cupy")
    exchange = capture_mode.exchange
    sys.modules["cupy"] = cupy = StandIn(machine)
    capture_mode.exchange = cupy.exchange_capture_mode
    try:
        yield cupy
    finally:
        capture_mode.exchange = exchange
        if before is None:
            del sys.modules["cupy"]
        else:
            sys.modules["cupy"] = before
        machine.settle()
        forget(cupy)
    if machine.faults:
        raise machine.faults[0]
