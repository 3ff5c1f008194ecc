"""Lossy codecs for messages of float32: what `wire="bf16"`, "f16" and "int8" put on the network. Sums stay in float32.

| name | bytes per value | error of a finite value |
|------|-----------------|-------------------------|
| bf16 | 2               | half of the last of 8 significant bits |
| f16  | 2               | half of the last of 11 significant bits; beyond 65504 it becomes infinite |
| int8 | 1 + 4 / 256     | half a scale, which is the block's largest magnitude / 127 (at least 2**-126) |

Each is a pure function of the values, so every rank that encodes or decodes the same ones gets the same bits. Rounding is to
nearest, ties to even. NaN and infinity stay visible: bf16 and f16 keep them, and a block of int8 that holds either decodes to
NaN throughout, so that looking for an overflow after the exchange still finds it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Final, TypeAlias

import numpy as np

from ferrorpc.errors import CodecError, UsageError

BLOCK_VALUES: Final = 256
"""Values of int8 that share one scale."""

_STEP_VALUES: Final = 64 * BLOCK_VALUES
"""Values worked on at a time: 64 KiB of scratch, which stays in a core's second-level cache."""

_LARGEST: Final = np.float32(127)
_SMALLEST_SCALE: Final = np.float32(2.0**-126)
_LARGEST_SCALE: Final = np.nextafter(np.finfo(np.float32).max / _LARGEST, np.float32(0))
"""One step below the largest float32 / 127, which times 127 rounds to infinity."""

_HALF_OF_LAST_PLACE: Final = np.uint32(0x7FFF)
_QUIET: Final = np.uint32(0x0040)
_UPPER_HALF: Final = np.uint32(16)

Array: TypeAlias = np.ndarray[Any, Any]


class Codec(ABC):
    """float32 to bytes and back. Arrays are one-dimensional and contiguous; results are new ones."""

    name: str

    @abstractmethod
    def encoded_bytes(self, count: int) -> int:
        """Bytes that `count` values take."""

    @abstractmethod
    def encode(self, values: Array) -> Array:
        """uint8 of shape (encoded_bytes(n),) from float32 of shape (n,)."""

    def decode(self, encoded: Array, count: int) -> Array:
        """float32 of shape (count,) from uint8 of shape (encoded_bytes(count),).

        Raises:
            CodecError: the bytes are not those of `count` values.
        """
        if encoded.size != self.encoded_bytes(count):
            raise CodecError(
                f"{encoded.size} bytes are not {count} values as {self.name}, which take {self.encoded_bytes(count)}"
            )
        return self._decode(encoded, count)

    @abstractmethod
    def _decode(self, encoded: Array, count: int) -> Array:
        """As `decode`, once the size is known to fit."""


class _BrainFloat(Codec):
    """The upper half of a float32, rounded."""

    name = "bf16"

    def encoded_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values: Array) -> Array:
        narrow = np.empty(values.size, np.uint16)
        scratch = np.empty(min(values.size, _STEP_VALUES), np.uint32)
        for start in range(0, values.size, _STEP_VALUES):
            wide = values[start : start + _STEP_VALUES]
            bits, rounded = wide.view(np.uint32), scratch[: wide.size]
            # Half of the last kept place, plus one where the kept part is odd: the carry then rounds ties to even.
            np.right_shift(bits, _UPPER_HALF, out=rounded)
            np.bitwise_and(rounded, 1, out=rounded)
            np.add(rounded, _HALF_OF_LAST_PLACE, out=rounded)
            np.add(rounded, bits, out=rounded)
            np.right_shift(rounded, _UPPER_HALF, out=rounded)
            unordered = np.isnan(wide)
            if unordered.any():
                # The carry may have run through the fraction into the exponent: keep the upper half, made quiet.
                rounded[unordered] = (bits[unordered] >> _UPPER_HALF) | _QUIET
            narrow[start : start + _STEP_VALUES] = rounded
        return narrow.view(np.uint8)

    def _decode(self, encoded: Array, count: int) -> Array:
        wide = np.empty(count, np.float32)
        np.left_shift(encoded.view(np.uint16), 16, out=wide.view(np.uint32), dtype=np.uint32)
        return wide


