"""Half types to float32 and back with PyTorch's vectorised copies: 25 to 75 GB/s of float32.

Whole blocks of large arrays are copied straight from and to their memory. What is shorter goes through scratch of a few
lengths, so that its tail is treated by the same instructions as its middle: one by one, PyTorch makes other NaN of signalling
ones. Blocks stay below the length that PyTorch would split among threads, for the other cores belong to other ranks.

Two sources need no float32 scratch: PyTorch adds and multiplies half values in float32, element by element, and rounds once.
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
"""Of a block at most: below 32,768, from which PyTorch uses threads; a multiple of its vectors."""

_LENGTHS: Final = (1_024, 4_096, _BLOCK_ELEMENTS)
"""What is converted at once; the shortest that fits is taken."""

_VECTOR_ELEMENTS: Final = 64

_STRETCH_ELEMENTS: Final = 1 << 18
"""What two sources are folded in at once where PyTorch has no threads to split it among: nearer to the memory's speed."""

_PLUS_INFINITY: Final = 0x7F80
_MINUS_INFINITY: Final = 0xFF80


class TorchFloat16(Converter):
    """float16 with PyTorch. Its blocks are tensors over the whole ones, and an array for the tail."""

    name = "torch"
    dtype = DType.FLOAT16
    block_elements = _BLOCK_ELEMENTS
    half: ClassVar[str] = "float16"

    def __init__(self, torch: Any) -> None:
        super().__init__()
        self._torch = torch
        self._half = getattr(torch, self.half)
        self._two = {ReduceOp.SUM: torch.add, ReduceOp.PRODUCT: torch.mul}
        self._scratch = aligned(_STRETCH_ELEMENTS, np.dtype(np.uint16))
        self._halves = torch.from_numpy(self._scratch.view(np.int16)).view(self._half)
        self._slots = [torch.from_numpy(slot) for slot in self.wide]
        self._of_length = [(length, self._halves[:length], [slot[:length] for slot in self._slots]) for length in _LENGTHS]

    def blocks(self, narrow: Array) -> Sequence[Any]:
        whole = len(narrow) // _BLOCK_ELEMENTS * _BLOCK_ELEMENTS
        if not whole or not narrow.flags.aligned:
            return super().blocks(narrow)
        return [*self._tensor(narrow[:whole]).split(_BLOCK_ELEMENTS), *super().blocks(narrow[whole:])]

    def _tensor(self, narrow: Array) -> Any:
        """A tensor over the memory of an array. It may not outlive the array, nor be written if that is read-only."""
        if narrow.flags.writeable:
            return self._torch.from_numpy(narrow.view(np.int16)).view(self._half)
        # Through ctypes, because PyTorch warns of arrays that are read-only, as messages are.
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
        """Arrays of equal length as tensors side by side, but for a tail that does not fill the widest vectors.

        There are none for short arrays, for which it takes longer, and for arrays that are not aligned.
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
    """bfloat16 rounded with PyTorch, but for blocks that hold NaN, of which it drops sign and payload.

    For widening, NumPy and ml_dtypes are faster.
    """

    dtype = DType.BFLOAT16
    half = "bfloat16"

    def __init__(self, torch: Any, ml_dtypes: Any = None) -> None:
        super().__init__(torch)
        self._numpy = NumpyBFloat16(ml_dtypes)
        self._numpy.wide = self.wide

    def blocks(self, narrow: Array) -> Sequence[Array]:
        return Converter.blocks(self, narrow)

    def widen(self, block: Array, slot: int) -> Array:
        return self._numpy.widen(block, slot)

    def narrow(self, block: Array) -> None:
        super().narrow(block)
        if _holds_nan(block):
            self._numpy.narrow(block)

    def fold_two(self, op: ReduceOp, left: Array, right: Array, out: Array) -> int:
        """Up to the first stretch with a NaN in its result."""
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
    """Whether one of these bfloat16 is NaN: beyond an infinity as a signed integer, or if negative as an unsigned one."""
    return bool(np.maximum.reduce(halves.view(np.int16)) > _PLUS_INFINITY or np.maximum.reduce(halves) > _MINUS_INFINITY)
