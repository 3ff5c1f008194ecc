"""The only place that tells NumPy, CuPy and torch apart.

Users' arrays come in through `view` or `view_out`, and results go back through their `Kind`. Arrays of other libraries are read
by DLPack, and NumPy arrays are returned. Neither torch nor CuPy is imported on its own account: an object of theirs shows that
the caller has imported it. The exception: CuPy is imported for torch tensors on a GPU, which are seen as CuPy arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

import numpy as np

from ferrorpc.arrays.base import GpuKind, Kind, Out, View
from ferrorpc.arrays.cupy_kind import CupyKind, cupy_kind, is_cupy_array
from ferrorpc.arrays.device import is_host
from ferrorpc.arrays.numpy_kind import NUMPY as NUMPY
from ferrorpc.arrays.staging import Staging
from ferrorpc.arrays.torch_gpu_kind import gpu_kind_of
from ferrorpc.arrays.torch_kind import TorchKind, is_tensor
from ferrorpc.errors import UsageError
from ferrorpc.guard import Guard
from ferrorpc.types import TensorSpec, dtype_of

_NOTHING: Final = np.empty(0, np.uint8)


def kind_of(x: Any) -> Kind:
    """The kind results come back in when `x` goes in; NumPy for numbers and for unknown libraries."""
    if type(x) is np.ndarray:
        return NUMPY
    if is_tensor(x):
        return _torch_kind(x.device)
    if is_cupy_array(x):
        return cupy_kind(x.device.id)
    return NUMPY


def gpu_of(x: Any) -> CupyKind | None:
    """The kind of CuPy arrays that x is seen as if it is on a GPU; None if it is on the host."""
    kind = kind_of(x).device_kind
    return kind if isinstance(kind, CupyKind) else None


def view(x: Any, on_device: bool = False) -> View:
    """Reads an array or a number; never writes to it. Read-only, strided and empty arrays are fine.

    Args:
        on_device: leave the elements of a GPU array on the GPU instead of copying them to the host.

    Raises:
        TensorMismatchError: its dtype or byte order cannot be sent; the message lists what can.
        UsageError: it is no plain array.
    """
    return kind_of(x).view_on_device(x) if on_device else kind_of(x).view(x)


def view_on_host(x: Any, guard: Guard) -> View:
    """As `view`, within this guard where the elements are copied from a GPU. Raises also as `Staging.to_host`."""
    kind = kind_of(x)
    return kind.view(x, guard) if isinstance(kind, GpuKind) else kind.view(x)


def view_out(out: Any, spec: TensorSpec, on_device: bool = False) -> Out:
    """Accepts `out` for a result of `spec`. It may be strided, and on a device; `on_device` as for `view`.

    Raises:
        TensorMismatchError: its dtype or shape differ, or it cannot be written.
        UsageError: it is no NumPy, CuPy or torch array.
    """
    kind = kind_of(out)
    if kind is NUMPY and not isinstance(out, np.ndarray):
        raise UsageError(f"out is a {type(out).__name__}", hint="pass a NumPy, CuPy or torch array")
    return kind.out_on_device(out, spec) if on_device else kind.out(out, spec)


def on_one_device(views: Sequence[View]) -> bool:
    """Whether these arrays, viewed with `on_device`, are all on one GPU."""
    return len({each.kind for each in views}) == 1 and not any(is_host(each.data) for each in views)


def packed_bytes(parts: Sequence[tuple[slice, View]], end: int, tail: np.ndarray[Any, Any] = _NOTHING) -> Any:
    """A copy of arrays as one array of bytes, with a tail. It is on the GPU if all arrays are on it and were viewed with
    `on_device`, without synchronisation; else on the host.

    Args:
        parts: the arrays and their places.
        end: where the tail begins.
        tail: uint8.
    """
    if on_one_device([part for _, part in parts]):
        return _packed_on_device(parts[0][1].kind.staging, parts, end, tail)
    whole = np.empty(end + tail.size, np.uint8)
    for place, part in parts:
        data = part.data if is_host(part.data) else part.kind.to_host(part.data, part.spec)
        whole[place] = data.reshape(-1).view(np.uint8)
    whole[end:] = tail
    return whole


def _packed_on_device(staging: Staging, parts: Sequence[tuple[slice, View]], end: int, tail: np.ndarray[Any, Any]) -> Any:
    device = staging.device
    with device.here():
        whole, stream = device.empty((end + tail.size,), tail.dtype), device.current()
        for place, part in parts:
            device.copy(whole[place], part.data, stream)
        if tail.size:
            staging.write(whole[end:], tail)
    staging.keep([part.data for _, part in parts])  # their own streams may reuse their memory before this one has read it
    return whole


def split(data: Any, size: int) -> list[Any]:
    """An array of any library cut along axis 0, as views of it, as np.array_split cuts."""
    return [data[cut] for cut in _cuts(data.shape[0], size)]


@lru_cache(maxsize=256)
def _cuts(length: int, size: int) -> list[slice]:
    least, more = divmod(length, size)
    return [slice(start, stop) for start, stop in pairwise(place * least + min(place, more) for place in range(size + 1))]


def to_kind(kind: Kind, data: Any, spec: TensorSpec) -> Any:
    """A result as an array of `kind`, which owns `data` (storage dtype, on the host or on a device) from then on."""
    if isinstance(data, np.ndarray):
        return kind.wrap(data, spec)
    where = kind_of(data)
    return kind.wrap(data if where is kind.device_kind else where.to_host(data, spec), spec)


def copy_into(target: Any, source: Any, guard: Guard | None = None) -> None:
    """target[:] = source, for arrays of one shape and storage dtype on the host or on devices.

    `guard` as for `Staging.to_host`.
    """
    if isinstance(target, np.ndarray):
        spec = TensorSpec(dtype_of(target.dtype), target.shape)
        np.copyto(target, source if isinstance(source, np.ndarray) else kind_of(source).to_host(source, spec, guard))
    else:
        kind, spec = cupy_kind(target.device.id), TensorSpec(dtype_of(np.dtype(target.dtype)), target.shape)
        kind.assign(target, to_kind(kind, source, spec))


def copy_of(data: Any) -> Any:
    """A copy of a storage array on its own device, whatever the current one. Raises as `Device.current` for a GPU array."""
    if isinstance(data, np.ndarray):
        return data.copy()
    staging = kind_of(data).staging
    staging.device.current()
    with staging.device.here():
        copy = data.copy()
    staging.keep(data)
    return copy


def copied(x: Any, kind: Kind | None = None) -> Any:
    """A copy of an array, as one of `kind`; None for its own. Raises as `view`."""
    got = view(x, on_device=True)
    return to_kind(kind or got.kind, copy_of(got.data), got.spec)


def spec_of(x: Any) -> TensorSpec:
    """The dtype and shape of an array or a number, without reading its elements. Raises as `view`."""
    return kind_of(x).spec(x)


@lru_cache(maxsize=64)
def _torch_kind(device: Any) -> TorchKind:
    return gpu_kind_of(device) or TorchKind(device)
