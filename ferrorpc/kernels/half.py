"""Half types to float32 and back, exactly and rounded once, in blocks that stay in the cache.

NumPy casts float16 one element at a time, at 1 to 3 GB/s, or 0.02 where values overflow or underflow. Here float16 widens by
moving its bits to where float32 has them and multiplying by the difference of the exponents' biases (infinities and NaN
through a table of all values), and narrows by adding, in float32, the power of two that pushes out the bits to drop (the
adder then rounds to nearest, ties to even, subnormals too). NumPy has no bfloat16, so its values are held as uint16: the upper
half of a float32, so a shift one way and a rounded shift the other. All are whole-array operations that NumPy vectorises, at 5
to 35 GB/s of float32, and allocate nothing.

A NaN keeps its sign and the upper bits of its payload and is made quiet, as by the conversion instructions of processors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from functools import cache
from typing import Any, ClassVar, Final

import numpy as np

from ferrorpc.kernels.thread_state import THREAD_STATE, aligned
from ferrorpc.types import DType, ReduceOp

BLOCK_ELEMENTS: Final = 1 << 16
"""Elements of a block at most: with less, a third of the time would be calls; with more, the slots would leave the cache."""

Array = np.ndarray[Any, Any]

_FLOAT32: Final = np.dtype(np.float32)
_UINT32: Final = np.dtype(np.uint32)
_INFINITY: Final = 0x7F80_0000
_SIGN_OF_HALF: Final = 0x8000
_INFINITY_OF_HALF: Final = 0x7C00


class Converter(ABC):
    """Converts blocks of one half type, through two float32 slots of its own; each thread has its own converter.

    Attributes:
        block_elements: of a block at most.
        wide: the slots, float32 of shape (block_elements,).
    """

    name: ClassVar[str]
    dtype: ClassVar[DType]
    block_elements: ClassVar[int] = BLOCK_ELEMENTS

    def __init__(self) -> None:
        self.wide = (aligned(self.block_elements, _FLOAT32), aligned(self.block_elements, _FLOAT32))

    def blocks(self, narrow: Array) -> Sequence[Any]:
        """A storage array of any length cut into what `widen` and `narrow` take. They are good while the array is."""
        most = self.block_elements
        if len(narrow) <= most:
            return [narrow] if len(narrow) else []
        return [narrow[start : start + most] for start in range(0, len(narrow), most)]

    @abstractmethod
    def widen(self, block: Any, slot: int) -> Array:
        """The values of a block of n elements, as float32 of shape (n,) in that slot."""

    @abstractmethod
    def narrow(self, block: Any) -> None:
        """block[:] = what slot 0 begins with, rounded to nearest, ties to even; what is too large becomes infinite."""

    def fold_two(self, op: ReduceOp, left: Array, right: Array, out: Array) -> int:
        """out[:n] = left[:n] op right[:n], rounded, for as many elements n as there is a quicker way than by slots; returns n.

        All are storage arrays of equal length; `out` may be the memory of either.
        """
        return 0

    def widen_all(self, wide: Array, narrow: Array) -> None:
        """wide[:] = narrow, for float32 and storage arrays of any equal length."""
        start = 0
        for block in self.blocks(narrow):
            values = self.widen(block, 0)
            wide[start : start + len(values)] = values
            start += len(values)

    def narrow_all(self, narrow: Array, wide: Array) -> None:
        """narrow[:] = wide, rounded, for storage and float32 arrays of any equal length."""
        start = 0
        for block in self.blocks(narrow):
            count = len(block)
            self.wide[0][:count] = wide[start : start + count]
            self.narrow(block)
            start += count


class NumpyFloat16(Converter):
    """float16 with NumPy alone."""

    name = "numpy"
    dtype = DType.FLOAT16

    _KEPT_BITS: Final = np.array(-0x7000_2000, np.int32)
    """Sign, exponent and fraction of a float16 whose lowest bit lies at bit 13; between them its sign, extended."""
    _RESCALE: Final = np.array(2.0**112, np.float32)
    """Makes up for the exponent bias of float32, which is greater by 112."""
    _LEAST: Final = np.array(2.0**-136, np.float32)
    """The least float16 before that; a processor that is told to take subnormals for zero takes it for zero."""
    _MAGNITUDE: Final = np.array(0x7FFF_FFFF, np.uint32)
    _EXPONENT: Final = np.array(_INFINITY, np.uint32)
    _OVERFLOW: Final = 0x4780_0000
    """65536, which is rounded to infinity like all that is larger."""
    _QUIET_NAN: Final = 0x7E00
    _SMALLEST_EXPONENT: Final = 113 << 23
    """2**-14: all smaller magnitudes have the last place of this one."""
    _PUSH: Final = np.array(13 << 23, np.uint32)
    _DROPPED: Final = np.array(13, np.uint32)
    _LIFTED: Final = np.array(13, np.int32)
    _UPPER: Final = np.array(16, np.uint32)
    _SIGN: Final = np.array(_SIGN_OF_HALF, np.uint32)
    _REBASE: Final = np.array((126 << 10) & 0xFFFF, np.uint16)

    def __init__(self) -> None:
        super().__init__()
        self._scratch = _Float16Scratch(self.wide)
        self._cut = self._scratch

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
        """The scratch for a block; all but the last block of an array are of one length."""
        if self._cut.count != count:
            self._cut = self._scratch.cut(count)
        return self._cut

    def _is_plain(self, signed: Array) -> bool:
        """Whether all values are finite, and subnormals are numbers here (`torch.set_flush_denormal` makes them zero)."""
        return bool(
            np.maximum.reduce(signed) < _INFINITY_OF_HALF
            and np.maximum.reduce(signed.view(np.uint16)) < _SIGN_OF_HALF | _INFINITY_OF_HALF
            and np.multiply(self._LEAST, self._RESCALE)
        )

    def _round(self, narrow: Array, scratch: _Float16Scratch) -> None:
        """|x| + 2**(e + 13), where e is the exponent of |x|, has the 11 kept bits of |x| as the last of its own.

        So the integer below the sum's exponent is |x| in units of its last place, from 1024 to 2048, or less if subnormal.
        With e in place it makes the bits of a float16: a full 2048 carries into the exponent, where it belongs. What is above
        bit 15 is dropped at the end.
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
    """The arrays that NumpyFloat16 works in, and their views, which would take longer to make than a short block.

    Args:
        wide: the converter's slots.
    """

    def __init__(self, wide: Sequence[Array]) -> None:
        self.magnitude = aligned(BLOCK_ELEMENTS, _UINT32)
        self.exponent = aligned(BLOCK_ELEMENTS, _UINT32)
        self.smallest = aligned(BLOCK_ELEMENTS, _UINT32)
        self.smallest[:] = NumpyFloat16._SMALLEST_EXPONENT
        self._look(wide)

    def _look(self, wide: Sequence[Array]) -> None:
        self.count = len(self.magnitude)
        self.slots = [(slot, slot.view(np.int32)) for slot in wide]
        self.bits = wide[0].view(np.uint32)
        self.magnitude_value, self.exponent_value = self.magnitude.view(np.float32), self.exponent.view(np.float32)

    def cut(self, count: int) -> _Float16Scratch:
        """The same memory for a shorter block."""
        shorter = copy(self)
        shorter.magnitude, shorter.exponent = self.magnitude[:count], self.exponent[:count]
        shorter.smallest = self.smallest[:count]
        shorter._look([wide[:count] for wide, _ in self.slots])
        return shorter


