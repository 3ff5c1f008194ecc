"""Reduction kernels: how values of one dtype become one, for every operator.

The canonical result of a reduction is the left fold in rank order, ((x0 op x1) op x2) ... Half types are folded in float32 and
rounded once, at the end; MEAN divides before that rounding. Whatever folds in this order through a kernel has the same bits
on every lane. (One exception, from the processor itself: when two operands are NaN, which of the two is kept is open. That
the result is NaN is not.)

Kernels follow NumPy's own arithmetic: integers wrap, SUM of bool is a logical or, NaN goes through MIN and MAX. They warn
of nothing, change no global state, and allocate nothing but, for halves, a scratch that fits the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import numpy as np

from ferrorpc.errors import TensorMismatchError
from ferrorpc.kernels.half import BLOCK_ELEMENTS, narrow_bfloat16, widen_bfloat16
from ferrorpc.types import DType, ReduceOp, refusal

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

    def load(self, work: np.ndarray[Any, Any], storage: np.ndarray[Any, Any]) -> None:
        """work[:] = storage."""
        np.copyto(work, storage)

    def fold(self, work: np.ndarray[Any, Any], storage: np.ndarray[Any, Any]) -> None:
        """work[:] = work op storage."""
        self._apply(work, storage, work)

    def fold_under(self, work: np.ndarray[Any, Any], storage: np.ndarray[Any, Any]) -> None:
        """work[:] = storage op work."""
        self._apply(storage, work, work)

    def fold_work(self, work: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> None:
        """work[:] = work op other, where other is in the work dtype too."""
        self._apply(work, other, work)

    def fold_under_work(self, work: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> None:
        """work[:] = other op work, where other is in the work dtype too."""
        self._apply(other, work, work)

    def finish(self, storage: np.ndarray[Any, Any], work: np.ndarray[Any, Any]) -> None:
        """storage[:] = work, divided by `size` for MEAN, rounded once to the dtype. `storage` may be `work` itself."""
        with np.errstate(all="ignore"):
            if self.op is ReduceOp.MEAN:
                np.divide(work, self.work.type(self.size), out=storage, casting="same_kind")
            elif not _is_same(storage, work):
                np.copyto(storage, work, casting="same_kind")

    def _apply(self, left: np.ndarray[Any, Any], right: np.ndarray[Any, Any], work: np.ndarray[Any, Any]) -> None:
        with np.errstate(all="ignore"):
            if len(work) == 1:
                # NumPy takes an in-place call on one element for a reduction along it, and multiplies complex numbers there
                # without fused instructions: other bits than the same element has inside a longer array.
                work[:] = self._ufunc(left, right)
            else:
                self._ufunc(left, right, out=work)


@dataclass(frozen=True)
class _BFloat16Kernel(Kernel):
    """Storage is uint16, which NumPy would take for integers: values are widened and narrowed here, block by block."""

    def load(self, work: np.ndarray[Any, Any], storage: np.ndarray[Any, Any]) -> None:
        widen_bfloat16(work, storage)

    def fold(self, work: np.ndarray[Any, Any], storage: np.ndarray[Any, Any]) -> None:
        scratch = _scratch_for(work)
        for start in range(0, len(work), BLOCK_ELEMENTS):
            block = work[start : start + BLOCK_ELEMENTS]
            wide = scratch[: len(block)]
            widen_bfloat16(wide, storage[start : start + BLOCK_ELEMENTS])
            self.fold_work(block, wide)

    def fold_under(self, work: np.ndarray[Any, Any], storage: np.ndarray[Any, Any]) -> None:
        scratch = _scratch_for(work)
        for start in range(0, len(work), BLOCK_ELEMENTS):
            block = work[start : start + BLOCK_ELEMENTS]
            wide = scratch[: len(block)]
            widen_bfloat16(wide, storage[start : start + BLOCK_ELEMENTS])
            self.fold_under_work(block, wide)

    def finish(self, storage: np.ndarray[Any, Any], work: np.ndarray[Any, Any]) -> None:
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
    chosen = _BFloat16Kernel if dtype is DType.BFLOAT16 else Kernel
    work = np.dtype(np.float32) if dtype.is_half else dtype.storage
    return chosen(op, dtype, size, work, _UFUNCS[op])


def _scratch_for(work: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.empty(min(len(work), BLOCK_ELEMENTS), np.float32)


def _is_same(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Whether two arrays of equal length are the same memory, so that a copy would only read and write it."""
    return one.dtype == other.dtype and bool(one.__array_interface__["data"] == other.__array_interface__["data"])
