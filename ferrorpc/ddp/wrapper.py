"""The base class of both DistributedDataParallel wrappers: the one for any module and the one for torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, Self

from ferrorpc.ddp.replica import Replica
from ferrorpc.ddp.steps import Steps
from ferrorpc.errors import UsageError

_DEVICE: Final = "bring the module to the device before it is wrapped: module.to(device)"
_BUFFERS: Final = 'leave it out, or pass buffers="local" in place of False'
_NOT_NEEDED: Final = "leave it out: ranks may use different parameters in every step"
_COUNTERPARTS: Final = {
    "device_ids": _DEVICE,
    "output_device": _DEVICE,
    "dim": "leave it out: a wrapper has one module and one device",
    "process_group": "pass the group as group=, such as init_process_group() returned",
    "device_mesh": "pass a group as group=, such as ferrorpc.Mesh gives for a dimension",
    "broadcast_buffers": _BUFFERS,
    "forward_sync_buffers": _BUFFERS,
    "bucket_cap_mb_list": "pass one cap for all buckets, as bucket_cap_mb=25",
    "batched_grad_copy": "leave it out: gradients are views of the buckets, or copied together",
    "lazy_bucket_allocation": "leave it out: buckets are made once, and gradients are views of them, which take no more memory",
    "find_unused_parameters": _NOT_NEEDED,
    "skip_all_reduce_unused_params": _NOT_NEEDED,
    "static_graph": _NOT_NEEDED,
    "check_reduction": _NOT_NEEDED,
    "delay_all_reduce_named_params": "leave it out",
    "param_to_hook_all_reduce": "leave it out",
    "mixed_precision": "use torch.autocast; to send gradients as bfloat16 pass hook=ferrorpc.hooks.Compress('bf16')",
}
"""Arguments of torch's own DistributedDataParallel, and what to do instead here."""


class Wrapper:
    """The part of DistributedDataParallel that does not depend on when gradients are averaged."""

    _replica: Replica

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Raises UsageError for an argument that only torch's own wrapper has, with its counterpart here."""
        for name in given:
            if name in _COUNTERPARTS:
                raise UsageError(f"{name}= is an argument of torch's {cls.__name__}, not of this", hint=_COUNTERPARTS[name])
        return super().__new__(cls)

    def broadcast_parameters(self, root: int = 0) -> None:
        """Gives every rank the weights (and buffers, if the module has any) of rank `root`, in place. Collective."""
        self._replica.broadcast(root)

    def check_weights(self) -> None:
        """Compares the weights of all ranks, as hashes, through the coordinator. Collective.

        Raises:
            CollectiveMismatchError: they differ. It names the ranks that differ from the majority, and the first parameter
                that differs.
        """
        self._replica.check_weights("now")

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it gradients accumulate over several batches, and none is averaged. All ranks alike."""
        return self._replica.no_sync()

    def accumulate(self, count: int) -> Iterator[int]:
        """For a batch in `count` parts: `for part in ddp.accumulate(4)` yields 0 to 3, and gradients are averaged with the last
        part. They accumulate until then, so scale each part's loss by its share. Counts may differ between ranks. Not within
        another one of the same module: that raises UsageError as the outer one goes on.

        A loop that ends before the last part, as where the data end, averages nothing, and the gradients keep the sum: give the
        count of parts that there are. Write `zip(ddp.accumulate(4), loader)`: the other way round takes a fifth batch from the
        loader and drops it."""
        return self._replica.accumulate(count)

    def uneven(self, follow: Callable[[], Any] | None = None) -> AbstractContextManager[None]:
        """Within it ranks may take different numbers of steps: one that has left the block counts with weight 0.

        A rank waits at the end of the block until all have left it. An exception that leaves the block ends the generation,
        because the others wait too. Means are over the ranks that still take part. Buffers are not exchanged
        within the block; at its end all ranks take those of the (lowest) rank with the most steps, unless they are "local".
        A thread has one such block open at a time: a loop that trains two models wraps one module with both as parts.

        Args:
            follow: called on a rank that has left, after each later step, with the means in `.grad`: None for a parameter that
                no rank used in that step, so loops must reset gradients to None, not to zeros. It does what the loop does once
                gradients are averaged, such as `optimizer.step`, so that weights and optimizer stay the same on all ranks.
                Without it the weights, too, are taken from the rank with the most steps.

        Raises:
            UsageError: as the block begins: another one, with some of the same other ranks, is open in this thread.
        """
        return self._replica.uneven(follow)

    @property
    def steps(self) -> Steps:
        """Where the time of this rank's last steps went: computation, exposed and hidden communication."""
        return self._replica.reducer.steps

    @property
    def sent_bytes(self) -> int:
        """Bytes that the busiest rank has sent for gradients so far."""
        return self._replica.reducer.traffic.sent_bytes


def check_unwrapped(module: Any) -> None:
    """Raises UsageError if the module or a submodule is wrapped already: both wrappers would average the same gradients."""
    parts = getattr(module, "named_modules", None)
    is_class = isinstance(module, type)
    for name, part in [("", module), *(parts() if callable(parts) and not is_class else ())]:
        if isinstance(part, Wrapper):
            raise UsageError(
                f"{f'{name!r} of the module' if name else f'module={type(module).__name__}'} is wrapped already",
                hint="wrap a module once; ddp.module is the one in a wrapper",
            )
