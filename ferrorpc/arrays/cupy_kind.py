"""CuPy arrays. CuPy is never imported here: a caller with a CuPy array has imported it.

A backend for device arrays gets them by `view_on_device` and `out_on_device`: nothing is copied or synchronised. For other
backends `view` and `out` copy through pinned slots (staging.py), ordered after the caller's current stream.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ferrorpc.arrays.base import GpuKind, Out, View, check_distinct, check_spec
from ferrorpc.arrays.device import Device, DeviceArray, Stream
from ferrorpc.arrays.devices import device_of
from ferrorpc.arrays.numpy_kind import NUMPY, dtype_in
from ferrorpc.arrays.staging import Staging
from ferrorpc.types import DType, TensorSpec


def is_cupy_array(x: Any) -> bool:
    """Whether x is a CuPy array; False where CuPy was never imported."""
    cupy = sys.modules.get("cupy")
    array = getattr(cupy, "ndarray", None)
    return array is not None and isinstance(x, array)


class CupyKind(GpuKind):
    """Arrays on one device."""

    def __init__(self, device: int) -> None:
        self._index = device

    @property
    def device(self) -> Device:
        """Where they are."""
        return device_of(sys.modules["cupy"], self._index)

    @property
    def staging(self) -> Staging:
        """As `Kind.staging`."""
        found: Staging = self.device.staging
        return found

    def view_on_device(self, x: Any) -> View:
        spec = self.spec(x)
        origin = _stored(x, spec.dtype)
        if origin.flags.c_contiguous:
            return View(self, spec, origin, True, x)
        self.device.current()  # raises before the copy would become a part of a graph that is being captured
        with self.device.here():
            copy = x.copy()
        self.staging.keep(x)
        return View(self, spec, _stored(copy, spec.dtype), False, x)

    def spec(self, x: Any) -> TensorSpec:
        return TensorSpec(dtype_in(x), x.shape)

    def out(self, x: Any, spec: TensorSpec) -> Out:
        check_spec(self.spec(x), spec)
        return self.out_through_host(x, _stored(x, spec.dtype), spec)

    def out_through_host(self, given: Any, stored: DeviceArray, spec: TensorSpec) -> Out:
        """As `out`, for an array of the caller's whose memory is `stored`, in storage dtype."""
        check_distinct(stored)
        return Out(given, spec, stored, lambda data: self.assign(stored, self.staging.to_device(data)))

    def out_on_device(self, x: Any, spec: TensorSpec) -> Out:
        check_spec(self.spec(x), spec)
        return self.out_where_it_is(x, _stored(x, spec.dtype), spec)

    def out_where_it_is(self, given: Any, stored: DeviceArray, spec: TensorSpec) -> Out:
        """As `out_on_device`, for an array of the caller's whose memory is `stored`, in storage dtype."""
        if stored.flags.c_contiguous:
            return Out(given, spec, stored)
        check_distinct(stored)
        home = self.device.current()
        scratch = self.device.empty(spec.shape, spec.dtype.storage, home)
        return Out(given, spec, stored, lambda data: self.assign(stored, data, home), scratch)

    def wrap(self, data: Any, spec: TensorSpec) -> Any:
        if isinstance(data, np.ndarray):
            data = self.staging.to_device(data)
        return _typed(data if data.shape == spec.shape else data.reshape(spec.shape), spec)

    def alias(self, data: np.ndarray[Any, Any], spec: TensorSpec) -> None:
        return None

    def pointer_of(self, x: Any) -> int:
        return int(x.data.ptr)

    def address(self, x: Any) -> int:
        memory = x.data
        return int(memory.ptr) if memory.device_id == self._index and x.flags.c_contiguous else 0

    def empty(self, shape: Sequence[int], dtype: DType) -> Any:
        return self.device.empty(shape, _in_numpy(dtype))

    def assign(self, target: DeviceArray, data: DeviceArray, home: Stream | None = None) -> None:
        """target[...] = data, as many elements of one storage dtype, in the current stream. Both are kept until then, and so is
        the stream that the memory of `data` goes back to."""
        with self.device.here():
            target[...] = data.reshape(target.shape)
        self.staging.keep((target, data, home))


_kinds: dict[int, CupyKind] = {}


def cupy_kind(device: int) -> CupyKind:
    """The kind of the arrays on the GPU with this number; the same object each time."""
    return _kinds.get(device) or _kinds.setdefault(device, CupyKind(device))


@lru_cache
def _in_numpy(dtype: DType) -> np.dtype[Any]:
    found: np.dtype[Any] = NUMPY.empty((), dtype).dtype
    return found


def _stored(x: Any, dtype: DType) -> Any:
    return x.view(np.uint16) if dtype is DType.BFLOAT16 else x


def _typed(data: Any, spec: TensorSpec) -> Any:
    return data.view(_in_numpy(spec.dtype)) if spec.dtype is DType.BFLOAT16 else data
