"""Averages gradients in buckets, for all interfaces. A bucket is reduced as soon as its last gradient is ready.

Idea. Gradients are copied to buckets (bucket.py), which are reduced while later gradients are still computed. Every reducer
has a stream of its own, in which operations are numbered step x buckets + bucket, not in order of their start. So gradients
may become ready in different orders on different ranks, and calls of the user in between cannot be confused with them.
Bucketing and overlap are those of Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020;
there all ranks must reduce buckets in one order.

The mean is the group's canonical one: gradients are added in rank order, then divided by the number of ranks. With weights
each gradient is multiplied by its rank's weight, they are added in rank order, then divided by the sum of the weights. Half
types are weighted and added in float32, and rounded once. The gradients of a rank of weight 0 are ignored, whatever their
values.

Cost, for a step with n bytes of gradients: one copy into the buckets (none for gradients that are computed there), and for each
bucket one all_reduce, which carries 2 + gradients elements besides the n bytes.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

from ferrorpc.arrays.base import View
from ferrorpc.arrays.cupy_kind import CupyKind
from ferrorpc.arrays.error_prefix import ErrorPrefix
from ferrorpc.arrays.kinds import kind_of, view_on_host
from ferrorpc.consistency import require_same
from ferrorpc.ddp.bucket import lay_out
from ferrorpc.ddp.bucket_memory import is_divisor
from ferrorpc.ddp.bucket_set import BucketSet
from ferrorpc.ddp.hooks.base import Hook
from ferrorpc.ddp.placement import device_name
from ferrorpc.ddp.reduction import Reduction
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.failure import others_told
from ferrorpc.group import ProcessGroup
from ferrorpc.types import ReduceOp, TensorSpec, number_of, refusal

MEBIBYTE = 1 << 20


class _OpenBlocks(threading.local):
    """The groups of the `uneven` blocks that are open in this thread."""

    def __init__(self) -> None:
        self.groups: list[ProcessGroup] = []


_open_blocks = _OpenBlocks()


class Reducer(BucketSet):
    """Averages a fixed set of named gradients over a group, step after step.

    Args:
        parameters: name and spec of each, in order of registration. All ranks give the same; that is checked here.
        group: every rank constructs its reducer at the same point of its program.
        bucket_cap_mb: how many MiB of gradients a bucket may hold.
        what: what the parameters are, for errors.
        order: names in the order in which gradients are expected; None for the reverse of registration.
        hook, kind: as for `BucketSet`. With a hook, steps without a weight have the weight 1.

    Attributes:
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
        super().__init__(layout, group, hook, kind)
        self._group = group
        self.begun = 0
        self.is_uneven = False

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
                return view_on_host(gradient, self.guard()) if kind.on_device else kind.view(gradient)
        if kind.device_kind is not self.kind:
            raise TensorMismatchError(
                f"{what} is on {device_name(gradient)}, but its bucket is on GPU {self.kind.device.index}",
                hint="compute it there, or give all as arrays on the host from the beginning",
            )
        return kind.view_on_device(gradient)

    def begin(self, weight: float | None = None, follows: bool = False) -> Reduction:
        """Begins the next step's reduction. All ranks begin it with a weight, or all without.

        Args:
            follows: this rank has left an `uneven` block and only follows the others.

        Raises:
            UsageError: the weight is no number, negative or not finite; or a graph is being captured from the current stream,
                or from that of the last step, and the buckets are on a GPU.
        """
        default = None if self.hook is None and not self.is_uneven else 1.0
        weight = default if weight is None else _checked_weight(weight)
        reduction = Reduction(self, self.begun, weight, follows)
        self.begun += 1
        return reduction

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Within it ranks may take different numbers of steps. At its end a rank takes those of the others by `followed`.

        An exception that leaves it ends the generation: the other ranks would wait for this one's part in their steps.

        Raises:
            UsageError: a block is open already: of this reducer; or in this thread, with another rank of this group.
        """
        if self.is_uneven:
            raise UsageError("an uneven() block is open already", hint="leave it first")
        groups = _open_blocks.groups
        if any(len({*each.world_ranks} & {*self._group.world_ranks}) > 1 for each in groups):
            raise UsageError(
                "an uneven() block of another model is open in this thread: a rank that left one of them would follow there, "
                "while others wait for its part in the other",
                hint="average both in one synchroniser, or as parts of one wrapped module; or open one block after the other",
            )
        self.is_uneven = True
        groups.append(self._group)
        try:
            with others_told(self._group):
                yield
        finally:
            groups.remove(self._group)
            self.is_uneven = False

    def followed(self) -> Iterator[Reduction]:
        """The finished reductions of the others' steps, in which this rank takes part with weight 0 until all ranks do."""
        while self.memory:
            before = [(memory, slot, memory.save(slot)) for memory in self.memory for slot in memory.bucket.slots]
            reduction = self.begin(0.0, follows=True)
            if is_divisor(reduction.wait()):
                yield reduction
                continue
            # The step was refused, or all have left. Gradients that lie in the buckets are of the last step, not of this one.
            for memory, slot, saved in before:
                memory.restore(slot, saved)
            if not reduction.is_taken:
                return


def _checked_weight(weight: Any) -> float:
    """A rank's weight as a number. Raises UsageError."""
    number = number_of(weight)
    if not 0 <= number < math.inf:
        raise UsageError(f"weight={weight!r} is no share", hint="pass a number of samples or tokens, 0 or more")
    return number


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
