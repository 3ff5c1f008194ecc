"""The memory of one bucket: gradients are written to it, and collectives reduce it. This file has the interface and its
implementation on the host; that on a GPU is in device_bucket_memory.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np

from ferrorpc.arrays.base import Kind, View
from ferrorpc.arrays.kinds import kind_of
from ferrorpc.ddp.bucket import Bucket, Slot
from ferrorpc.group import ProcessGroup
from ferrorpc.kernels.reduction import is_same_memory, kernel
from ferrorpc.kernels.thread_state import THREAD_STATE
from ferrorpc.types import DType, ReduceOp

Array: TypeAlias = np.ndarray[Any, Any]


class ReducedHeader(NamedTuple):
    """The contents of a bucket's header after its reduction.

    Attributes:
        used: names of the gradients that at least one rank has used.
        total_weight: the sum of the ranks' weights; None in a step without weights.
        is_taken: whether any rank takes the step and does not only follow.
    """

    used: list[str]
    total_weight: float | None
    is_taken: bool


class BucketMemory(ABC):
    """The memory of one bucket, used again in every step.

    A step calls `begin`, `write` or `written_in_place` for each gradient, and `pack`; after the reduction `finish`; then the
    means can be read.

    Weighted gradients of half types, and the parts of such gradients, are accumulated in a second array, in float32, so that
    they are not rounded before the division. That array is allocated at its first use.

    Attributes:
        bucket: the layout.
        array: shape (bucket.count,), in the users' dtype. The gaps between gradients are zero and stay zero.
    """

    array: Any

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._weight: float | None = None
        self._float32: Any = None
        self._summed: set[str] = set()
        """Gradients, of a half type, whose parts are summed in the accumulator in this step."""

    @cached_property
    def addresses(self) -> range:
        """The addresses of the bytes of `array`."""
        start = kind_of(self.array).pointer_of(self.array)
        return range(start, start + self.array.nbytes)

    @abstractmethod
    def _zeros(self, dtype: DType) -> Any:
        """Allocates an array of the bucket's shape."""

    @property
    def accumulator(self) -> Any:
        """The array in the dtype of sums: float32 for the half types, else `array` itself."""
        if not self.bucket.dtype.is_half:
            return self.array
        if self._float32 is None:
            self._float32 = self._zeros(DType.FLOAT32)
        return self._float32

    @property
    def _operand(self) -> Any:
        """The array that is reduced in this step."""
        return self.array if self._weight is None else self.accumulator

    @abstractmethod
    def begin(self, weight: float | None, follows: bool) -> None:
        """Begins a step. Every gradient counts as used until `write` says otherwise.

        Args:
            weight: of this rank in a weighted mean; None for an unweighted one.
            follows: whether this rank has left an `uneven` block and only follows.
        """

    @abstractmethod
    def write(self, slot: Slot, gradient: View | None, used: bool, deferrable: bool) -> None:
        """Writes a gradient to its slot, times the weight. None writes zeros.

        Args:
            gradient: may already lie in its slot.
            used: whether this rank has used the parameter.
            deferrable: the gradient does not change before `pack`, so it may be copied then, in the stream that is current
                now.
        """

    def written_in_place(self) -> None:
        """As `write`, of a used gradient that the current stream has computed in its slot. Only without a weight."""
        return

    @abstractmethod
    def add(self, slot: Slot, part: View, is_first: bool) -> None:
        """Adds a part of a gradient to its slot; the first part overwrites the slot."""

    @abstractmethod
    def pack(self) -> Any:
        """Completes the bucket. Returns the array to be reduced: shape (bucket.count,), in the users' dtype."""

    def hook_context(self) -> AbstractContextManager[Any]:
        """A context in which hooks work on the packed array. On a GPU it selects a stream that all buckets there share."""
        return nullcontext()

    def fetch(self) -> None:
        """Begins to bring the header to the host, in the current stream, which waits for the reduction."""
        return

    @abstractmethod
    def finish(self) -> ReducedHeader:
        """After the reduction and `fetch`: reads the header, divides by the sum of weights if that is finite and not zero."""

    @abstractmethod
    def place(self, slot: Slot) -> Any:
        """The memory of a slot: shape (stop - start,), storage dtype."""

    @abstractmethod
    def copied(self, part: Any) -> Any:
        """A copy of an array that lies in this memory, in storage dtype."""

    @abstractmethod
    def alias(self, slot: Slot, kind: Kind) -> Any | None:
        """The memory of a slot as an array of a kind, in the gradient's shape; None if this kind cannot use that memory."""

    @abstractmethod
    def read(self, slots: Sequence[Slot], targets: Sequence[Any]) -> None:
        """Copies slots to C-contiguous arrays in storage dtype on the bucket's device, one for each slot."""

    @abstractmethod
    def copies(self, slots: Sequence[Slot], kinds: Mapping[str, Kind]) -> list[Any]:
        """Copies of slots as new arrays of the kinds given for their names."""

    def save(self, slot: Slot) -> Any:
        """A copy of `place`, for `restore`."""
        return self.copied(self.place(slot))

    @abstractmethod
    def restore(self, slot: Slot, saved: Any) -> None:
        """Writes back what `save` returned."""

    def _write_weight(self, header: Array) -> None:
        """Writes the weight of this step to a header. One beyond its dtype is infinite there, whatever NumPy is to report."""
        THREAD_STATE.run(header.__setitem__, self.bucket.weight, 0 if self._weight is None else self._weight)

    def _reduced(self, header: Array) -> ReducedHeader:
        flags = (header[: self.bucket.weight] != 0).tolist()
        used = [slot.name for slot, flag in zip(self.bucket.slots, flags, strict=True) if flag]
        total_weight = None if self._weight is None else float(header[self.bucket.weight].real)
        return ReducedHeader(used, total_weight, bool(header[self.bucket.takers] != 0))