@cache
def _float16_values() -> Array:
    """The float32 value of every float16, by its bits; 256 KiB."""
    with np.errstate(all="ignore"):
        values = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    values.view(np.uint32)[np.isnan(values)] |= 0x0040_0000
    values.flags.writeable = False
    return values


class NumpyBFloat16(Converter):
    """bfloat16 with NumPy; if given, ml_dtypes widens, in half the time. (Its rounding is no quicker.)"""

    name = "numpy"
    dtype = DType.BFLOAT16

    _UPPER: Final = np.array(16, np.uint32)
    _LAST_PLACE: Final = np.array(1, np.uint32)
    _LESS_THAN_HALF_OF_IT: Final = np.array(0x7FFF, np.uint32)
    _QUIET: Final = 0x0040

    def __init__(self, ml_dtypes: Any = None) -> None:
        super().__init__()
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
        # Half of the last kept place, plus one when the kept part is odd: the carry then rounds ties to even.
        np.right_shift(bits, self._UPPER, out=rounded)
        np.bitwise_and(rounded, self._LAST_PLACE, out=rounded)
        np.add(rounded, self._LESS_THAN_HALF_OF_IT, out=rounded)
        np.add(rounded, bits, out=rounded)
        np.right_shift(rounded, self._UPPER, out=rounded)
        np.copyto(block, rounded, casting="same_kind")
        if holds_nan(wide):
            # The carry may have run through the fraction into the exponent or the sign: keep the upper half, made quiet.
            unordered = np.isnan(wide)
            block[unordered] = (bits[unordered] >> 16) | self._QUIET


def holds_nan(values: Array) -> bool:
    """Whether one of these floats, at least one, is NaN; it goes through a maximum, which is one pass and writes nothing."""
    return bool(np.isnan(THREAD_STATE.run(np.maximum.reduce, values)))
