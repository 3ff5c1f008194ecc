"""A codec such as one that is added to wire/codecs.py, and nowhere else: no kernels of a GPU know it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from ferrorpc.kernels.int8_blocks import BLOCK_VALUES, scales_and_integers
from ferrorpc.wire.codecs import Codec

Array = np.ndarray[Any, Any]
LARGEST = 448.0
"""Of float8_e4m3fn."""


class Scaled(Codec):
    """Blocks of 256 values of one byte (e4m3), with one scale each, which is a power of two."""

    name = "e4m3"
    block_values = BLOCK_VALUES

    def encoded_bytes(self, count: int) -> int:
        return 4 * -(-count // BLOCK_VALUES) + count

    def _encode(self, values: Array, encoded: Array) -> None:
        scales, bytes_of_values = scales_and_integers(encoded, values.size)
        for block, start in enumerate(range(0, values.size, BLOCK_VALUES)):
            part = values[start : start + BLOCK_VALUES].astype(np.float64)
            peak = np.abs(part).max()
            scales[block] = np.ldexp(1.0, max(-140, np.frexp(peak / LARGEST)[1])) if np.isfinite(peak) else np.nan
            small = (part / scales[block].astype(np.float64)).astype(ml_dtypes.float8_e4m3fn)
            bytes_of_values[start : start + BLOCK_VALUES] = small.view(np.int8)

    def _decode(self, encoded: Array, values: Array) -> None:
        scales, bytes_of_values = scales_and_integers(encoded, values.size)
        wide = bytes_of_values.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        values[...] = wide * np.repeat(scales, BLOCK_VALUES)[: values.size]
