"""The memory of buckets: gradients lie in it, and it travels. Here what all buckets can do, and those on the host; those on a
GPU are in device_memory.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np

from ferrorpc.arrays.base import Kind, View
from ferrorpc.arrays.kinds import NUMPY
from ferrorpc.ddp.bucket import Bucket, Slot
from ferrorpc.kernels.reduction import kernel
from ferrorpc.types import DType, ReduceOp

if TYPE_CHECKING:
    from ferrorpc.group import ProcessGroup

Array: TypeAlias = np.ndarray[Any, Any]


class Home(NamedTuple):
    """What the header of a bucket that has come home says.

    Attributes:
        used: names of the gradients that some rank has used.
        total: what the ranks' weights sum to; None in a round without weights.
    """

    used: list[str]
    total: float | None


class Memory(ABC):
    """One bucket's memory, round after round: `begin`, `write` each gradient, `leave`; once it is home `settle`, then `place`.

    Half types have a second array, in float32, where a sum of weighted gradients must not be rounded on its way; it is made
    when it is first asked for.

    Attributes:
        bucket: what lies where.
        array: shape (bucket.count,), dtype as users know it. What lies between the gradients is zero and stays so.
    """

    array: Any

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._weight: float | None = None
        self._wide: Any = None

    @abstractmethod
    def _zeros(self, dtype: DType) -> Any:
        """New memory for `array`, or for what lies beside it in another dtype."""

    @property
    def wide(self) -> Any:
        """The bucket in the dtype sums are kept in: float32 for the half types, else `array` itself."""
        if not self.bucket.dtype.is_half:
            return self.array
        if self._wide is None:
            self._wide = self._zeros(DType.FLOAT32)
        return self._wide

    @property
    def _travelling(self) -> Any:
        """What the messages carry: weighted halves are not rounded before they are divided."""
        return self.array if self._weight is None else self.wide

    @abstractmethod
    def begin(self, weight: float | None) -> None:
        """A round begins, in which every gradient counts as used until `write` says otherwise.

        Args:
            weight: this rank's share of a weighted mean; None for an even one.
        """

    @abstractmethod
    def write(self, slot: Slot, gradient: View | None, used: bool, stays: bool) -> None:
        """Brings a gradient to its place, times the weight. None is zeros.

        Args:
            gradient: it may lie in its place already.
            used: whether this rank has used the parameter.
            stays: the gradient's memory keeps what is in it until the bucket has left, so it may be read then, in the stream
                that is current now.
        """

    @abstractmethod
    def add(self, slot: Slot, part: View, is_first: bool) -> None:
        """Adds a part of a gradient to what lies in its place, or begins with it."""

    @abstractmethod
    def leave(self) -> Any:
        """The array that goes round the group, complete: dtype as users know it, shape (bucket.count,)."""

    def apart(self) -> AbstractContextManager[Any]:
        """A context in which hooks work on what has left: on a GPU, in a stream that all buckets there have for that."""
        return nullcontext()

    @abstractmethod
    def settle(self) -> Home:
        """The sum has come home: reads the header, and divides by the weights unless they sum to zero or to no number."""

    @abstractmethod
    def place(self, slot: Slot) -> Any:
        """Where a gradient lies: shape (stop - start,), storage dtype."""

    @abstractmethod
    def alias(self, slot: Slot, kind: Kind) -> Any | None:
        """That memory as an array of a kind, in the gradient's shape; None where this kind's arrays are elsewhere."""

    @abstractmethod
    def read(self, slots: Sequence[Slot], targets: Sequence[Any]) -> None:
        """Copies gradients, or means, to C-contiguous arrays in storage dtype where the bucket is, one for each slot."""

    @abstractmethod
    def copies(self, slots: Sequence[Slot], kinds: Mapping[str, Kind]) -> list[Any]:
        """Copies of gradients, or means, as new arrays of the kinds that their names have."""

    @abstractmethod
    def restore(self, slot: Slot, kept: Any) -> None:
        """Writes back what a copy of `place` has kept."""

    @abstractmethod
    def keep(self, slot: Slot) -> Any:
        """A copy of `place`."""

    def _home(self, header: Array) -> Home:
        flags = (header[: self.bucket.weight] != 0).tolist()
        used = [slot.name for slot, flag in zip(self.bucket.slots, flags, strict=True) if flag]
        return Home(used, None if self._weight is None else float(header[self.bucket.weight].real))


class HostMemory(Memory):
    """A bucket on the host, in memory that the group's lanes read best.

    Attributes:
        storage: `array` in the storage dtype (bfloat16 as uint16).
    """

    def __init__(self, bucket: Bucket, group: ProcessGroup) -> None:
        super().__init__(bucket)
        self._group = group
        self.array: Array = self._zeros(bucket.dtype)
        self.storage: Array = self.array.view(bucket.dtype.storage)

    def _zeros(self, dtype: DType) -> Array:
        found: Array = self._group.empty((self.bucket.count,), dtype)
        found[...] = 0
        return found

    def begin(self, weight: float | None) -> None:
        self._weight = weight
        self._travelling[: self.bucket.weight] = 1

    def write(self, slot: Slot, gradient: View | None, used: bool, stays: bool) -> None:
        if not used:
            self._travelling[slot.flag] = 0
        if gradient is None:
            self._travelling[slot.start : slot.stop] = 0
            return
        if self._weight is None:
            target = self.place(slot)
            if not _is_same(gradient.data, target):
                source = gradient.data if gradient.origin is None else gradient.origin
                np.copyto(target.reshape(slot.spec.shape), source)
            return
        wide = self.wide[slot.start : slot.stop]
        if not _is_same(gradient.data, wide):
            kernel(ReduceOp.SUM, slot.spec.dtype, 1).load(wide, gradient.data.reshape(-1))
        if self._weight != 1:
            with np.errstate(all="ignore"):
                np.multiply(wide, real_type(wide.dtype)(self._weight), out=wide)

    def add(self, slot: Slot, part: View, is_first: bool) -> None:
        total, given = (NUMPY.typed(data.reshape(slot.spec.shape), slot.spec) for data in (self.place(slot), part.data))
        if is_first:
            np.copyto(total, given)
        else:
            with np.errstate(all="ignore"):
                np.add(total, given, out=total)

    def leave(self) -> Any:
        self._travelling[self.bucket.weight] = 0 if self._weight is None else self._weight
        return self._travelling

    def settle(self) -> Home:
        home = self._home(self._travelling)
        if is_share(home.total):
            body = slice(self.bucket.header, None)
            with np.errstate(all="ignore"):
                np.divide(self.wide[body], real_type(self.wide.dtype)(home.total), out=self.wide[body])
            if self.bucket.dtype.is_half:
                kernel(ReduceOp.SUM, self.bucket.dtype, 1).finish(self.storage[body], self.wide[body])
        return home

    def place(self, slot: Slot) -> Array:
        return self.storage[slot.start : slot.stop]

    def alias(self, slot: Slot, kind: Kind) -> Any | None:
        return kind.alias(self.place(slot), slot.spec)

    def read(self, slots: Sequence[Slot], targets: Sequence[Any]) -> None:
        for slot, target in zip(slots, targets, strict=True):
            np.copyto(target, self.place(slot).reshape(slot.spec.shape))

    def copies(self, slots: Sequence[Slot], kinds: Mapping[str, Kind]) -> list[Any]:
        return [kinds[slot.name].wrap(self.place(slot).reshape(slot.spec.shape).copy(), slot.spec) for slot in slots]

    def keep(self, slot: Slot) -> Array:
        return self.place(slot).copy()

    def restore(self, slot: Slot, kept: Array) -> None:
        self.place(slot)[...] = kept


def is_share(total: float | None) -> TypeGuard[float]:
    """Whether a mean can be divided by it."""
    return total is not None and total != 0 and bool(np.isfinite(total))


def real_type(dtype: np.dtype[Any]) -> type[np.floating[Any]]:
    """The real type of a dtype's precision: weights are never complex."""
    return np.float32 if dtype in (np.float32, np.complex64) else np.float64


def _is_same(one: Array, other: Array) -> bool:
    """Whether two C-contiguous arrays of equal length and dtype are the same memory."""
    return bool(one.__array_interface__["data"] == other.__array_interface__["data"])
