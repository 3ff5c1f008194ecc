"""Converts half types to float32 and back with PyTorch's vectorised copies, at 25 to 75 GB/s of float32.

Full blocks of large arrays are copied directly from and to their memory. Shorter ones go through scratch buffers of a few fixed
lengths, so that vector instructions also convert the tail: PyTorch's scalar code turns signalling NaN into different NaN.
Blocks are shorter than what PyTorch would split among threads, because the other cores belong to other ranks.

Reducing two sources needs no float32 scratch: PyTorch adds and multiplies half values in float32 and rounds once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from ferrorpc.kernels.half import Array, Converter, NumpyBFloat16
from ferrorpc.kernels.thread_state import aligned
from ferrorpc.types import DType, ReduceOp

_BLOCK_ELEMENTS: Final = 32_704
"""Most elements in a block: a multiple of PyTorch's vector lengths, below the 32,768 from which PyTorch uses threads."""

_LENGTHS: Final = (1_024, 4_096, _BLOCK_ELEMENTS)
"""The lengths that are converted at once. A partial block uses the shortest that fits."""

_VECTOR_ELEMENTS: Final = 64

_STRETCH_ELEMENTS: Final = 1 << 18
"""Elements of two sources reduced at once if PyTorch has only one thread. Longer stretches come closer to memory bandwidth."""

_PLUS_INFINITY: Final = 0x7F80
_MINUS_INFINITY: Final = 0xFF80


class TorchFloat16(Converter):
    """Converts float16 with PyTorch. Full blocks are tensors over the array's memory; the tail is a NumPy array."""

    dtype = DType.FLOAT16
    block_elements = _BLOCK_ELEMENTS
    half: ClassVar[str] = "float16"

    def __init__(self, torch: Any) -> None:
        super().__init__()
        self._torch = torch
        self._half = getattr(torch, self.half)
        self._two = {ReduceOp.SUM: torch.add, ReduceOp.PRODUCT: torch.mul}
        self._scratch = aligned(_STRETCH_ELEMENTS, np.dtype(np.uint16))
        with torch.inference_mode(False):  # torch writes to what is made in that mode there only
            self._halves = torch.from_numpy(self._scratch.view(np.int16)).view(self._half)
            self._slots = [torch.from_numpy(slot) for slot in self.wide]
            self._of_length = [(length, self._halves[:length], [slot[:length] for slot in self._slots]) for length in _LENGTHS]

    def blocks(self, narrow: Array) -> Sequence[Any]:
        whole = len(narrow) // _BLOCK_ELEMENTS * _BLOCK_ELEMENTS
        if not whole or not narrow.flags.aligned:
            return super().blocks(narrow)
        return [*self._tensor(narrow[:whole]).split(_BLOCK_ELEMENTS), *super().blocks(narrow[whole:])]

    def _tensor(self, narrow: Array) -> Any:
        """A tensor over an array's memory. It must not outlive the array, nor be written to if the array is read-only."""
        if narrow.flags.writeable:
            return self._torch.from_numpy(narrow.view(np.int16)).view(self._half)
        # Received messages are read-only, and PyTorch warns about read-only arrays. ctypes avoids the warning.
        memory = (ctypes.c_uint16 * len(narrow)).from_address(narrow.__array_interface__["data"][0])
        return self._torch.frombuffer(memory, dtype=self._half)

    def widen(self, block: Any, slot: int) -> Array:
        if not isinstance(block, np.ndarray):
            self._slots[slot].copy_(block)
            return self.wide[slot]
        count = len(block)
        self._scratch[:count] = block.view(np.uint16)
        halves, slots = self._fitting(count)
        slots[slot].copy_(halves)
        return self.wide[slot][:count]

    def narrow(self, block: Any) -> None:
        if not isinstance(block, np.ndarray):
            block.copy_(self._slots[0])
            return
        count = len(block)
        halves, slots = self._fitting(count)
        halves.copy_(slots[0])
        block.view(np.uint16)[:] = self._scratch[:count]

    def fold_two(self, op: ReduceOp, left: Array, right: Array, out: Array) -> int:
        two = self._two.get(op)
        done = 0
        if two is not None:
            for one, other, target in self._stretches(left, right, out):
                two(one, other, out=target)
                done += one.numel()
        return done

    def _stretches(self, *arrays: Array) -> Iterator[tuple[Any, ...]]:
        """Splits arrays of equal length into tensors and yields them side by side, without the tail that fills no full vector.

        Yields nothing for short arrays, where this would be slower, and for unaligned arrays.
        """
        count = len(arrays[0]) // _VECTOR_ELEMENTS * _VECTOR_ELEMENTS
        if count < _LENGTHS[0] or not all(array.flags.aligned for array in arrays):
            return iter(())
        length = _STRETCH_ELEMENTS if self._torch.get_num_threads() == 1 else _BLOCK_ELEMENTS
        return zip(*(self._tensor(array[:count]).split(length) for array in arrays), strict=True)

    def _fitting(self, count: int) -> tuple[Any, Any]:
        for length, halves, slots in self._of_length:
            if count <= length:
                return halves, slots
        raise AssertionError(f"{count} elements are more than a block of {_BLOCK_ELEMENTS}")


class TorchBFloat16(TorchFloat16):
    """Converts bfloat16: PyTorch rounds, except for blocks with NaN, whose sign and payload it would drop.

    NumPy or ml_dtypes widens, because they are faster at it.
    """

    dtype = DType.BFLOAT16
    half = "bfloat16"

    def __init__(self, torch: Any, ml_dtypes: Any = None) -> None:
        super().__init__(torch)
        self._numpy = NumpyBFloat16(ml_dtypes, self.wide)

    def blocks(self, narrow: Array) -> Sequence[Array]:
        return Converter.blocks(self, narrow)

    def widen(self, block: Array, slot: int) -> Array:
        return self._numpy.widen(block, slot)

    def narrow(self, block: Array) -> None:
        super().narrow(block)
        if _holds_nan(block):
            self._numpy.narrow(block)

    def fold_two(self, op: ReduceOp, left: Array, right: Array, out: Array) -> int:
        """As in the base class, up to the first stretch whose result contains a NaN."""
        two = self._two.get(op)
        done = 0
        if two is not None:
            for one, other in self._stretches(left, right):
                count = one.numel()
                two(one, other, out=self._halves[:count])
                if _holds_nan(self._scratch[:count]):
                    break
                out[done : done + count] = self._scratch[:count]
                done += count
        return done


def _holds_nan(halves: Array) -> bool:
    """Whether any bfloat16 is NaN: its bits exceed +infinity as signed integers, or -infinity as unsigned ones."""
    return bool(np.maximum.reduce(halves.view(np.int16)) > _PLUS_INFINITY or np.maximum.reduce(halves) > _MINUS_INFINITY)
