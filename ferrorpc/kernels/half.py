"""Converts float16 and bfloat16 to float32 exactly, and back with one rounding, in blocks that fit in the cache.

NumPy casts float16 one element at a time, at 1 to 3 GB/s, and at 0.02 GB/s where values overflow or underflow. The converters
here use only whole-array operations that NumPy vectorises. They reach 5 to 35 GB/s of float32 and allocate nothing.

- float16 to float32: the bits are shifted to their places in a float32, and the result is multiplied by a power of two to
  correct the exponent bias. Blocks with infinities or NaN use a lookup table of all float16 values.
- float32 to float16: a power of two is added that makes the float32 adder drop the excess bits. The adder rounds to nearest,
  ties to even, also for subnormals.
- bfloat16 is the upper half of a float32. NumPy has no such dtype, so values are stored as uint16. Widening is a shift, and
  narrowing is a shift with rounding.

A NaN keeps its sign and the upper bits of its payload and becomes quiet, as with the conversion instructions of processors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, ClassVar, Final

import numpy as np

from ferrorpc.kernels.thread_state import THREAD_STATE, aligned
from ferrorpc.types import DType, ReduceOp

BLOCK_ELEMENTS: Final = 1 << 16
"""Most elements in a block. With smaller ones calls would take a third of the time; larger slots would not fit in the cache."""

Array = np.ndarray[Any, Any]

_FLOAT32: Final = np.dtype(np.float32)
_UINT32: Final = np.dtype(np.uint32)
_INFINITY: Final = 0x7F80_0000
_SIGN_OF_HALF: Final = 0x8000
_INFINITY_OF_HALF: Final = 0x7C00


class Converter(ABC):
    """Converts blocks of one half type through two float32 buffers, called slots. Each thread has its own converter.

    Args:
        wide: another converter's slots; None for new ones.

    Attributes:
        block_elements: the most elements in a block.
        wide: the two slots, float32 of shape (block_elements,).
    """

    dtype: ClassVar[DType]
    block_elements: ClassVar[int] = BLOCK_ELEMENTS

    def __init__(self, wide: tuple[Array, Array] | None = None) -> None:
        self.wide = wide or (aligned(self.block_elements, _FLOAT32), aligned(self.block_elements, _FLOAT32))

    def blocks(self, narrow: Array) -> Sequence[Any]:
        """Splits a storage array of any length into blocks for `widen` and `narrow`. The blocks must not outlive the array."""
        most = self.block_elements
        if len(narrow) <= most:
            return [narrow] if len(narrow) else []
        return [narrow[start : start + most] for start in range(0, len(narrow), most)]

    def pairs(self, narrow: Array, wide: Array) -> Iterable[tuple[Any, Array]]:
        """The blocks of a storage array, each with the elements at the same places of a float32 array of equal length."""
        if 0 < len(narrow) < self.block_elements:
            return ((narrow, wide),)
        return zip(self.blocks(narrow), Converter.blocks(self, wide), strict=True)

    @abstractmethod
    def widen(self, block: Any, slot: int) -> Array:
        """Converts a block of n elements to float32 in the given slot. Returns a view of the slot, of shape (n,)."""

    @abstractmethod
    def narrow(self, block: Any) -> None:
        """block[:] = the first values of slot 0, rounded to nearest, ties to even. Values out of range become infinite."""

    def fold_two(self, op: ReduceOp, left: Array, right: Array, out: Array) -> int:
        """out[:n] = left[:n] op right[:n], rounded once, for the n elements that need no slots; returns n, which may be 0.

        The caller reduces the remaining elements. All are storage arrays of equal length; `out` may be either operand's memory.
        """
        return 0

    def widen_all(self, wide: Array, narrow: Array) -> None:
        """wide[:] = narrow, for float32 and storage arrays of any equal length."""
        for block, values in self.pairs(narrow, wide):
            values[:] = self.widen(block, 0)

    def narrow_all(self, narrow: Array, wide: Array) -> None:
        """narrow[:] = wide, rounded, for storage and float32 arrays of any equal length."""
        for block, values in self.pairs(narrow, wide):
            self.wide[0][: len(values)] = values
            self.narrow(block)


class NumpyFloat16(Converter):
    """Converts float16 with NumPy only."""

    dtype = DType.FLOAT16

    _KEPT_BITS: Final = np.array(-0x7000_2000, np.int32)
    """Mask for the sign, exponent and fraction of a sign-extended float16 shifted left by 13."""
    _RESCALE: Final = np.array(2.0**112, np.float32)
    """Corrects the exponent bias, which is 112 greater in float32 than in float16."""
    _LEAST: Final = np.array(2.0**-136, np.float32)
    """The smallest float16 before that correction: a float32 subnormal, which is read as zero where subnormals are flushed."""
    _MAGNITUDE: Final = np.array(0x7FFF_FFFF, np.uint32)
    _EXPONENT: Final = np.array(_INFINITY, np.uint32)
    _OVERFLOW: Final = 0x4780_0000
    """The bits of 65536, which rounds to infinity, as does everything larger."""
    _QUIET_NAN: Final = 0x7E00
    _SMALLEST_EXPONENT: Final = 113 << 23
    """The exponent bits of 2**-14. All smaller magnitudes are subnormal and have the same unit in the last place."""
    _PUSH: Final = np.array(13 << 23, np.uint32)
    _DROPPED: Final = np.array(13, np.uint32)
    _LIFTED: Final = np.array(13, np.int32)
    _UPPER: Final = np.array(16, np.uint32)
    _SIGN: Final = np.array(_SIGN_OF_HALF, np.uint32)
    _REBASE: Final = np.array((126 << 10) & 0xFFFF, np.uint16)

    def __init__(self) -> None:
        super().__init__()
        magnitude, exponent, smallest = (aligned(BLOCK_ELEMENTS, _UINT32) for _ in range(3))
        smallest[:] = self._SMALLEST_EXPONENT
        self._scratch = self._cut = _Float16Scratch(self.wide, magnitude, exponent, smallest)

    def widen(self, block: Array, slot: int) -> Array:
        wide, bits = self._of_length(len(block)).slots[slot]
        signed = block.view(np.int16)
        if not self._is_plain(signed):
            _float16_values().take(block.view(np.uint16), out=wide, mode="wrap")
            return wide
        np.copyto(bits, signed)
        np.left_shift(bits, self._LIFTED, out=bits)
        np.bitwise_and(bits, self._KEPT_BITS, out=bits)
        np.multiply(wide, self._RESCALE, out=wide)
        return wide

    def narrow(self, block: Array) -> None:
        scratch, halves = self._of_length(len(block)), block.view(np.uint16)
        bits, magnitude = scratch.bits, scratch.magnitude
        np.bitwise_and(bits, self._MAGNITUDE, out=magnitude)
        largest = np.maximum.reduce(magnitude)
        if largest > self._OVERFLOW:
            np.minimum(magnitude, self._OVERFLOW, out=magnitude)
        self._round(halves, scratch)
        if largest > _INFINITY:
            unordered = np.isnan(scratch.slots[0][0])
            kept = bits[unordered]
            halves[unordered] = (kept >> 16 & _SIGN_OF_HALF) | self._QUIET_NAN | (kept >> 13 & 0x01FF)

    def _of_length(self, count: int) -> _Float16Scratch:
        """The scratch for a block of this length, cached because all blocks of an array but the last have the same length."""
        if self._cut.count != count:
            self._cut = self._scratch.cut(count)
        return self._cut

    def _is_plain(self, signed: Array) -> bool:
        """Whether all values are finite and this thread does not flush subnormals to zero (see `torch.set_flush_denormal`)."""
        return bool(
            np.maximum.reduce(signed) < _INFINITY_OF_HALF
            and np.maximum.reduce(signed.view(np.uint16)) < _SIGN_OF_HALF | _INFINITY_OF_HALF
            and np.multiply(self._LEAST, self._RESCALE)
        )

    def _round(self, narrow: Array, scratch: _Float16Scratch) -> None:
        """Rounds the magnitudes in `scratch` and writes them with their signs to `narrow`, as the bits of float16.

        Let e be the exponent of |x|. The lowest 11 bits of the float32 sum |x| + 2**(e + 13) are the bits of |x| to keep,
        rounded by the adder. So the fraction of the sum is |x| in units of its last place: 1024 to 2048, or less if |x| is
        subnormal. Adding e as the exponent gives the bits of a float16; a value of 2048 carries into the exponent correctly.
        Bits above bit 15 are dropped at the end.
        """
        magnitude, exponent = scratch.magnitude, scratch.exponent
        np.bitwise_and(magnitude, self._EXPONENT, out=exponent)
        np.maximum(exponent, scratch.smallest, out=exponent)
        np.add(exponent, self._PUSH, out=exponent)
        np.add(scratch.magnitude_value, scratch.exponent_value, out=scratch.magnitude_value)
        np.right_shift(exponent, self._DROPPED, out=exponent)
        np.add(magnitude, exponent, out=magnitude)
        sign = np.right_shift(scratch.bits, self._UPPER, out=exponent)
        np.bitwise_and(sign, self._SIGN, out=sign)
        np.add(magnitude, sign, out=magnitude)
        np.copyto(narrow, magnitude, casting="same_kind")
        np.subtract(narrow, self._REBASE, out=narrow)


class _Float16Scratch:
    """The working arrays of NumpyFloat16 and their views. Making the views would take longer than converting a short block.

    Args:
        wide: the converter's slots.
    """

    def __init__(self, wide: Sequence[Array], magnitude: Array, exponent: Array, smallest: Array) -> None:
        self.count = len(magnitude)
        self.slots = [(slot, slot.view(np.int32)) for slot in wide]
        self.bits = wide[0].view(np.uint32)
        self.magnitude, self.exponent, self.smallest = magnitude, exponent, smallest
        self.magnitude_value, self.exponent_value = magnitude.view(np.float32), exponent.view(np.float32)

    def cut(self, count: int) -> _Float16Scratch:
        """The same memory with views for a block of `count` elements."""
        wide = [slot[:count] for slot, _ in self.slots]
        return _Float16Scratch(wide, self.magnitude[:count], self.exponent[:count], self.smallest[:count])


@cache
def _float16_values() -> Array:
    """The float32 values of all float16, indexed by their bits. The table takes 256 KiB."""
    with np.errstate(all="ignore"):
        values = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    values.view(np.uint32)[np.isnan(values)] |= 0x0040_0000
    values.flags.writeable = False
    return values


class NumpyBFloat16(Converter):
    """Converts bfloat16 with NumPy. If ml_dtypes is given, it widens in half the time; its rounding is not faster."""

    dtype = DType.BFLOAT16

    _UPPER: Final = np.array(16, np.uint32)
    _LAST_PLACE: Final = np.array(1, np.uint32)
    _LESS_THAN_HALF_OF_IT: Final = np.array(0x7FFF, np.uint32)
    _QUIET: Final = 0x0040

    def __init__(self, ml_dtypes: Any = None, wide: tuple[Array, Array] | None = None) -> None:
        super().__init__(wide)
        self._logical: np.dtype[Any] | None = None if ml_dtypes is None else np.dtype(ml_dtypes.bfloat16)
        self._rounded = aligned(BLOCK_ELEMENTS, _UINT32)

    def widen(self, block: Array, slot: int) -> Array:
        wide = self.wide[slot][: len(block)]
        if self._logical is not None:
            np.copyto(wide, block.view(self._logical))
            return wide
        bits = wide.view(np.uint32)
        np.copyto(bits, block)
        np.left_shift(bits, self._UPPER, out=bits)
        return wide

    def narrow(self, block: Array) -> None:
        count = len(block)
        wide, rounded = self.wide[0][:count], self._rounded[:count]
        bits = wide.view(np.uint32)
        # Adding just under half a unit in the last place, plus one if the kept part is odd, rounds ties to even by the carry.
        np.right_shift(bits, self._UPPER, out=rounded)
        np.bitwise_and(rounded, self._LAST_PLACE, out=rounded)
        np.add(rounded, self._LESS_THAN_HALF_OF_IT, out=rounded)
        np.add(rounded, bits, out=rounded)
        np.right_shift(rounded, self._UPPER, out=rounded)
        np.copyto(block, rounded, casting="same_kind")
        if holds_nan(wide):
            # The carry of a NaN may have changed its exponent or sign, so use its upper half, made quiet.
            unordered = np.isnan(wide)
            block[unordered] = (bits[unordered] >> 16) | self._QUIET


def holds_nan(values: Array) -> bool:
    """Whether any value of a nonempty float array is NaN. The maximum propagates NaN, in one pass and without a temporary."""
    return bool(np.isnan(THREAD_STATE.run(np.maximum.reduce, values)))
