"""Arrays packed into one for each bucket, and written back in place: on their GPU where all are on one, else on the host.

Cost: two passes over the elements. On a GPU the host only queues them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ferrorpc.arrays.cupy_kind import CupyKind
from ferrorpc.arrays.kinds import NUMPY, gpu_of, view, view_out
from ferrorpc.ddp.bucket import Bucket
from ferrorpc.ddp.naming import Named
from ferrorpc.errors import TensorMismatchError
from ferrorpc.types import TensorSpec


def common_gpu(arrays: Mapping[str, Any]) -> CupyKind | None:
    """The kind of CuPy arrays where all of the arrays are on one GPU, else None."""
    kinds = {gpu_of(array) for array in arrays.values()}
    return kinds.pop() if len(kinds) == 1 else None


def current(kind: CupyKind | None) -> AbstractContextManager[Any]:
    """A context in which its GPU is the current device."""
    return nullcontext() if kind is None else kind.device.here()


class Packer:
    """Packs where the arrays are.

    Args:
        arrays: all that are to be packed.
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._kind = common_gpu(arrays)

    def zeros(self, bucket: Bucket) -> Any:
        """A new array for a bucket: shape (bucket.count,), in storage dtype."""
        if self._kind is None:
            return np.zeros(bucket.count, bucket.dtype.storage)
        with current(self._kind):
            found = self._kind.device.empty((bucket.count,), bucket.dtype.storage)
            found[...] = 0
            return found

    def packed(self, bucket: Bucket, arrays: Mapping[str, Any], what: str) -> Any:
        """A new array with the bucket's arrays in their slots, zeros between them.

        Args:
            what: they are, for the error.

        Raises:
            TensorMismatchError: one has another dtype or shape than its slot.
        """
        found = self.zeros(bucket)
        with current(self._kind):
            for slot in bucket.slots:
                with Named(f"{what} {slot.name!r}"):
                    got = view(arrays.get(slot.name), near=self._kind is not None)
                if got.spec != slot.spec:
                    raise TensorMismatchError(
                        f"{what} {slot.name!r} is {got.spec}, but was {slot.spec} when it was wrapped",
                        hint='wrap the module again, or leave each rank its own buffers: buffers="local"',
                    )
                found[slot.start : slot.stop] = got.data.reshape(-1)
        return found

    def typed(self, bucket: Bucket, packed: Any) -> Any:
        """The same memory in the dtype that users know."""
        spec = TensorSpec(bucket.dtype, packed.shape)
        return NUMPY.typed(packed, spec) if self._kind is None else self._kind.wrap(packed, spec)

    def unpack(self, bucket: Bucket, packed: Any, arrays: Mapping[str, Any]) -> None:
        """Writes each array from its slot, in place."""
        with current(self._kind):
            for slot in bucket.slots:
                place = view_out(arrays[slot.name], slot.spec, near=self._kind is not None)
                place.data.reshape(-1)[...] = packed[slot.start : slot.stop]
                place.commit()
