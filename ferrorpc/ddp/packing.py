"""Packs named arrays into one array for each bucket, and unpacks them in place: on their GPU if they share one, else on the
host.

Cost: two passes over the elements. On a GPU the host only queues them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ferrorpc.arrays.error_prefix import ErrorPrefix
from ferrorpc.arrays.kinds import NUMPY, view, view_out
from ferrorpc.ddp.bucket import Bucket
from ferrorpc.ddp.placement import common_gpu, current_device
from ferrorpc.errors import TensorMismatchError
from ferrorpc.types import TensorSpec


class Packer:
    """Packs on the device of the arrays.

    Args:
        arrays: all that are to be packed.
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._kind = common_gpu(arrays)

    def zeros(self, bucket: Bucket) -> Any:
        """A new array for a bucket: shape (bucket.count,), in storage dtype."""
        if self._kind is None:
            return np.zeros(bucket.count, bucket.dtype.storage)
        with current_device(self._kind):
            found = self._kind.device.empty((bucket.count,), bucket.dtype.storage)
            found[...] = 0
            return found

    def packed(self, bucket: Bucket, arrays: Mapping[str, Any], what: str) -> Any:
        """A new array with the bucket's arrays in their slots, and zeros between them.

        Args:
            what: the arrays are, for errors.

        Raises:
            TensorMismatchError: an array's dtype or shape is not that of its slot.
        """
        found = self.zeros(bucket)
        with current_device(self._kind):
            for slot in bucket.slots:
                with ErrorPrefix(f"{what} {slot.name!r}"):
                    got = view(arrays.get(slot.name), on_device=self._kind is not None)
                if got.spec != slot.spec:
                    raise TensorMismatchError(
                        f"{what} {slot.name!r} is {got.spec}, but was {slot.spec} when it was wrapped",
                        hint='wrap the module again, or leave each rank its own buffers: buffers="local"',
                    )
                found[slot.start : slot.stop] = got.data.reshape(-1)
        return found

    def typed(self, bucket: Bucket, packed: Any) -> Any:
        """The same memory in the users' dtype."""
        spec = TensorSpec(bucket.dtype, packed.shape)
        return NUMPY.typed(packed, spec) if self._kind is None else self._kind.wrap(packed, spec)

    def unpack(self, bucket: Bucket, packed: Any, arrays: Mapping[str, Any]) -> None:
        """Writes each array from its slot, in place."""
        with current_device(self._kind):
            for slot in bucket.slots:
                place = view_out(arrays[slot.name], slot.spec, on_device=self._kind is not None)
                place.data.reshape(-1)[...] = packed[slot.start : slot.stop]
                place.commit()
