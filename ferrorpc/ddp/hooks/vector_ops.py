"""Operations of hooks on float32 vectors, on the host or on a GPU, with the same bits.

On a GPU everything is allocated and queued in the current stream; only `to_host` waits.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from ferrorpc.arrays.cupy_kind import CupyKind
from ferrorpc.arrays.device import DeviceArray
from ferrorpc.arrays.kinds import gpu_of
from ferrorpc.ddp.bucket_memory import Array
from ferrorpc.kernels.cuda.codecs import DEVICE_CODECS
from ferrorpc.types import DType
from ferrorpc.wire.codecs import Codec

_SINGLE = np.dtype(np.float32)


class HostVectorOps:
    """On NumPy arrays. All arrays are float32 of one dimension."""

    def zeros(self, count: int) -> Array:
        """A new array of zeros."""
        return np.zeros(count, _SINGLE)

    def assign(self, target: Array, source: Array) -> None:
        """target[:] = source."""
        np.copyto(target, source)

    def add(self, target: Array, other: Array) -> None:
        """target += other."""
        with np.errstate(all="ignore"):
            np.add(target, other, out=target)

    def subtract_delivered(self, values: Array, delivered: Array) -> None:
        """values -= delivered; all zeros if any result is not finite."""
        with np.errstate(all="ignore"):
            np.subtract(values, delivered, out=values)
        self.forget_unless_finite(values, values)

    def scale(self, values: Array, factor: float) -> None:
        """values *= factor."""
        with np.errstate(all="ignore"):
            np.multiply(values, np.float32(factor), out=values)

    def forget_unless_finite(self, values: Array, total: Array) -> None:
        """values[:] = 0 if any element of `total` is not finite."""
        if not np.isfinite(total).all():
            values[...] = 0

    def encoded(self, codec: Codec, values: Array) -> Array:
        """A new array of the bytes of values."""
        return codec.encode(values)

    def decode(self, codec: Codec, encoded: Array, values: Array) -> None:
        """values[:] = what the bytes hold."""
        codec.decode_to(values, encoded)

    def from_host(self, source: Array) -> Array:
        """A copy of a host array."""
        return np.array(source, _SINGLE)

    def to_host(self, values: Array) -> Array:
        """A copy on the host."""
        return values.copy()


class DeviceVectorOps:
    """The same on arrays of a GPU, which is the current device, in the stream that is current at construction. Codecs are those
    that have kernels."""

    def __init__(self, kind: CupyKind) -> None:
        self._device = kind.device
        self._kernels = kind.device.kernels
        self._stream = kind.device.current()

    def zeros(self, count: int) -> DeviceArray:
        found = self._device.empty((count,), _SINGLE)
        found[...] = 0
        return found

    def assign(self, target: DeviceArray, source: DeviceArray) -> None:
        self._device.copy(target, source, self._stream)

    def add(self, target: DeviceArray, other: DeviceArray) -> None:
        self._kernels.sum_peers([target, other], target, DType.FLOAT32)

    def subtract_delivered(self, values: DeviceArray, delivered: DeviceArray) -> None:
        self._kernels.residue(values, delivered)

    def scale(self, values: DeviceArray, factor: float) -> None:
        self._kernels.pack([values], [0], values, DType.FLOAT32, DType.FLOAT32, factor)

    def forget_unless_finite(self, values: DeviceArray, total: DeviceArray) -> None:
        with np.errstate(all="ignore"):
            self._kernels.residue(values, total - total)  # of zeros, where all are finite; the host does not wait to know

    def encoded(self, codec: Codec, values: DeviceArray) -> DeviceArray:
        found = self._device.empty((codec.encoded_bytes(values.size),), np.dtype(np.uint8))
        DEVICE_CODECS[codec.name].encode(self._kernels, values, found)
        return found

    def decode(self, codec: Codec, encoded: DeviceArray, values: DeviceArray) -> None:
        DEVICE_CODECS[codec.name].decode(self._kernels, encoded, values)

    def from_host(self, source: Array) -> DeviceArray:
        return self._device.staging.to_device(np.array(source, _SINGLE))

    def to_host(self, values: DeviceArray) -> Array:
        with self._device.on(self._stream):
            found: Array = self._device.staging.to_host(values)
        return found


VectorOps: TypeAlias = HostVectorOps | DeviceVectorOps
HOST = HostVectorOps()


def vector_ops_for(array: Any) -> VectorOps:
    """The operations for an array's device."""
    kind = gpu_of(array)
    return HOST if kind is None else DeviceVectorOps(kind)
