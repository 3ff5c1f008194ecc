"""The codecs of compressed messages on a GPU: CUDA kernels that write and read the same bytes as wire/codecs.py.

Kernels are launched in the current stream, and no call waits for them. Arrays are C-contiguous and on the current device. What
a codec without kernels compresses goes through the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final

from ferrorpc.kernels.cuda.launcher import DeviceKernels
from ferrorpc.kernels.int8_blocks import scales_and_integers
from ferrorpc.types import DType


class DeviceCodec(ABC):
    """The kernels of one codec."""

    @abstractmethod
    def encode(self, kernels: DeviceKernels, values: Any, encoded: Any) -> None:
        """encoded (uint8) = the encoded values (float32)."""

    @abstractmethod
    def decode(self, kernels: DeviceKernels, encoded: Any, values: Any) -> None:
        """values (float32) = the decoded bytes (uint8)."""


class _Half(DeviceCodec):
    def __init__(self, dtype: DType) -> None:
        self._dtype = dtype

    def encode(self, kernels: DeviceKernels, values: Any, encoded: Any) -> None:
        kernels.pack([values], [0], encoded, DType.FLOAT32, self._dtype)

    def decode(self, kernels: DeviceKernels, encoded: Any, values: Any) -> None:
        kernels.unpack([values], [0], encoded, self._dtype, DType.FLOAT32)


class _Blocks(DeviceCodec):
    def encode(self, kernels: DeviceKernels, values: Any, encoded: Any) -> None:
        kernels.quantise_int8(values, *scales_and_integers(encoded, values.size))

    def decode(self, kernels: DeviceKernels, encoded: Any, values: Any) -> None:
        kernels.dequantise_int8(*scales_and_integers(encoded, values.size), values)


DEVICE_CODECS: Final[Mapping[str, DeviceCodec]] = {
    "bf16": _Half(DType.BFLOAT16),
    "f16": _Half(DType.FLOAT16),
    "int8": _Blocks(),
}
"""By the name of the codec. Those of wire/codecs.py that are not here have no kernels."""
