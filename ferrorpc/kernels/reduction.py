"""Reduction kernels on the CPU: one for every operator and dtype.

The canonical result of a reduction is the left fold in rank order, ((x0 op x1) op x2) ... Half types are accumulated in float32
and rounded once, at the end; MEAN divides before that rounding. Every fold in this order through a kernel has the same bits on
every transport. One exception comes from the processor: if two operands are NaN, the result is NaN, but either may be kept.

Kernels follow NumPy's arithmetic: integers wrap, SUM of bool is a logical or, MIN and MAX propagate NaN. They emit no warnings,
change no global state, and allocate only one cache-sized scratch buffer per thread. MEAN divides the parts of complex numbers:
NumPy's division by the number size + 0j makes NaN of infinities.

`reduce` reduces arrays that are all available, block by block: it reads every source from memory once and writes the result
once, and intermediate values stay in the cache. `load`, `fold` and `finish` do the same one array at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import numpy as np

from ferrorpc.errors import TensorMismatchError
from ferrorpc.kernels.half import Converter
from ferrorpc.kernels.registry import converter
from ferrorpc.kernels.thread_state import BLOCK_BYTES, THREAD_STATE
from ferrorpc.types import DType, ReduceOp, refusal

Array = np.ndarray[Any, Any]

_UFUNCS: Final[dict[ReduceOp, np.ufunc]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


@dataclass(frozen=True)
class Kernel:
    """One operator on one dtype, for a group of `size` ranks.

    All arrays are one-dimensional and of equal length. Storage arrays hold the dtype itself (bfloat16 as uint16); work arrays
    hold `work`, the dtype of the accumulator. An output may be the same memory as an input, but must not overlap it in part.
    """

    op: ReduceOp
    dtype: DType
    size: int
    work: np.dtype[Any]
    """float32 for the half types, otherwise the storage dtype."""
    _ufunc: np.ufunc = field(repr=False, compare=False)
    _mean: tuple[np.ufunc, Array] | None = field(repr=False, compare=False)
    """How MEAN divides a sum: np.divide and `size` (an array of shape (), much faster than a scalar). None for other operators.

    For a `size` that is a power of two: np.multiply and 1 / `size`, with the same bits in half the time.
    """

    def reduce(self, sources: Sequence[Array], out: Array) -> None:
        """out[:] = sources[0] op sources[1] op ..., folded in that order and finished.

        The bits are those that `load`, `fold` and `finish` give. `sources` and `out` are storage arrays. Sources may be
        read-only, and `out` may be the memory of any source.
        """
        if len(sources) == 2 and self._mean is None and len(out) > 1:
            THREAD_STATE.run(self._ufunc, sources[0], sources[1], out=out)
            return
        block = BLOCK_BYTES // self.work.itemsize
        if len(out) <= block:
            self._reduce_block(sources, out)
            return
        for start in range(0, len(out), block):
            cut = slice(start, start + block)
            self._reduce_block([source[cut] for source in sources], out[cut])

    def _reduce_block(self, sources: Sequence[Array], out: Array) -> None:
        """Reduces one block. Only the last source is folded into `out`, the others in scratch, since `out` may be a source."""
        left, last = sources[0], len(sources) - 1
        if last > 1:
            work = THREAD_STATE.scratch[self.work.char][: len(out)]
            for source in sources[1:last]:
                self._apply(left, source, work)
                left = work
        if last:
            self._apply(left, sources[last], out)
            left = out
        if last == 0 or self._mean is not None:
            self.finish(out, left)

    def load(self, work: Array, other: Array) -> None:
        """work[:] = other, which is a storage array or a work array."""
        np.copyto(work, other)

    def fold(self, work: Array, other: Array, under: bool = False) -> None:
        """work[:] = work op other, or other op work if `under`. `other` is a storage array or a work array."""
        left, right = (other, work) if under else (work, other)
        self._apply(left, right, work)

    def finish(self, storage: Array, work: Array) -> None:
        """storage[:] = work, divided by `size` for MEAN, rounded once to the dtype. `storage` may be `work` itself."""
        if self._mean is not None:
            divide, size = self._mean
            THREAD_STATE.run(divide, work, size, out=storage)
        elif not is_same_memory(storage, work):
            np.copyto(storage, work)

    def _apply(self, left: Array, right: Array, work: Array) -> None:
        if len(work) == 1:
            # NumPy treats an in-place call on one element as a reduction along it. There it multiplies complex numbers
            # without fused instructions, which gives other bits than for the same element in a longer array.
            work[:] = THREAD_STATE.run(self._ufunc, left, right)
        else:
            THREAD_STATE.run(self._ufunc, left, right, out=work)


@dataclass(frozen=True)
class ComplexKernel(Kernel):
    """A kernel for complex numbers, which finishes their parts."""

    def finish(self, storage: Array, work: Array) -> None:
        real = work.real.dtype
        super().finish(storage.view(real), work.view(real))


@dataclass(frozen=True)
class HalfKernel(Kernel):
    """A kernel for a half type. It widens and narrows values block by block, in the slots of this thread's converter."""

    def reduce(self, sources: Sequence[Array], out: Array) -> None:
        self.reduce_with(converter(self.dtype), sources, out)

    def reduce_with(self, convert: Converter, sources: Sequence[Array], out: Array) -> None:
        """As `reduce`, with the given converter."""
        if len(sources) == 2 and self._mean is None:
            done = convert.fold_two(self.op, sources[0], sources[1], out)
            if done == len(out):
                return
            sources, out = [source[done:] for source in sources], out[done:]
        first, *others = (convert.blocks(source) for source in sources)
        for number, target in enumerate(convert.blocks(out)):
            total = convert.widen(first[number], 0)
            for other in others:
                self._apply(total, convert.widen(other[number], 1), total)
            if self._mean is not None:
                divide, size = self._mean
                THREAD_STATE.run(divide, total, size, out=total)
            convert.narrow(target)

    def load(self, work: Array, other: Array) -> None:
        if other.dtype == self.work:
            super().load(work, other)
        else:
            converter(self.dtype).widen_all(work, other)

    def fold(self, work: Array, other: Array, under: bool = False) -> None:
        if other.dtype == self.work:
            super().fold(work, other, under)
            return
        convert = converter(self.dtype)
        for block, total in convert.pairs(other, work):
            wide = convert.widen(block, 1)
            left, right = (wide, total) if under else (total, wide)
            self._apply(left, right, total)

    def finish(self, storage: Array, work: Array) -> None:
        convert = converter(self.dtype)
        if self._mean is None:
            convert.narrow_all(storage, work)
            return
        divide, size = self._mean
        for block, total in convert.pairs(storage, work):
            THREAD_STATE.run(divide, total, size, out=convert.wide[0][: len(total)])
            convert.narrow(block)


@lru_cache(maxsize=1024)
def kernel(op: ReduceOp, dtype: DType, size: int) -> Kernel:
    """The kernel of an operator and a dtype for `size` ranks. It is cached.

    Raises:
        TensorMismatchError: the operator is not defined for this dtype; the message says why.
    """
    why_not = refusal(op, dtype)
    if why_not is not None:
        raise TensorMismatchError(why_not.reason, hint=why_not.hint)
    work = np.dtype(np.float32) if dtype.is_half else dtype.storage
    mean = _mean_of(size, work) if op is ReduceOp.MEAN else None
    chosen = HalfKernel if dtype.is_half else ComplexKernel if dtype.is_complex else Kernel
    return chosen(op, dtype, size, work, _UFUNCS[op], mean)


def _mean_of(size: int, work: np.dtype[Any]) -> tuple[np.ufunc, Array]:
    real = np.empty(0, work).real.dtype
    if size & (size - 1) == 0:
        return np.multiply, np.array(1 / size, real)
    return np.divide, np.array(size, real)


def is_same_memory(one: Array, other: Array) -> bool:
    """Whether two arrays of equal length share their memory, so that no copy is needed."""
    return one.dtype == other.dtype and bool(one.__array_interface__["data"] == other.__array_interface__["data"])
