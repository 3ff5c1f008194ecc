"""The only place that tells NumPy, CuPy and torch apart.

Everything a user passes goes in through `view` or `view_out` and comes back through the kind it came with. Other libraries'
arrays that speak DLPack are read, and NumPy comes back. Neither torch nor CuPy is ever imported: an object of theirs shows
that the caller has done so.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ferrorpc.arrays.base import Kind, Out, View
from ferrorpc.arrays.cupy_kind import CupyKind, is_cupy_array
from ferrorpc.arrays.numpy_kind import NUMPY
from ferrorpc.arrays.torch_kind import TorchKind, is_tensor
from ferrorpc.errors import UsageError
from ferrorpc.types import TensorSpec

__all__ = ["NUMPY", "Kind", "Out", "View", "kind_of", "spec_of", "view", "view_out"]


def kind_of(x: Any) -> Kind:
    """The kind results come back in when `x` goes in; NumPy for numbers and for unknown libraries."""
    if type(x) is np.ndarray:
        return NUMPY
    if is_tensor(x):
        return _torch_kind(x.device)
    if is_cupy_array(x):
        return _cupy_kind(x.device.id)
    return NUMPY


def view(x: Any) -> View:
    """Reads an array or a number; never writes to it. Read-only, strided and empty arrays are fine.

    Raises:
        TensorMismatchError: its dtype or byte order cannot be sent; the message lists what can.
        UsageError: it is no plain array.
    """
    return kind_of(x).view(x)


def view_out(out: Any, spec: TensorSpec) -> Out:
    """Accepts `out` for a result of `spec`. It may be strided, and on a device.

    Raises:
        TensorMismatchError: its dtype or shape differ, or it cannot be written.
        UsageError: it is no NumPy, CuPy or torch array.
    """
    kind = kind_of(out)
    if kind is NUMPY and not isinstance(out, np.ndarray):
        raise UsageError(f"out is a {type(out).__name__}", hint="pass a NumPy, CuPy or torch array")
    return kind.out(out, spec)


def spec_of(x: Any) -> TensorSpec:
    """dtype and shape of an array or a number, without looking at its elements. Raises as `view`."""
    return kind_of(x).spec(x)


@lru_cache(maxsize=64)
def _torch_kind(device: Any) -> TorchKind:
    return TorchKind(device)


@lru_cache(maxsize=64)
def _cupy_kind(device: int) -> CupyKind:
    return CupyKind(device)
