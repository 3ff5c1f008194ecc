"""Lossy codecs for messages of float32, as `wire="bf16"`, "f16" and "int8" put them on the network. Sums stay in float32.

| name | bytes per value | error of a finite value |
|------|-----------------|-------------------------|
| bf16 | 2               | half of the last of 8 significant bits |
| f16  | 2               | half of the last of 11 significant bits; beyond 65504 it becomes infinite |
| int8 | 1 + 4 / 256     | half a scale, which is the block's largest magnitude / 127 (at least 2**-126) |

Each codec is a pure function of the values, so all ranks that encode or decode the same values get the same bits. Rounding is
to nearest, ties to even. NaN and infinity are preserved: bf16 and f16 keep them, and an int8 block that contains either decodes
to all NaN, so that a check for overflow after the exchange still finds them.

All work uses scratch that fits the cache. GPUs have kernels for those that kernels/cuda/codecs.py lists; arrays for another
one go through the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import numpy as np

from ferrorpc.errors import CodecError, UsageError
from ferrorpc.kernels.int8_blocks import BLOCK_VALUES, scales_and_integers
from ferrorpc.kernels.registry import converter
from ferrorpc.kernels.thread_state import THREAD_STATE
from ferrorpc.types import DType

_STEP_BLOCKS: Final = 96
"""Blocks that int8 encodes or decodes at a time: 96 KiB of float32."""

_LARGEST: Final = np.array(127, np.float32)
_SMALLEST_SCALE: Final = np.array(2.0**-126, np.float32)
_LARGEST_SCALE: Final = np.array(np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0)))
"""One step below the largest float32 / 127, which times 127 rounds to infinity."""

_MAGNITUDE: Final = 0x7FFF_FFFF
_INFINITY: Final = 0x7F80_0000

Array: TypeAlias = np.ndarray[Any, Any]


class Codec(ABC):
    """Converts float32 to bytes and back. Arrays are one-dimensional and contiguous.

    Duties: 1. A message may be encoded in pieces, if all but the last contain a multiple of `block_values` values: decoded
    values and total size are the same as for the whole message. 2. Rounding again changes nothing: decoded values, encoded in
    the same blocks, are decoded to the same values. 3. Zeros stay zeros.

    Attributes:
        name: as in `wire=`.
        block_values: how many values in a row share something: 1 where each is encoded by itself. It divides 2**18, the values
            that travel together.
    """

    name: str
    block_values: int = 1

    @abstractmethod
    def encoded_bytes(self, count: int) -> int:
        """Bytes that `count` values take."""

    def encode(self, values: Array) -> Array:
        """A new uint8 of shape (encoded_bytes(n),) from float32 of shape (n,)."""
        encoded = np.empty(self.encoded_bytes(values.size), np.uint8)
        self._encode(values, encoded)
        return encoded

    def decode(self, encoded: Array, count: int) -> Array:
        """A new float32 of shape (count,) from uint8 of shape (encoded_bytes(count),).

        Raises:
            CodecError: the bytes are not those of `count` values.
        """
        values = np.empty(count, np.float32)
        self.decode_to(values, encoded)
        return values

    def decode_to(self, values: Array, encoded: Array) -> None:
        """values[:] = what the bytes hold. Raises as `decode`."""
        count, needed = values.size, self.encoded_bytes(values.size)
        if encoded.size != needed:
            raise CodecError(f"{encoded.size} bytes are not {count} values as {self.name}, which take {needed}")
        self._decode(encoded, values)

    @abstractmethod
    def _encode(self, values: Array, encoded: Array) -> None:
        """encoded[:] = values as bytes."""

    @abstractmethod
    def _decode(self, encoded: Array, values: Array) -> None:
        """values[:] = what `encoded` holds."""


class _Half(Codec):
    """A half-precision type: IEEE 754 binary16 or bfloat16."""

    def __init__(self, name: str, dtype: DType) -> None:
        self.name = name
        self._dtype = dtype

    def encoded_bytes(self, count: int) -> int:
        return 2 * count

    def _encode(self, values: Array, encoded: Array) -> None:
        converter(self._dtype).narrow_all(encoded.view(self._dtype.storage), values)

    def _decode(self, encoded: Array, values: Array) -> None:
        converter(self._dtype).widen_all(values, encoded.view(self._dtype.storage))


class _Blocks(Codec):
    """Blocks of 256 integers with one scale each; first all scales (float32), then all integers."""

    name = "int8"
    block_values = BLOCK_VALUES

    def encoded_bytes(self, count: int) -> int:
        return 4 * -(-count // BLOCK_VALUES) + count

    def _encode(self, values: Array, encoded: Array) -> None:
        scales, integers = scales_and_integers(encoded, values.size)
        for place, blocks, length in _steps(values.size):
            shape = (-1, length)
            _encode_blocks(values[place].reshape(shape), scales[blocks], integers[place].reshape(shape))

    def _decode(self, encoded: Array, values: Array) -> None:
        scales, integers = scales_and_integers(encoded, values.size)
        for place, blocks, length in _steps(values.size):
            found = values[place].reshape(-1, length)
            np.copyto(found, integers[place].reshape(-1, length))
            THREAD_STATE.run(np.multiply, found, scales[blocks, None], out=found)


def _steps(count: int) -> Iterator[tuple[slice, slice, int]]:
    """The values of each step, its blocks, and their length: 256, or the rest in the last step."""
    whole, rest = divmod(count, BLOCK_VALUES)
    for first in range(0, whole, _STEP_BLOCKS):
        last = min(first + _STEP_BLOCKS, whole)
        yield slice(first * BLOCK_VALUES, last * BLOCK_VALUES), slice(first, last), BLOCK_VALUES
    if rest:
        yield slice(count - rest, count), slice(whole, whole + 1), rest


def _encode_blocks(values: Array, scales: Array, integers: Array) -> None:
    """Encodes blocks of shape (b, n): writes scales of shape (b,) and integers of shape (b, n)."""
    count = values.size
    bits = THREAD_STATE.scratch["I"][:count].reshape(values.shape)
    peaks = THREAD_STATE.scratch["I"][count : count + len(values)]
    np.bitwise_and(values.view(np.uint32), _MAGNITUDE, out=bits)
    np.maximum.reduce(bits, axis=1, out=peaks)  # as integers, which have the same order, in half the time
    run = THREAD_STATE.run
    run(np.divide, peaks.view(np.float32), _LARGEST, out=scales)
    run(np.maximum, scales, _SMALLEST_SCALE, out=scales)
    run(np.minimum, scales, _LARGEST_SCALE, out=scales)
    quotients = bits.view(np.float32)
    run(np.divide, values, scales[:, None], out=quotients)
    run(np.rint, quotients, out=quotients)
    run(np.copyto, integers, quotients, casting="unsafe")
    if np.maximum.reduce(peaks) >= _INFINITY:
        damaged = peaks >= _INFINITY
        # A NaN scale makes every product NaN. The integers are zeroed so that the bytes are deterministic.
        scales[damaged] = np.nan
        integers[damaged] = 0


_CODECS: Final[dict[str, Codec]] = {
    chosen.name: chosen for chosen in (_Half("bf16", DType.BFLOAT16), _Half("f16", DType.FLOAT16), _Blocks())
}
CODEC_NAMES: Final = tuple(_CODECS)


def codec(name: str) -> Codec:
    """The codec with this name: "bf16", "f16" or "int8".

    Raises:
        UsageError: for any other name.
    """
    try:
        return _CODECS[name]
    except (KeyError, TypeError):
        raise UsageError(f"wire={name!r} is no codec", hint=f"use one of: {', '.join(CODEC_NAMES)}") from None
