"""The buckets of a reducer: their memory, and the lanes by which they travel. The same round after round."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from ferrorpc.arrays.cupy_kind import CupyKind
from ferrorpc.ddp.bucket import Layout, Slot
from ferrorpc.ddp.device_memory import DeviceMemory, Gpu
from ferrorpc.ddp.hooks.base import Hook
from ferrorpc.ddp.lane import Lane, Traffic
from ferrorpc.ddp.memory import HostMemory, Memory

if TYPE_CHECKING:
    from ferrorpc.group import ProcessGroup


_log = logging.getLogger("ferrorpc.ddp")
_told = threading.Lock()
"""Held once this process was told that gradients on a GPU go through the host."""


class Fleet:
    """All buckets of one layout, on one rank.

    Args:
        layout: the same on all ranks.
        group: the ranks; every one makes its fleet at the same point of its program.
        hook: how buckets of float32 and of half types are summed; None for as they are.
        kind: of CuPy arrays on the GPU where the buckets are to lie; None for the host.

    Attributes:
        memory: of each bucket.
        size: how many ranks there are.
        traffic: what all of them have sent.
        number: of the stream in which they travel.
    """

    def __init__(self, layout: Layout, group: ProcessGroup, hook: Hook | None, kind: CupyKind | None) -> None:
        self.layout = layout
        self.size = group.size
        self.hook = hook
        self.kind = kind
        self.traffic = Traffic(group.size)
        self._operations = 1 if hook is None else 1 + hook.operations
        # A bucket's operations of one kind start round after round: that is the promise which shared memory needs.
        self._stream = group.stream(channels=max(1, len(layout.buckets) * self._operations))
        if hook is not None:
            hook.serve(self._stream)
        self.clock = self._stream.clock
        self.number = self._stream.number
        self.memory = self._memory(group)

    def _memory(self, group: ProcessGroup) -> list[Memory]:
        if self.kind is None:
            return [HostMemory(bucket, group) for bucket in self.layout.buckets]
        if group.size > 1 and not group.capabilities.device_moves and _told.acquire(blocking=False):
            _log.warning(
                "gradients are on a GPU, and backend %r takes them through the host; backend='hybrid' has NCCL, which 'auto' "
                "chooses where the program has imported CuPy, or begun to use a GPU through torch, when it joins",
                group.backend,
            )
        gpu = Gpu(self.kind, self.clock)
        return [DeviceMemory(bucket, gpu) for bucket in self.layout.buckets]

    def at(self, name: str) -> tuple[Memory, Slot]:
        """Where a gradient lies. What is there belongs to a round until the next one begins."""
        slot = self.layout.slots[name]
        return self.memory[slot.bucket], slot

    def lane(self, number: int, bucket: int) -> Lane:
        """The operations of a bucket in round `number`: the header's and the hook's where there is one."""
        return Lane(self._stream, (number * len(self.memory) + bucket) * self._operations, self.traffic)
