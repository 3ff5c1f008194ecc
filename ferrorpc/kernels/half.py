"""Half types to float32 and back, exactly and rounded once, in blocks that stay in the cache.

NumPy casts float16 one element at a time, at 1 to 3 GB/s, or 0.02 where values overflow or underflow. Here float16 widens
through a table of all its values and narrows by adding, in float32, the power of two that pushes out the bits to drop (the
adder then rounds to nearest, ties to even, subnormals too). NumPy has no bfloat16, so its values are held as uint16: the upper
half of a float32, so a shift one way and a rounded shift the other. All are whole-array operations that NumPy vectorises, at 5
to 35 GB/s of float32, and allocate nothing.

A NaN keeps its sign and the upper bits of its payload and is made quiet, as by the conversion instructions of processors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar, Final

import numpy as np

from ferrorpc.kernels.workplace import WORKPLACE, aligned
from ferrorpc.types import DType, ReduceOp

BLOCK_ELEMENTS: Final = 24_576
"""Elements of a block: 96 KiB of float32, below 32,768, from which PyTorch uses threads."""

Array = np.ndarray[Any, Any]

_FLOAT32: Final = np.dtype(np.float32)
_UINT32: Final = np.dtype(np.uint32)
_INFINITY: Final = 0x7F80_0000
_SIGN_OF_HALF: Final = 0x8000


class Converter(ABC):
    """Converts blocks of one half type, through two float32 slots of its own; each thread has its own converter.

    Attributes:
        wide: the slots, float32 of shape (BLOCK_ELEMENTS,).
    """

    name: ClassVar[str]
    dtype: ClassVar[DType]

    def __init__(self) -> None:
        self.wide = (aligned(BLOCK_ELEMENTS, _FLOAT32), aligned(BLOCK_ELEMENTS, _FLOAT32))

    def blocks(self, narrow: Array) -> Sequence[Any]:
        """A storage array of any length cut into what `widen` and `narrow` take. They are good while the array is."""
        if len(narrow) <= BLOCK_ELEMENTS:
            return [narrow] if len(narrow) else []
        return [narrow[start : start + BLOCK_ELEMENTS] for start in range(0, len(narrow), BLOCK_ELEMENTS)]

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

    _OVERFLOW: Final = 0x4780_0000
    """65536, which is rounded to infinity like all that is larger."""
    _QUIET_NAN: Final = 0x7E00
    _SMALLEST_EXPONENT: Final = 113 << 23
    """2**-14: all smaller magnitudes have the last place of this one."""

    def __init__(self) -> None:
        super().__init__()
        self._table = _float16_values()
        self._index = np.empty(BLOCK_ELEMENTS, np.intp)
        self._magnitude = aligned(BLOCK_ELEMENTS, _UINT32)
        self._exponent = aligned(BLOCK_ELEMENTS, _UINT32)
        self._smallest = aligned(BLOCK_ELEMENTS, _UINT32)
        self._smallest[:] = self._SMALLEST_EXPONENT

    def widen(self, block: Array, slot: int) -> Array:
        count = len(block)
        index, wide = self._index[:count], self.wide[slot][:count]
        np.copyto(index, block.view(np.uint16))
        self._table.take(index, out=wide, mode="wrap")
        return wide

    def narrow(self, block: Array) -> None:
        count = len(block)
        wide, magnitude = self.wide[0][:count], self._magnitude[:count]
        bits = wide.view(np.uint32)
        np.bitwise_and(bits, 0x7FFF_FFFF, out=magnitude)
        largest = np.maximum.reduce(magnitude)
        if largest > self._OVERFLOW:
            np.minimum(magnitude, self._OVERFLOW, out=magnitude)
        self._round(block.view(np.uint16), bits, magnitude, self._exponent[:count])
        if largest > _INFINITY:
            unordered = np.isnan(wide)
            kept = bits[unordered]
            block.view(np.uint16)[unordered] = (kept >> 16 & _SIGN_OF_HALF) | self._QUIET_NAN | (kept >> 13 & 0x01FF)

    def _round(self, narrow: Array, bits: Array, magnitude: Array, exponent: Array) -> None:
        """|x| + 2**(e + 13), where e is the exponent of |x|, has the 11 kept bits of |x| as the last of its own.

        So the integer below the sum's exponent is |x| in units of its last place, from 1024 to 2048, or less if subnormal.
        With e in place it makes the bits of a float16: a full 2048 carries into the exponent, where it belongs. What is above
        bit 15 is dropped at the end.
        """
        np.bitwise_and(magnitude, _INFINITY, out=exponent)
        np.maximum(exponent, self._smallest[: len(exponent)], out=exponent)
        np.add(exponent, 13 << 23, out=exponent)
        np.add(magnitude.view(np.float32), exponent.view(np.float32), out=magnitude.view(np.float32))
        np.right_shift(exponent, 13, out=exponent)
        np.add(magnitude, exponent, out=magnitude)
        sign = np.right_shift(bits, 16, out=exponent)
        np.bitwise_and(sign, _SIGN_OF_HALF, out=sign)
        np.add(magnitude, sign, out=magnitude)
        np.copyto(narrow, magnitude, casting="same_kind")
        np.subtract(narrow, (126 << 10) & 0xFFFF, out=narrow)


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

    _HALF_OF_LAST_PLACE: Final = 0x7FFF
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
        np.left_shift(bits, 16, out=bits)
        return wide

    def narrow(self, block: Array) -> None:
        count = len(block)
        wide, rounded = self.wide[0][:count], self._rounded[:count]
        bits = wide.view(np.uint32)
        # Half of the last kept place, plus one when the kept part is odd: the carry then rounds ties to even.
        np.right_shift(bits, 16, out=rounded)
        np.bitwise_and(rounded, 1, out=rounded)
        np.add(rounded, self._HALF_OF_LAST_PLACE, out=rounded)
        np.add(rounded, bits, out=rounded)
        np.right_shift(rounded, 16, out=rounded)
        np.copyto(block, rounded, casting="same_kind")
        if holds_nan(wide):
            # The carry may have run through the fraction into the exponent or the sign: keep the upper half, made quiet.
            unordered = np.isnan(wide)
            block[unordered] = (bits[unordered] >> 16) | self._QUIET


def holds_nan(values: Array) -> bool:
    """Whether one of these floats, at least one, is NaN; it goes through a maximum, which is one pass and writes nothing."""
    return bool(np.isnan(WORKPLACE.run(np.maximum.reduce, values)))
