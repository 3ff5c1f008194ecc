"""The buckets of a reducer: their memory, and the stream in which they are reduced. Both are used again in every step."""

from __future__ import annotations

import logging
import threading
from typing import Any

from ferrorpc.arrays.cupy_kind import CupyKind
from ferrorpc.arrays.kinds import kind_of
from ferrorpc.ddp.bucket import Layout, Slot
from ferrorpc.ddp.bucket_collectives import BucketCollectives, Traffic
from ferrorpc.ddp.bucket_memory import BucketMemory, HostBucketMemory
from ferrorpc.ddp.device_bucket_memory import DeviceBucketMemory, DeviceContext
from ferrorpc.ddp.hooks.base import Hook
from ferrorpc.ddp.steps import Steps
from ferrorpc.group import ProcessGroup

_log = logging.getLogger("ferrorpc.ddp")
_warned = threading.Lock()
"""Held once this process has warned that gradients on a GPU go through the host."""


class BucketSet:
    """All buckets of one layout, on one rank.

    Args:
        layout: the same on all ranks.
        group: every rank makes its bucket set at the same point of its program.
        hook: how buckets of float32 and of half types are summed; None for a plain all_reduce.
        kind: of CuPy arrays on the GPU that holds the buckets; None for the host.

    Attributes:
        memory: one for each bucket.
        size: how many ranks there are.
        keys: of the buckets, under which a hook files what it remembers.
        traffic: the bytes sent for all buckets.
        steps: where the time of this rank's last steps went.
        name: of the buckets' stream.
        guard: makes the guard of a wait of this rank's own that begins now.
    """

    def __init__(self, layout: Layout, group: ProcessGroup, hook: Hook | None, kind: CupyKind | None) -> None:
        self.layout = layout
        self.size = group.size
        self.hook = hook
        self.keys = [bucket.key for bucket in layout.buckets]
        self.kind = kind
        self.traffic = Traffic(group.size)
        self.steps = Steps(group)
        self._operations = 1 if hook is None else 1 + hook.operations
        # Each of a bucket's operations starts step after step: the ascending order that a channel in shared memory requires.
        self._stream = group.stream(channels=max(1, len(layout.buckets) * self._operations))
        if hook is not None:
            hook.serve(self._stream, self.keys)
        self.clock = self._stream.clock
        self.guard = self._stream.guard
        self.name = self._stream.name
        self.memory = self._allocate(group)

    def _allocate(self, group: ProcessGroup) -> list[BucketMemory]:
        if self.kind is None:
            return [HostBucketMemory(bucket, group) for bucket in self.layout.buckets]
        if group.size > 1 and not group.capabilities.device_moves and _warned.acquire(blocking=False):
            _log.warning(
                "gradients are on a GPU, and backend %r takes them through the host; backend='hybrid' has NCCL, which 'auto' "
                "chooses where the program has imported CuPy, or begun to use a GPU through torch, when it joins",
                group.backend,
            )
        context = DeviceContext(self.kind, self.guard)
        return [DeviceBucketMemory(bucket, context) for bucket in self.layout.buckets]

    @property
    def is_open(self) -> bool:
        """Whether reductions can still begin: the group is neither closed nor broken."""
        return self._stream.is_open

    def at(self, name: str) -> tuple[BucketMemory, Slot]:
        """The memory and slot of a gradient. The contents belong to a step until the next one begins."""
        slot = self.layout.slots[name]
        return self.memory[slot.bucket], slot

    def elsewhere(self, name: str, gradient: Any) -> BucketMemory | None:
        """The bucket that an array lies in as a gradient of this name, but not in its own slot, so that another gradient may be
        written over it. None for any other array."""
        return None if self.in_place(name, gradient) else self._holding(kind_of(gradient).pointer_of(gradient))

    def name_at(self, gradient: Any) -> str | None:
        """The name of the gradient in whose slot an array begins. None for an array outside of the buckets."""
        address = kind_of(gradient).pointer_of(gradient)
        memory = self._holding(address)
        if memory is None:
            return None
        element = (address - memory.addresses.start) // memory.bucket.dtype.itemsize
        return next((slot.name for slot in memory.bucket.slots if slot.start <= element < slot.stop), None)

    def _holding(self, address: int) -> BucketMemory | None:
        return next((memory for memory in self.memory if address in memory.addresses), None)

    def in_place(self, name: str, gradient: Any) -> bool:
        """Whether an array lies in the slot of a gradient of this name, in whatever order of its elements."""
        memory, slot = self.at(name)
        return kind_of(gradient).pointer_of(gradient) == memory.addresses.start + slot.start * slot.spec.dtype.itemsize

    def collectives(self, step: int, bucket: int) -> BucketCollectives:
        """The collectives of one bucket in one step; with a hook, those of the header and the hook's own."""
        first = (step * len(self.memory) + bucket) * self._operations
        return BucketCollectives(self._stream, first, self._operations, self.traffic)