class HostBucketMemory(BucketMemory):
    """A bucket on the host, in the memory from `group.empty`, which the transports read without copies.

    Attributes:
        storage: `array` in the storage dtype (bfloat16 as uint16).
    """

    def __init__(self, bucket: Bucket, group: ProcessGroup) -> None:
        super().__init__(bucket)
        self._group = group
        self.array: Array = self._zeros(bucket.dtype)
        self.storage: Array = self.array.view(bucket.dtype.storage)
        self._fold = kernel(ReduceOp.SUM, bucket.dtype, 1)

    def _zeros(self, dtype: DType) -> Array:
        found: Array = self._group.empty((self.bucket.count,), dtype)
        found[...] = 0
        return found

    def begin(self, weight: float | None, follows: bool) -> None:
        self._weight = weight
        self._summed.clear()
        self._operand[: self.bucket.weight] = 1
        self._operand[self.bucket.takers] = not follows

    def write(self, slot: Slot, gradient: View | None, used: bool, deferrable: bool) -> None:
        if not used:
            self._operand[slot.flag] = 0
        if gradient is None:
            self._operand[slot.start : slot.stop] = 0
            return
        is_summed = slot.name in self._summed
        if self._weight is None:
            target = self.place(slot)
            if is_summed:
                self._fold.finish(target, self.accumulator[slot.start : slot.stop])
            elif not is_same_memory(gradient.data, target):
                np.copyto(target, gradient.data.reshape(-1))
            return
        target = self.accumulator[slot.start : slot.stop]
        if not is_summed and not is_same_memory(gradient.data, target):
            self._fold.load(target, gradient.data.reshape(-1))
        if self._weight != 1:
            with np.errstate(all="ignore"):
                target = reals_of(target)
                np.multiply(target, target.dtype.type(self._weight), out=target)

    def add(self, slot: Slot, part: View, is_first: bool) -> None:
        total, given = self.place(slot), part.data.reshape(-1)
        if is_first:
            np.copyto(total, given)
        elif self.bucket.dtype.is_half:
            sums = self.accumulator[slot.start : slot.stop]
            if slot.name not in self._summed:
                self._fold.load(sums, total)
                self._summed.add(slot.name)
            self._fold.fold(sums, given)
        else:
            with np.errstate(all="ignore"):
                np.add(total, given, out=total)

    def pack(self) -> Any:
        self._write_weight(self._operand)
        return self._operand

    def finish(self) -> ReducedHeader:
        header = self._reduced(self._operand)
        if is_divisor(header.total_weight):
            body = slice(self.bucket.header, None)
            sums = reals_of(self.accumulator[body])
            with np.errstate(all="ignore"):
                np.divide(sums, sums.dtype.type(header.total_weight), out=sums)
            if self.bucket.dtype.is_half:
                self._fold.finish(self.storage[body], sums)
        return header

    def place(self, slot: Slot) -> Array:
        return self.storage[slot.start : slot.stop]

    def copied(self, part: Array) -> Array:
        return part.copy()

    def alias(self, slot: Slot, kind: Kind) -> Any | None:
        return kind.alias(self.place(slot), slot.spec)

    def read(self, slots: Sequence[Slot], targets: Sequence[Any]) -> None:
        for slot, target in zip(slots, targets, strict=True):
            np.copyto(target, self.place(slot).reshape(slot.spec.shape))

    def copies(self, slots: Sequence[Slot], kinds: Mapping[str, Kind]) -> list[Any]:
        return [kinds[slot.name].wrap(self.place(slot).reshape(slot.spec.shape), slot.spec) for slot in slots]

    def restore(self, slot: Slot, saved: Array) -> None:
        self.place(slot)[...] = saved


def is_divisor(total_weight: float | None) -> TypeGuard[float]:
    """Whether a mean can be computed with this sum of weights."""
    return total_weight is not None and total_weight != 0 and bool(np.isfinite(total_weight))


def reals_of(array: Any) -> Any:
    """An array of floats or complex numbers as the floats that it consists of. Weights are real also where gradients are
    complex, and NumPy's product and quotient of the two make NaN of infinities."""
    return array.view(np.float32 if array.dtype in (np.float32, np.complex64) else np.float64)
