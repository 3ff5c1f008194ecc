"""The memory of buckets: gradients lie in it, and it travels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ferrorpc.ddp.bucket import Bucket, Slot
from ferrorpc.kernels.reduction import kernel
from ferrorpc.types import ReduceOp

if TYPE_CHECKING:
    from ferrorpc.group import ProcessGroup

Array: TypeAlias = np.ndarray[Any, Any]


class BucketMemory:
    """One bucket's array, in memory that the group's lanes read best.

    Half types have a second array, in float32, where a sum of weighted gradients must not be rounded on its way; it is made
    when it is first asked for.

    Attributes:
        array: shape (bucket.count,), dtype as users know it. What lies between the gradients is zero and stays so.
        storage: the same memory in the storage dtype (bfloat16 as uint16).
    """

    def __init__(self, bucket: Bucket, group: ProcessGroup) -> None:
        self.bucket = bucket
        self.array: Array = group.empty((bucket.count,), bucket.dtype)
        self.array[...] = 0
        self.storage: Array = self.array.view(bucket.dtype.storage)
        self._group = group
        self._wide: Array | None = None

    def place(self, slot: Slot) -> Array:
        """Where a gradient lies: shape (stop - start,), storage dtype."""
        return self.storage[slot.start : slot.stop]

    @property
    def wide(self) -> Array:
        """The bucket in the dtype sums are kept in: float32 for the half types, else `array` itself."""
        if not self.bucket.dtype.is_half:
            return self.array
        if self._wide is None:
            self._wide = self._group.empty((self.bucket.count,), "float32")
            self._wide[...] = 0
        return self._wide

    def narrow(self) -> None:
        """Rounds the gradients of `wide` into `array`."""
        if self.bucket.dtype.is_half:
            body = slice(self.bucket.header, None)
            kernel(ReduceOp.SUM, self.bucket.dtype, 1).finish(self.storage[body], self.wide[body])
