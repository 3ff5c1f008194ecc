"""Reduction kernels: how values of one dtype become one, for every operator.

The canonical result of a reduction is the left fold in rank order, ((x0 op x1) op x2) ... Half types are folded in float32 and
rounded once, at the end; MEAN divides before that rounding. Whatever folds in this order through a kernel has the same bits
on every lane. (One exception, from the processor itself: when two operands are NaN, which of the two is kept is open. That
the result is NaN is not.)

Kernels follow NumPy's own arithmetic: integers wrap, SUM of bool is a logical or, NaN goes through MIN and MAX. They warn
of nothing, change no global state, and allocate nothing but, once per thread, a scratch that fits the cache.

`reduce` folds arrays that are all at hand, block by block: every source is read from memory once and the result written once,
while what is between stays in the cache. `load`, `fold` and `finish` do the same one array at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import numpy as np

from ferrorpc.errors import TensorMismatchError
from ferrorpc.kernels.half import BLOCK_ELEMENTS, narrow_bfloat16, widen_bfloat16
from ferrorpc.kernels.workplace import BLOCK_BYTES, WORKPLACE
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

    All arrays are one-dimensional and of equal length; `storage` ones hold the dtype (bfloat16 as uint16), `work` ones hold
    `work`, the dtype sums are kept in. An array may be written in place of itself, never overlap in part.
    """

    op: ReduceOp
    dtype: DType
    size: int
    work: np.dtype[Any]
    """float32 for the half types, else the storage dtype itself."""
    _ufunc: np.ufunc = field(repr=False)
    _is_one_pass: bool = field(repr=False)
    """Whether folding the last source gives the result itself: nothing to divide or to round."""

    def reduce(self, sources: Sequence[Array], out: Array) -> None:
        """out[:] = sources[0] op sources[1] op ..., folded in that order and finished.

        Bit for bit what `load`, `fold` and `finish` give. `sources` and `out` are storage arrays; sources may be read-only, and
        `out` may be the memory of any of them.
        """
        if self._is_one_pass and len(sources) == 2 and len(out) > 1:
            WORKPLACE.run(self._ufunc, sources[0], sources[1], out=out)
            return
        block = BLOCK_BYTES // self.work.itemsize
        if len(out) <= block:
            self._reduce_block(sources, out)
            return
        for start in range(0, len(out), block):
            cut = slice(start, start + block)
            self._reduce_block([source[cut] for source in sources], out[cut])

    def _reduce_block(self, sources: Sequence[Array], out: Array) -> None:
        """Between is kept in scratch, never in `out`, so that no source is overwritten before it is read."""
        work = WORKPLACE.scratch[self.work.char][: len(out)]
        left, last = sources[0], len(sources) - 1
        for source in sources[1:last]:
            self._apply(left, source, work)
            left = work
        if not last:
            self.finish(out, left)
        elif self._is_one_pass:
            self._apply(left, sources[last], out)
        else:
            self._apply(left, sources[last], work)
            self.finish(out, work)

    def load(self, work: Array, storage: Array) -> None:
        """work[:] = storage."""
        np.copyto(work, storage)

    def fold(self, work: Array, storage: Array) -> None:
        """work[:] = work op storage."""
        self._apply(work, storage, work)

    def fold_under(self, work: Array, storage: Array) -> None:
        """work[:] = storage op work."""
        self._apply(storage, work, work)

    def fold_work(self, work: Array, other: Array) -> None:
        """work[:] = work op other, where other is in the work dtype too."""
        self._apply(work, other, work)

    def fold_under_work(self, work: Array, other: Array) -> None:
        """work[:] = other op work, where other is in the work dtype too."""
        self._apply(other, work, work)

    def finish(self, storage: Array, work: Array) -> None:
        """storage[:] = work, divided by `size` for MEAN, rounded once to the dtype. `storage` may be `work` itself."""
        if self.op is ReduceOp.MEAN:
            WORKPLACE.run(np.divide, work, self.work.type(self.size), out=storage, casting="same_kind")
        elif not _is_same(storage, work):
            WORKPLACE.run(np.copyto, storage, work, casting="same_kind")

    def _apply(self, left: Array, right: Array, work: Array) -> None:
        if len(work) == 1:
            # NumPy takes an in-place call on one element for a reduction along it, and multiplies complex numbers there
            # without fused instructions: other bits than the same element has inside a longer array.
            work[:] = WORKPLACE.run(self._ufunc, left, right)
        else:
            WORKPLACE.run(self._ufunc, left, right, out=work)


@dataclass(frozen=True)
class _HalfKernel(Kernel):
    """Sums are kept in float32."""

    def _reduce_block(self, sources: Sequence[Array], out: Array) -> None:
        work = WORKPLACE.scratch[self.work.char][: len(out)]
        self.load(work, sources[0])
        for source in sources[1:]:
            self.fold(work, source)
        self.finish(out, work)


@dataclass(frozen=True)
class _BFloat16Kernel(_HalfKernel):
    """Storage is uint16, which NumPy would take for integers: values are widened and narrowed here, block by block."""

    def load(self, work: Array, storage: Array) -> None:
        widen_bfloat16(work, storage)

    def fold(self, work: Array, storage: Array) -> None:
        scratch = _scratch_for(work)
        for start in range(0, len(work), BLOCK_ELEMENTS):
            block = work[start : start + BLOCK_ELEMENTS]
            wide = scratch[: len(block)]
            widen_bfloat16(wide, storage[start : start + BLOCK_ELEMENTS])
            self.fold_work(block, wide)

    def fold_under(self, work: Array, storage: Array) -> None:
        scratch = _scratch_for(work)
        for start in range(0, len(work), BLOCK_ELEMENTS):
            block = work[start : start + BLOCK_ELEMENTS]
            wide = scratch[: len(block)]
            widen_bfloat16(wide, storage[start : start + BLOCK_ELEMENTS])
            self.fold_under_work(block, wide)

    def finish(self, storage: Array, work: Array) -> None:
        if self.op is not ReduceOp.MEAN:
            narrow_bfloat16(storage, work)
            return
        scratch = _scratch_for(work)
        for start in range(0, len(work), BLOCK_ELEMENTS):
            block = work[start : start + BLOCK_ELEMENTS]
            mean = scratch[: len(block)]
            with np.errstate(all="ignore"):
                np.divide(block, np.float32(self.size), out=mean)
            narrow_bfloat16(storage[start : start + BLOCK_ELEMENTS], mean)


@lru_cache(maxsize=1024)
def kernel(op: ReduceOp, dtype: DType, size: int) -> Kernel:
    """The kernel of an operator and a dtype for `size` ranks; the same object for the same arguments.

    Raises:
        TensorMismatchError: the operator means nothing for this dtype; the message says why.
    """
    why_not = refusal(op, dtype)
    if why_not is not None:
        raise TensorMismatchError(why_not)
    work = np.dtype(np.float32) if dtype.is_half else dtype.storage
    is_one_pass = op is not ReduceOp.MEAN and not dtype.is_half
    chosen = {DType.BFLOAT16: _BFloat16Kernel, DType.FLOAT16: _HalfKernel}.get(dtype, Kernel)
    return chosen(op, dtype, size, work, _UFUNCS[op], is_one_pass)


def _scratch_for(work: Array) -> Array:
    return np.empty(min(len(work), BLOCK_ELEMENTS), np.float32)


def _is_same(one: Array, other: Array) -> bool:
    """Whether two arrays of equal length are the same memory, so that a copy would only read and write it."""
    return one.dtype == other.dtype and bool(one.__array_interface__["data"] == other.__array_interface__["data"])
