"""NumPy arrays, NumPy scalars, Python numbers, and whatever speaks DLPack on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ferrorpc.arrays.base import Kind, Out, View, check_spec, check_writable, contiguous, owned_array
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.types import DType, TensorSpec, dtype_of

NATIVE: Final[dict[np.dtype[Any], DType]] = {dtype.storage: dtype for dtype in DType if dtype is not DType.BFLOAT16}
"""The dtypes that NumPy itself has."""
_PYTHON: Final[dict[type, str]] = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}


class NumpyKind(Kind):
    """NumPy's own. Also what unknown libraries' arrays become."""

    def view(self, x: Any) -> View:
        array = _as_array(x)
        dtype = dtype_in(array)
        origin = array.view(np.uint16) if dtype is DType.BFLOAT16 else array
        data = contiguous(origin)
        return View(self, TensorSpec(dtype, array.shape), data, data is origin, origin)

    def spec(self, x: Any) -> TensorSpec:
        array = _as_array(x)
        return TensorSpec(dtype_in(array), array.shape)

    def out(self, x: Any, spec: TensorSpec) -> Out:
        array = _as_array(x)
        dtype = dtype_in(array)
        check_spec(TensorSpec(dtype, array.shape), spec)
        check_writable(array)
        return Out(x, spec, array.view(np.uint16) if dtype is DType.BFLOAT16 else array)

    def wrap(self, data: np.ndarray[Any, Any], spec: TensorSpec) -> np.ndarray[Any, Any]:
        return self.typed(owned_array(data, spec), spec)  # NumPy gives memory another dtype only in a view

    def alias(self, data: np.ndarray[Any, Any], spec: TensorSpec) -> np.ndarray[Any, Any]:
        return self.typed(data.reshape(spec.shape), spec)

    def pointer_of(self, x: Any) -> int:
        return int(x.__array_interface__["data"][0]) if isinstance(x, np.ndarray) else 0

    def typed(self, data: np.ndarray[Any, Any], spec: TensorSpec) -> np.ndarray[Any, Any]:
        """The same memory in the dtype that users know: bfloat16 where storage has uint16."""
        return data.view(_bfloat16()) if spec.dtype is DType.BFLOAT16 else data

    def empty(self, shape: Sequence[int], dtype: DType) -> np.ndarray[Any, Any]:
        return np.empty(tuple(shape), _bfloat16() if dtype is DType.BFLOAT16 else dtype.storage)


NUMPY: Final = NumpyKind()


def read_dlpack(x: Any) -> np.ndarray[Any, Any]:
    """The elements of another library's array on the host, without a copy where it permits.

    Raises:
        TensorMismatchError: its dtype is not supported, or NumPy cannot read it; the message gives its reason.
    """
    try:
        return np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError, ValueError) as problem:
        dtype = getattr(x, "dtype", None)
        if isinstance(dtype, np.dtype) and dtype_of(dtype) is DType.BFLOAT16:
            return np.asarray(x)  # NumPy takes no bfloat16 through DLPack; JAX gives it as ml_dtypes'
        raise TensorMismatchError(
            f"cannot read this {type(x).__module__}.{type(x).__qualname__}: {problem}",
            hint="move it to the host, or make it a NumPy array first; what jax.jit or jax.grad traces has no elements yet",
        ) from None


def dtype_in(array: Any) -> DType:
    """Of what has a NumPy dtype. From a table, because NumPy takes a microsecond to spell a dtype's name."""
    return NATIVE.get(array.dtype) or dtype_of(array.dtype)


def _as_array(x: Any) -> np.ndarray[Any, Any]:
    if type(x) is np.ndarray:  # as most often
        return x
    if isinstance(x, np.ma.MaskedArray):
        raise UsageError("a masked array would lose its mask", hint="pass x.filled(value)")
    if isinstance(x, np.ndarray | np.generic):
        return np.asarray(x)
    name = next((name for number, name in _PYTHON.items() if isinstance(x, number)), None)
    if name is not None:
        try:
            return np.array(x, name)
        except OverflowError:
            raise TensorMismatchError(f"the number {x} does not fit an int64", hint="pass it as a float") from None
    if hasattr(x, "__dlpack__"):
        return read_dlpack(x)
    raise UsageError(
        f"{type(x).__name__} is no array",
        hint="pass a NumPy, CuPy or torch array, or a number; np.asarray makes one of a list, and bytes go into group.store",
    )


def _bfloat16() -> np.dtype[Any]:
    """NumPy's bfloat16 is an extension: it is loaded only by those who receive one."""
    try:
        import ml_dtypes
    except ImportError:
        raise TensorMismatchError("NumPy has no bfloat16 of its own", hint="pip install ml_dtypes") from None
    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found
