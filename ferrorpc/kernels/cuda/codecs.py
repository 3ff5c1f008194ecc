"""The codecs of compressed messages on a GPU: CUDA kernels that write and read the same bytes as wire/codecs.py.

Kernels are launched in the current stream, and no call waits for them. Arrays are C-contiguous and on the current device.
"""

from __future__ import annotations

from typing import Any, Final

from ferrorpc.kernels.cuda.launcher import DeviceKernels
from ferrorpc.kernels.int8_blocks import scales_and_integers
from ferrorpc.types import DType

_HALVES: Final = {"bf16": DType.BFLOAT16, "f16": DType.FLOAT16}


class DeviceCodec:
    """One codec.

    Args:
        name: "bf16", "f16" or "int8".
    """

    def __init__(self, kernels: DeviceKernels, name: str) -> None:
        self._kernels = kernels
        self._half = _HALVES.get(name)

    def encode(self, values: Any, encoded: Any) -> None:
        """encoded (uint8) = the encoded values (float32)."""
        if self._half is not None:
            self._kernels.pack([values], [0], encoded, DType.FLOAT32, self._half)
        else:
            self._kernels.quantise_int8(values, *scales_and_integers(encoded, values.size))

    def decode(self, encoded: Any, values: Any) -> None:
        """values (float32) = the decoded bytes (uint8)."""
        if self._half is not None:
            self._kernels.unpack([values], [0], encoded, self._half, DType.FLOAT32)
        else:
            self._kernels.dequantise_int8(*scales_and_integers(encoded, values.size), values)
