"""The bucketed mean: gradients are copied into buckets as they come, and each bucket is reduced as soon as it is full.

Every reducer has a stream of its own, in which operations are numbered by meaning (round, bucket), not by order. So ranks may
become ready in different orders, and nothing the user calls in between can be mixed up with it.

The mean is the group's canonical one: gradients added in rank order, then divided by the number of ranks; with weights, each
gradient times its rank's weight, added in rank order, then divided by the sum of the weights. Half types are added, and
weighted, in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ferrorpc.agreement import agree
from ferrorpc.arrays.base import View
from ferrorpc.arrays.kinds import NUMPY
from ferrorpc.ddp.bucket import Bucket, Layout, Slot, lay_out
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.kernels.reduction import kernel
from ferrorpc.types import DType, ReduceOp, TensorSpec, refusal
from ferrorpc.work import Work

if TYPE_CHECKING:
    from ferrorpc.group import ProcessGroup

Array = np.ndarray[Any, Any]
MEBIBYTE = 1 << 20


class Reducer:
    """Means of a fixed set of named gradients over a group, round after round.

    Args:
        parameters: name and spec of each, in order of registration. All ranks give the same; that is checked here.
        group: the ranks; every one constructs its reducer at the same point of its program.
        bucket_cap_mb: how large a bucket may get, in MiB.
        what: what the parameters are, for errors.

    Raises:
        UsageError: a bad cap, or a dtype that has no mean.
        CollectiveMismatchError: ranks hold different parameters.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, TensorSpec]], group: ProcessGroup, bucket_cap_mb: float, what: str
    ) -> None:
        if not bucket_cap_mb > 0:
            raise UsageError(f"bucket_cap_mb={bucket_cap_mb} is not positive", hint="leave it away for 25")
        for name, spec in parameters:
            why_not = refusal(ReduceOp.MEAN, spec.dtype)
            if why_not is not None:
                raise TensorMismatchError(f"{what} {name}: {why_not}")
        self.layout: Layout = lay_out(parameters, int(bucket_cap_mb * MEBIBYTE))
        agree(group, what, self.layout.text)
        self._stream = group.stream()
        self._rounds = 0
        self._spare: dict[tuple[int, DType], Array] = {}

    def begin(self, weight: float | None = None) -> Round:
        """The next round. Every rank begins the same rounds in the same order, all with a weight or all without."""
        number = self._rounds * (len(self.layout.buckets) + 1)
        self._rounds += 1
        return Round(self, number, weight)

    def start(self, number: int, array: Array, op: ReduceOp) -> Work[Any]:
        """Reduces an array in place, as operation `number` of this reducer's stream."""
        work: Work[Any] = self._stream.all_reduce(array, number=number, op=op, out=array)
        return work

    def borrow(self, bucket: Bucket, dtype: DType) -> Array:
        """Memory for a bucket, from an earlier round where there was one."""
        spare = self._spare.pop((bucket.index, dtype), None)
        return NUMPY.empty((bucket.count,), dtype) if spare is None else spare

    def give_back(self, bucket: Bucket, dtype: DType, array: Array) -> None:
        """Takes the memory of a bucket whose round is complete. After a failure it is not given back: it may be in use."""
        self._spare[bucket.index, dtype] = array


class Round:
    """One mean of all gradients. `put` each once, `wait`, then take each `mean`."""

    def __init__(self, reducer: Reducer, number: int, weight: float | None) -> None:
        self._reducer = reducer
        self._number = number
        self._weight = weight
        self._arrays: dict[int, tuple[DType, Array]] = {}
        self._missing = [len(bucket.slots) for bucket in reducer.layout.buckets]
        self._works: list[Work[Any]] = []
        self._total: Array | None = None
        if weight is not None:
            self._total = np.array([weight], np.float64)
            self.side(self._total, ReduceOp.SUM)

    def side(self, array: Array, op: ReduceOp) -> None:
        """Reduces one more small array in place, complete after `wait`. Once a round, and not where there are weights."""
        self._works.append(self._reducer.start(self._number + len(self._missing), array, op))

    def put(self, name: str, view: View | None) -> None:
        """This rank's gradient; None counts as zeros. The last one of a bucket sends it on its way."""
        slot = self._reducer.layout.slots[name]
        bucket = self._reducer.layout.buckets[slot.bucket]
        if slot.bucket not in self._arrays:
            dtype = DType.FLOAT32 if self._weight is not None and bucket.dtype.is_half else bucket.dtype
            self._arrays[slot.bucket] = dtype, self._reducer.borrow(bucket, dtype)
        dtype, array = self._arrays[slot.bucket]
        self._fill(array.view(dtype.storage)[slot.start : slot.stop], slot, view)
        self._missing[slot.bucket] -= 1
        if self._missing[slot.bucket] == 0:
            op = ReduceOp.MEAN if self._weight is None else ReduceOp.SUM
            self._works.append(self._reducer.start(self._number + slot.bucket, array, op))

    def _fill(self, target: Array, slot: Slot, view: View | None) -> None:
        if view is None:
            target[...] = 0
            return
        data = view.data.reshape(-1)
        if self._weight is None:
            target[...] = data
            return
        kernel(ReduceOp.SUM, slot.spec.dtype, 1).load(target, data)
        with np.errstate(all="ignore"):
            np.multiply(target, _real(target)(self._weight), out=target)

    def wait(self) -> None:
        """Returns when every mean is there.

        Raises:
            UsageError: the weights of all ranks sum to zero (on every rank).
            FerroError: what ended the generation.
        """
        try:
            for work in self._works:
                work.wait()
        except BaseException:
            # One cause ends them all; it was raised once, so the others need not log it.
            for work in self._works:
                work.on_done(partial(_observe, work))
            raise
        if self._total is None:
            return
        total = float(self._total[0])
        if not total > 0 or not math.isfinite(total):
            raise UsageError(f"the weights of all ranks sum to {total}", hint="at least one rank needs a positive weight")
        for _, array in self._arrays.values():
            with np.errstate(all="ignore"):
                np.divide(array, _real(array)(total), out=array)

    def mean(self, name: str) -> Array:
        """The mean of one gradient after `wait`: a new array in storage dtype that owns its memory."""
        slot = self._reducer.layout.slots[name]
        dtype, array = self._arrays[slot.bucket]
        part = array.view(dtype.storage)[slot.start : slot.stop]
        result = np.empty(slot.spec.shape, slot.spec.dtype.storage)
        if dtype is slot.spec.dtype:
            result.reshape(-1)[...] = part
        else:
            kernel(ReduceOp.SUM, slot.spec.dtype, 1).finish(result.reshape(-1), part)
        return result

    def close(self) -> None:
        """All means were taken: the buckets' memory may be used again."""
        for index, (dtype, array) in self._arrays.items():
            self._reducer.give_back(self._reducer.layout.buckets[index], dtype, array)
        self._arrays.clear()


def _observe(work: Work[Any]) -> None:
    work.exception()


def _real(array: Array) -> type[np.floating[Any]]:
    """The real type of an array's precision: weights are never complex."""
    return np.float32 if array.dtype in (np.float32, np.complex64) else np.float64
