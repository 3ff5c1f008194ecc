"""The bucketed mean, under every face of data parallelism: a bucket is reduced as soon as its last gradient is there.

Idea. Gradients lie in buckets (bucket.py), which travel while later gradients are still computed. Every reducer has a stream of
its own, in which operations are numbered by meaning, round x buckets + bucket, not by order. So ranks may become ready in
different orders, and nothing the user calls in between can be mixed up with it. Bucketing and overlap are those of Li et al.,
"PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020; numbers in place of an agreed order are not.

The mean is the group's canonical one: gradients added in rank order, then divided by the number of ranks; with weights, each
gradient times its rank's weight, added in rank order, then divided by the sum of the weights. Half types are added, and
weighted, in float32 and rounded once. A rank of weight 0 counts for nothing, whatever its gradients are.

Cost, a round of n bytes of gradients: one copy into the buckets (none for gradients that are computed there), one all_reduce of
n bytes and 1 + gradients elements for each bucket, no other message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ferrorpc.arrays.base import View
from ferrorpc.arrays.cupy_kind import CupyKind
from ferrorpc.arrays.kinds import gpu_of, view
from ferrorpc.consistency import require_same
from ferrorpc.ddp.bucket import lay_out
from ferrorpc.ddp.fleet import Fleet
from ferrorpc.ddp.hooks.base import Hook, check_hook
from ferrorpc.ddp.naming import Named
from ferrorpc.ddp.placement import place_of
from ferrorpc.ddp.round import Round
from ferrorpc.ddp.steps import Steps
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.types import ReduceOp, TensorSpec, refusal

if TYPE_CHECKING:
    from ferrorpc.group import ProcessGroup

MEBIBYTE = 1 << 20


class Reducer(Fleet):
    """Means of a fixed set of named gradients over a group: a fleet of buckets that sets out round after round.

    Args:
        parameters: name and spec of each, in order of registration. All ranks give the same; that is checked here.
        group: the ranks; every one constructs its reducer at the same point of its program.
        bucket_cap_mb: how many MiB of gradients a bucket may hold.
        what: what the parameters are, for errors.
        order: names in the order in which gradients are expected; None for the reverse of registration.
        hook: how buckets of float32 and of half types are summed; None for as they are. With a hook, rounds without a weight
            weigh 1.
        kind: of CuPy arrays on the GPU where the buckets are to lie; None for the host.

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
        for name, spec in parameters:
            why_not = refusal(ReduceOp.MEAN, spec.dtype)
            if why_not is not None:
                raise TensorMismatchError(f"{what} {name}: {why_not.reason}", hint=why_not.hint)
        if hook is not None:
            check_hook(hook)
        layout = lay_out(parameters, cap_bytes(bucket_cap_mb), order=order)
        require_same(group, what, layout.text + ("" if hook is None else f"\nhook: {hook.text}"))
        super().__init__(layout, group, hook, kind)
        self.steps = Steps(group)
        self._rounds = 0
        self._usual_weight: float | None = None

    def view(self, gradient: Any, what: str) -> View:
        """Reads a gradient where the buckets are.

        Args:
            what: for errors.

        Raises:
            TensorMismatchError: its dtype has no mean, or the buckets are on a GPU and it is not.
            UsageError: it is no plain array.
        """
        if self.kind is None:
            with Named(what):
                return view(gradient)
        if gpu_of(gradient) is not self.kind:
            raise TensorMismatchError(
                f"{what} is on {place_of(gradient)}, but its bucket is on GPU {self.kind.device.index}",
                hint="compute it there, or give all as arrays on the host from the beginning",
            )
        return view(gradient, near=True)

    def begin(self, weight: float | None = None) -> Round:
        """The next round. Every rank begins the same rounds in the same order, all with a weight or all without.

        Raises:
            UsageError: the weight is no number, negative or not finite.
        """
        if weight is not None:
            weight = _share(weight)
        if weight is None:
            weight = self._usual_weight if self.hook is None else 1.0
        begun = Round(self, self.steps, self._rounds, weight)
        self._rounds += 1
        return begun

    @contextmanager
    def uneven(self, follow: Callable[[Round], None]) -> Iterator[None]:
        """Within it ranks may have different numbers of rounds. One that leaves takes part with weight 0 until all have left.

        Args:
            follow: called on a rank that has left, after each round of the others: the means are in their places.
        """
        if self._usual_weight is not None:
            raise UsageError("an uneven() block is open already", hint="leave it first")
        self._usual_weight = 1.0
        try:
            yield
            self._follow(follow)
        finally:
            self._usual_weight = None

    def _follow(self, follow: Callable[[Round], None]) -> None:
        while self.memory:
            current = self.begin(0.0)
            if current.wait() == 0:
                return
            follow(current)


def _share(weight: Any) -> float:
    """What a rank counts for. Raises UsageError."""
    try:
        share = float(weight)
    except (TypeError, ValueError):
        share = -1.0
    if not (math.isfinite(share) and share >= 0):
        raise UsageError(f"weight={weight!r} is no share", hint="pass a number of samples or tokens, 0 or more")
    return share


def cap_bytes(bucket_cap_mb: Any) -> int:
    """Bytes from MiB. Raises UsageError for what is no size."""
    is_number = isinstance(bucket_cap_mb, int | float) and not isinstance(bucket_cap_mb, bool)
    if not is_number or not 0 < bucket_cap_mb < math.inf:
        raise UsageError(f"bucket_cap_mb={bucket_cap_mb!r} is no positive number", hint="leave it away for 25")
    return int(bucket_cap_mb * MEBIBYTE)
