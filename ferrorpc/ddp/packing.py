"""Packs named arrays, such as weights and buffers, into one array for each bucket, and unpacks them in place: on their GPU if
they share one, else on the host.

Cost: two passes over the elements. On a GPU the host only queues them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from ferrorpc.arrays.device import is_host
from ferrorpc.arrays.error_prefix import ErrorPrefix
from ferrorpc.arrays.kinds import NUMPY, kind_of, spec_of, view, view_out
from ferrorpc.consistency import require_same
from ferrorpc.ddp.bucket import Bucket, Slot, lay_out
from ferrorpc.ddp.placement import check_not_captured, common_gpu, current_device, gpus_of
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.group import ProcessGroup
from ferrorpc.types import TensorSpec

MESSAGE_BYTES: Final = 25 << 20
"""The cap of each bucket."""


class Packer:
    """Packs on the device of the arrays.

    Args:
        arrays: all that are to be packed.
        what: they are, for errors.
        group: they are sent by.

    Attributes:
        layout: of the buckets.

    Raises:
        UsageError: an array cannot be sent, or not be written in place.
        TensorMismatchError: as `common_gpu`.
    """

    def __init__(self, arrays: Mapping[str, Any], what: str, group: ProcessGroup) -> None:
        specs = []
        for name, array in arrays.items():
            with ErrorPrefix(f"{what} {name!r}"):
                specs.append((name, spec_of(array)))
                view_out(array, specs[-1][1], on_device=True)
        self.layout = lay_out(specs, MESSAGE_BYTES, MESSAGE_BYTES, with_header=False)
        self._what = what
        self._kind = common_gpu(arrays, group)

    def zeros(self, bucket: Bucket) -> Any:
        """A new array for a bucket: shape (bucket.count,), in storage dtype."""
        if self._kind is None:
            return np.zeros(bucket.count, bucket.dtype.storage)
        with current_device(self._kind):
            found = self._kind.device.empty((bucket.count,), bucket.dtype.storage)
            found[...] = 0
            return found

    def packed(self, bucket: Bucket, arrays: Mapping[str, Any]) -> Any:
        """A new array with the bucket's arrays in their slots, and zeros between them.

        Raises:
            TensorMismatchError: an array's dtype or shape is not that of its slot.
        """
        found = self.zeros(bucket)
        with current_device(self._kind):
            for slot in bucket.slots:
                with ErrorPrefix(f"{self._what} {slot.name!r}"):
                    got = view(arrays.get(slot.name), on_device=self._kind is not None)
                self._check(slot, arrays[slot.name], got.spec)
                found[slot.start : slot.stop] = got.data.reshape(-1)
        return found

    def check(self, arrays: Mapping[str, Any]) -> None:
        """Raises as `packed` would for these arrays."""
        for slot in (slot for bucket in self.layout.buckets for slot in bucket.slots):
            with ErrorPrefix(f"{self._what} {slot.name!r}"):
                spec = spec_of(arrays.get(slot.name))
            self._check(slot, arrays[slot.name], spec)

    def _check(self, slot: Slot, array: Any, spec: TensorSpec) -> None:
        moved = self._kind is not None and kind_of(array).device_kind is not self._kind
        if moved or spec != slot.spec:
            change = "elsewhere, but was on this rank's GPU" if moved else f"{spec}, but was {slot.spec}"
            raise TensorMismatchError(
                f"{self._what} {slot.name!r} is {change} when it was wrapped",
                hint='wrap the module again, or leave each rank its own buffers: buffers="local"',
            )

    def typed(self, bucket: Bucket, packed: Any) -> Any:
        """The same memory in the users' dtype."""
        spec = TensorSpec(bucket.dtype, packed.shape)
        return NUMPY.typed(packed, spec) if self._kind is None else self._kind.wrap(packed, spec)

    def unpack(self, bucket: Bucket, packed: Any, arrays: Mapping[str, Any]) -> None:
        """Writes each array from its slot, in place."""
        with current_device(self._kind):
            unpack(bucket, packed, arrays)


def unpack(bucket: Bucket, packed: Any, arrays: Mapping[str, Any]) -> None:
    """Writes those of a bucket's arrays that are given from their slots, in place and in the current stream.

    Args:
        packed: shape (bucket.count,) or longer, in storage dtype, on the device of the arrays.
    """
    on_device = not is_host(packed)
    for slot in bucket.slots:
        if slot.name in arrays:
            place = view_out(arrays[slot.name], slot.spec, on_device)
            place.data.reshape(-1)[...] = packed[slot.start : slot.stop]
            place.commit()


def can_be_packed(array: Any) -> bool:
    """Whether an array can be sent, and be written in place."""
    try:
        view_out(array, spec_of(array), on_device=True)
    except UsageError:
        return False
    return True


def broadcast_arrays(arrays: Mapping[str, Any], group: ProcessGroup, root: int) -> None:
    """Gives every rank the arrays of rank `root`, in place. Collective.

    Raises:
        UsageError: an array cannot be sent, or not be written in place; or a graph is being captured from the current stream of
            its GPU. Nothing was sent.
        TensorMismatchError: all are on another GPU than the group's. Nothing was sent.
        CollectiveMismatchError: ranks have other names, dtypes, shapes, or another order. The group stays open.
    """
    check_not_captured(gpus_of(arrays.values()))
    packer, is_root = Packer(arrays, "array", group), group.rank == root
    require_same(group, "weights and buffers", packer.layout.text)
    packed = [packer.packed(each, arrays) if is_root else packer.zeros(each) for each in packer.layout.buckets]
    works = [group.broadcast(each, root=root, out=each, async_op=True) for each in packed]
    for bucket, each, work in zip(packer.layout.buckets, packed, works, strict=True):
        work.wait(host=True)
        if not is_root:
            packer.unpack(bucket, each, arrays)
