"""Averages gradients in buckets, for all interfaces. A bucket is reduced as soon as its last gradient is ready.

Idea. Gradients are copied to buckets (bucket.py), which are reduced while later gradients are still computed. Every reducer
has a stream of its own, in which operations are numbered step x buckets + bucket, not in order of their start. So gradients
may become ready in different orders on different ranks, and calls of the user in between cannot be confused with them.
Bucketing and overlap are those of Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020;
there all ranks must reduce buckets in one order.

The mean is that of the group's all_reduce (in rank order up to 16 ranks): gradients are added, then divided by the number of
ranks. With weights each gradient is multiplied by its rank's weight, they are added in the same order, then divided by the sum
of the weights. Half types are weighted and added in float32, and rounded once. The gradients of a rank of weight 0 are ignored,
whatever their values.

Cost, for a step with n bytes of gradients: one copy into the buckets (none for gradients that are computed there), and for each
bucket one all_reduce, which carries 2 + gradients elements besides the n bytes.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

from ferrorpc.arrays.base import View
from ferrorpc.arrays.cupy_kind import CupyKind
from ferrorpc.arrays.error_prefix import ErrorPrefix
from ferrorpc.arrays.kinds import kind_of, view_on_host
from ferrorpc.consistency import require_same
from ferrorpc.ddp.bucket import Slot, lay_out
from ferrorpc.ddp.bucket_collectives import BucketCollectives, Traffic
from ferrorpc.ddp.bucket_memory import BucketMemory, HostBucketMemory
from ferrorpc.ddp.device_bucket_memory import DeviceBucketMemory, DeviceContext
from ferrorpc.ddp.hooks.base import Hook
from ferrorpc.ddp.placement import device_name
from ferrorpc.ddp.steps import Steps
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.failure import others_told
from ferrorpc.group import ProcessGroup
from ferrorpc.types import ReduceOp, TensorSpec, refusal

MEBIBYTE = 1 << 20
_log = logging.getLogger("ferrorpc.ddp")
_warned = threading.Lock()
"""Held once this process has warned that gradients on a GPU go through the host."""


class _OpenBlocks(threading.local):
    """The groups of the `uneven` blocks that are open in this thread."""

    def __init__(self) -> None:
        self.groups: list[ProcessGroup] = []


_open_blocks = _OpenBlocks()


class Reducer:
    """Averages a fixed set of named gradients over a group, step after step: each step is one `Reduction`.

    The buckets' memory, and the stream in which they are reduced, are used again in every step.

    Args:
        parameters: name and spec of each, in order of registration. All ranks give the same; that is checked here.
        group: every rank constructs its reducer at the same point of its program.
        bucket_cap_mb: how many MiB of gradients a bucket may hold.
        what: what the parameters are, for errors.
        order: names in the order in which gradients are expected; None for the reverse of registration.
        hook: how buckets of float32 and of half types are summed; None for a plain all_reduce. With a hook, steps without a
            weight have the weight 1.
        kind: of CuPy arrays on the GPU that holds the buckets; None for the host.

    Attributes:
        group: that gradients are averaged over.
        layout: the same on all ranks.
        memory: one for each bucket.
        keys: of the buckets, under which a hook files what it remembers.
        traffic: the bytes sent for all buckets.
        steps: where the time of this rank's last steps went.
        stream: that the buckets are reduced in.
        is_uneven: whether an `uneven` block is open.
        begun: how many reductions have begun.

    Raises:
        UsageError: a bad cap or order.
        TensorMismatchError: a dtype that has no mean.
        CollectiveMismatchError: ranks hold different parameters.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, TensorSpec]],
        group: ProcessGroup,
        bucket_cap_mb: float,
        what: str,
        order: Sequence[str] | None = None,
        hook: Hook | None = None,
        kind: CupyKind | None = None,
    ) -> None:
        check_means(parameters, what)
        layout = lay_out(parameters, cap_bytes(bucket_cap_mb), order=order)
        require_same(group, what, layout.text + ("" if hook is None else f"\nhook: {hook.text}"))
        self.layout = layout
        self.hook = hook
        self.keys = [bucket.key for bucket in layout.buckets]
        self.kind = kind
        self.traffic = Traffic(group.size)
        self.steps = Steps(group)
        self.is_uneven = False
        self.begun = 0
        self.group = group
        self._operations = 1 if hook is None else 1 + hook.operations
        # Each of a bucket's operations starts step after step: the ascending order that a channel in shared memory requires.
        self.stream = group.stream(channels=max(1, len(layout.buckets) * self._operations))
        if hook is not None:
            hook.serve(self.stream, self.keys)
        self.memory = self._allocate()

    def _allocate(self) -> list[BucketMemory]:
        group = self.group
        if self.kind is None:
            return [HostBucketMemory(bucket, group) for bucket in self.layout.buckets]
        if group.size > 1 and not group.capabilities.device_moves and _warned.acquire(blocking=False):
            _log.warning(
                "gradients are on a GPU, and backend %r takes them through the host; backend='hybrid' has NCCL, which 'auto' "
                "chooses where the program has imported CuPy, or begun to use a GPU through torch, when it joins",
                group.backend,
            )
        context = DeviceContext(self.kind, self.stream.guard)
        return [DeviceBucketMemory(bucket, context) for bucket in self.layout.buckets]

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
        return BucketCollectives(self.stream, first, self._operations, self.traffic)

    def view(self, gradient: Any, what: str) -> View:
        """A view of a gradient on the device of the buckets.

        Args:
            what: the gradient is, for errors.

        Raises:
            TensorMismatchError: its dtype has no mean, or the buckets are on a GPU and it is not.
            UsageError: it is no plain array.
            FerroError: it was not on the host in time, or the generation has ended.
        """
        kind = kind_of(gradient)
        if self.kind is None:
            with ErrorPrefix(what):
                return view_on_host(gradient, self.stream.guard()) if kind.on_device else kind.view(gradient)
        if kind.device_kind is not self.kind:
            raise TensorMismatchError(
                f"{what} is on {device_name(gradient)}, but its bucket is on GPU {self.kind.device.index}",
                hint="compute it there, or give all as arrays on the host from the beginning",
            )
        return kind.view_on_device(gradient)

    @contextmanager
    def uneven(self, follow: Callable[..., Any] | None) -> Iterator[None]:
        """Within it ranks may take different numbers of steps. At its end a rank takes those of the others by
        `reduction.followed`, for `follow` to be called after each.

        An exception that leaves it ends the generation: the other ranks would wait for this one's part in their steps.

        Raises:
            UsageError: `follow` cannot be called; or a block is open already: of this reducer; or in this thread, with another
                rank of this group.
        """
        if follow is not None and not callable(follow):
            raise UsageError(
                f"follow={follow!r} is no function", hint="pass what the loop does with means, such as optimizer.step"
            )
        if self.is_uneven:
            raise UsageError("an uneven() block is open already", hint="leave it first")
        groups = _open_blocks.groups
        if any(len({*each.world_ranks} & {*self.group.world_ranks}) > 1 for each in groups):
            raise UsageError(
                "an uneven() block of another model is open in this thread: a rank that left one of them would follow there, "
                "while others wait for its part in the other",
                hint="average both in one synchroniser, or as parts of one wrapped module; or open one block after the other",
            )
        try:
            self.is_uneven = True
            groups.append(self.group)
            with others_told(self.group):
                yield
        finally:  # an interrupt may have come before it was appended
            self.is_uneven = False
            if self.group in groups:
                groups.remove(self.group)


def check_means(parameters: Iterable[tuple[str, TensorSpec]], what: str) -> None:
    """Raises TensorMismatchError if a dtype has no mean. `what` the parameters are, for the error."""
    for name, spec in parameters:
        why_not = refusal(ReduceOp.MEAN, spec.dtype)
        if why_not is not None:
            raise TensorMismatchError(f"{what} {name}: {why_not.reason}", hint=why_not.hint)


def cap_bytes(bucket_cap_mb: Any) -> int:
    """The cap in bytes. Raises UsageError unless it is a positive number."""
    is_number = isinstance(bucket_cap_mb, Real) and not isinstance(bucket_cap_mb, bool)
    if not is_number or not 0 < bucket_cap_mb < sys.float_info.max / MEBIBYTE:
        raise UsageError(f"bucket_cap_mb={bucket_cap_mb!r} is no positive number", hint="leave it out for 25")
    return int(float(bucket_cap_mb) * MEBIBYTE)
