"""What hooks do with runs of float32, on the host or on a GPU, with the same bits.

On a GPU everything is queued in the current stream, and made there; nothing waits but `home`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from ferrorpc.arrays.cupy_kind import CupyKind
from ferrorpc.arrays.device import DeviceArray
from ferrorpc.arrays.kinds import gpu_of
from ferrorpc.ddp.memory import Array
from ferrorpc.kernels.cuda.codecs import DeviceCodec
from ferrorpc.types import DType
from ferrorpc.wire.codecs import Codec

_SINGLE = np.dtype(np.float32)


class Values(ABC):
    """One place of arrays, all of which are float32 of one dimension."""

    @abstractmethod
    def zeros(self, count: int) -> Any:
        """A new array of zeros."""

    @abstractmethod
    def assign(self, target: Any, source: Any) -> None:
        """target[:] = source."""

    @abstractmethod
    def add(self, target: Any, other: Any) -> None:
        """target += other."""

    @abstractmethod
    def keep_rest(self, values: Any, delivered: Any) -> None:
        """values -= delivered; zeros where any of it is not finite."""

    @abstractmethod
    def rounded(self, codec: Codec, values: Any) -> Any:
        """A new array of what is left of values in a codec's bytes."""

    @abstractmethod
    def taken(self, source: Array) -> Any:
        """A new array of what a host array holds."""

    @abstractmethod
    def home(self, values: Any) -> Array:
        """A copy on the host."""


class HostValues(Values):
    """NumPy's."""

    def zeros(self, count: int) -> Array:
        return np.zeros(count, _SINGLE)

    def assign(self, target: Array, source: Array) -> None:
        np.copyto(target, source)

    def add(self, target: Array, other: Array) -> None:
        with np.errstate(all="ignore"):
            np.add(target, other, out=target)

    def keep_rest(self, values: Array, delivered: Array) -> None:
        with np.errstate(all="ignore"):
            np.subtract(values, delivered, out=values)
        if not np.isfinite(values).all():
            values[...] = 0

    def rounded(self, codec: Codec, values: Array) -> Array:
        return codec.decode(codec.encode(values), values.size)

    def taken(self, source: Array) -> Array:
        return np.array(source, _SINGLE)

    def home(self, values: Array) -> Array:
        return values.copy()


class DeviceValues(Values):
    """Those of a GPU, which is the current device, in the stream that is current when this is made."""

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

    def keep_rest(self, values: DeviceArray, delivered: DeviceArray) -> None:
        self._kernels.residue(values, delivered)

    def rounded(self, codec: Codec, values: DeviceArray) -> DeviceArray:
        near, found = DeviceCodec(self._kernels, codec.name), self._device.empty(values.shape, _SINGLE)
        encoded = self._device.empty((codec.encoded_bytes(values.size),), np.dtype(np.uint8))
        near.encode(values, encoded)
        near.decode(encoded, found)
        return found

    def taken(self, source: Array) -> DeviceArray:
        return self._device.staging.to_device(np.array(source, _SINGLE))

    def home(self, values: DeviceArray) -> Array:
        with self._device.on(self._stream):
            return self._device.staging.to_host(values)


HOST = HostValues()


def values_like(array: Any) -> Values:
    """What works where an array is."""
    kind = gpu_of(array)
    return HOST if kind is None else DeviceValues(kind)
