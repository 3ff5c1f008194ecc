"""CuPy arrays, copied through the host. CuPy is never imported here: who passes such an array has done so.

Both copies are ordered on the caller's current stream and complete before they return.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ferrorpc.arrays.base import Kind, Out, View, fit
from ferrorpc.arrays.numpy_kind import NUMPY
from ferrorpc.types import DType, TensorSpec, dtype_of


def is_cupy_array(x: Any) -> bool:
    """Whether x is a CuPy array; False where CuPy was never imported."""
    cupy = sys.modules.get("cupy")
    array = getattr(cupy, "ndarray", None)
    return array is not None and isinstance(x, array)


class CupyKind(Kind):
    """Arrays on one device."""

    name = "cupy"

    def __init__(self, device: int) -> None:
        self._device = device

    def view(self, x: Any) -> View:
        spec = self.spec(x)  # refused before anything is copied
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(self._device):
            host = NUMPY.view(cupy.asnumpy(x, order="C"))
        return View(self, spec, host.data, False, None)

    def spec(self, x: Any) -> TensorSpec:
        return TensorSpec(dtype_of(np.dtype(x.dtype)), tuple(x.shape))

    def out(self, x: Any, spec: TensorSpec) -> Out:
        fit(self.spec(x), spec)

        def store(data: np.ndarray[Any, Any]) -> None:
            cupy = sys.modules["cupy"]
            with cupy.cuda.Device(self._device):
                x[...] = cupy.asarray(data.view(x.dtype))

        return Out(x, spec, None, store)

    def wrap(self, data: np.ndarray[Any, Any], spec: TensorSpec) -> Any:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(self._device):
            return cupy.asarray(NUMPY.wrap(data, spec))

    def alias(self, data: np.ndarray[Any, Any], spec: TensorSpec) -> None:
        return None

    def empty(self, shape: Sequence[int], dtype: DType) -> Any:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(self._device):
            return cupy.empty(tuple(shape), NUMPY.empty((), dtype).dtype)
