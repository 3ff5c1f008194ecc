"""Arrays of one rank for all: weights and buffers, packed into buckets and written in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ferrorpc.arrays.kinds import spec_of, view, view_out
from ferrorpc.ddp.bucket import lay_out

if TYPE_CHECKING:
    from ferrorpc.group import ProcessGroup

SHARED_BYTES = 25 << 20
"""Of each message."""


def share(arrays: Mapping[str, Any], group: ProcessGroup, root: int = 0) -> None:
    """Gives every rank the arrays of rank `root`, in place. Collective: same names, dtypes and shapes in the same order."""
    places = {name: view_out(array, spec_of(array)) for name, array in arrays.items()}
    layout = lay_out([(name, place.spec) for name, place in places.items()], SHARED_BYTES, SHARED_BYTES)
    packed = [np.zeros(bucket.count, bucket.dtype.storage) for bucket in layout.buckets]
    if group.rank == root:
        for slot in layout.slots.values():
            packed[slot.bucket][slot.start : slot.stop] = view(arrays[slot.name]).data.reshape(-1)
    works = [group.broadcast(each, root=root, out=each, async_op=True) for each in packed]
    for work in works:
        work.wait()
    if group.rank != root:
        for slot in layout.slots.values():
            places[slot.name].data.reshape(-1)[...] = packed[slot.bucket][slot.start : slot.stop]
            places[slot.name].commit()
