"""Broadcasts named arrays in place, such as weights and buffers, packed into buckets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from ferrorpc.arrays.error_prefix import ErrorPrefix
from ferrorpc.arrays.kinds import spec_of, view_out
from ferrorpc.consistency import require_same
from ferrorpc.ddp.bucket import lay_out
from ferrorpc.ddp.packing import Packer

if TYPE_CHECKING:
    from ferrorpc.group import ProcessGroup

MESSAGE_BYTES: Final = 25 << 20
"""The cap of each bucket."""


def broadcast_arrays(arrays: Mapping[str, Any], group: ProcessGroup, root: int = 0) -> None:
    """Gives every rank the arrays of rank `root`, in place. Collective.

    Raises:
        CollectiveMismatchError: ranks have other names, dtypes, shapes, or another order. The group stays open.
    """
    specs = {}
    for name, array in arrays.items():
        with ErrorPrefix(name):
            specs[name] = spec_of(array)
            view_out(array, specs[name], on_device=True)  # refused before anything is sent
    layout = lay_out(list(specs.items()), MESSAGE_BYTES, MESSAGE_BYTES)
    require_same(group, "weights and buffers", layout.text)
    packer, is_root = Packer(arrays), group.rank == root
    packed = [packer.packed(each, arrays, "array") if is_root else packer.zeros(each) for each in layout.buckets]
    works = [group.broadcast(each, root=root, out=each, async_op=True) for each in packed]
    for bucket, each, work in zip(layout.buckets, packed, works, strict=True):
        work.wait(host=True)
        if not is_root:
            packer.unpack(bucket, each, arrays)