class _Half(Codec):
    """IEEE 754 binary16."""

    name = "f16"

    def encoded_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values: Array) -> Array:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return values.astype(np.float16).view(np.uint8)

    def _decode(self, encoded: Array, count: int) -> Array:
        with np.errstate(invalid="ignore"):
            return encoded.view(np.float16).astype(np.float32)


class _Blocks(Codec):
    """Blocks of 256 integers with one scale each; first all scales (float32), then all integers."""

    name = "int8"

    def encoded_bytes(self, count: int) -> int:
        return 4 * -(-count // BLOCK_VALUES) + count

    def encode(self, values: Array) -> Array:
        encoded = np.empty(self.encoded_bytes(values.size), np.uint8)
        scales, integers = _parts(encoded, values.size)
        scratch = np.empty(min(values.size, _STEP_VALUES), np.float32)
        for start in range(0, values.size, _STEP_VALUES):
            part = values[start : start + _STEP_VALUES]
            first = start // BLOCK_VALUES
            whole = part.size // BLOCK_VALUES
            cut = whole * BLOCK_VALUES
            if whole:
                _encode_blocks(
                    part[:cut].reshape(whole, BLOCK_VALUES),
                    scales[first : first + whole],
                    integers[start : start + cut].reshape(whole, BLOCK_VALUES),
                    scratch[:cut].reshape(whole, BLOCK_VALUES),
                )
            if cut < part.size:
                rest = slice(start + cut, start + part.size)
                _encode_blocks(values[None, rest], scales[-1:], integers[None, rest], scratch[None, : part.size - cut])
        return encoded

    def _decode(self, encoded: Array, count: int) -> Array:
        scales, integers = _parts(encoded, count)
        values = np.empty(count, np.float32)
        cut = count // BLOCK_VALUES * BLOCK_VALUES
        with np.errstate(invalid="ignore", over="ignore"):
            np.multiply(
                integers[:cut].reshape(-1, BLOCK_VALUES),
                scales[: cut // BLOCK_VALUES, None],
                out=values[:cut].reshape(-1, BLOCK_VALUES),
            )
            if cut < count:
                np.multiply(integers[cut:], scales[-1], out=values[cut:])
        return values


def _encode_blocks(values: Array, scales: Array, integers: Array, scratch: Array) -> None:
    """Blocks of shape (b, n): scales of shape (b,), integers and scratch of shape (b, n) are written."""
    np.abs(values, out=scratch)
    np.max(scratch, axis=1, out=scales)
    damaged = ~np.isfinite(scales)
    np.divide(scales, _LARGEST, out=scales)
    np.clip(scales, _SMALLEST_SCALE, _LARGEST_SCALE, out=scales)
    with np.errstate(invalid="ignore"):
        np.divide(values, scales[:, None], out=scratch)
    np.rint(scratch, out=scratch)
    np.clip(scratch, -_LARGEST, _LARGEST, out=scratch)
    if damaged.any():
        # A scale of NaN is enough: every product with it is NaN. The integers are zeroed, so that the bytes are defined.
        scales[damaged] = np.nan
        scratch[damaged] = 0
    integers[...] = scratch


def _parts(encoded: Array, count: int) -> tuple[Array, Array]:
    """Scales and integers of encoded blocks, as views."""
    scale_bytes = 4 * -(-count // BLOCK_VALUES)
    return encoded[:scale_bytes].view(np.float32), encoded[scale_bytes:].view(np.int8)


_CODECS: Final[dict[str, Codec]] = {chosen.name: chosen for chosen in (_BrainFloat(), _Half(), _Blocks())}
CODEC_NAMES: Final = tuple(_CODECS)


def codec(name: str) -> Codec:
    """The codec with this name: "bf16", "f16" or "int8".

    Raises:
        UsageError: for any other name.
    """
    found = _CODECS.get(name)
    if found is None:
        raise UsageError(f"wire={name!r} is no codec", hint=f"use one of: {', '.join(CODEC_NAMES)}")
    return found
