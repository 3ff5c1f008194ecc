"""Synchronises a module's buffers between ranks: state that is no parameter, such as running statistics."""

from __future__ import annotations

from itertools import count
from typing import Any, Final

from ferrorpc.consistency import require_same
from ferrorpc.ddp.bucket import Bucket
from ferrorpc.ddp.packing import Packer
from ferrorpc.errors import UsageError
from ferrorpc.group import ProcessGroup
from ferrorpc.types import ReduceOp, refusal
from ferrorpc.work import Work

MODES: Final = ("broadcast", "mean", "local")


def named_buffers(module: Any) -> dict[str, Any]:
    """The module's buffers by name; none if it has no named_buffers()."""
    named = getattr(module, "named_buffers", None)
    return dict(named()) if callable(named) else {}


class Buffers:
    """Exchanges a module's buffers at the end of each step, as the last gradients are reduced: backward passes may change them,
    such as where a checkpoint repeats a forward pass. Rank 0's that all ranks take are never written there.

    Args:
        mode: "broadcast": all ranks take rank 0's. "mean": floating-point buffers become the mean over ranks, others rank 0's.
            "local": each rank keeps its own.

    Raises:
        UsageError: an unknown mode, or a buffer that cannot be written in place.
        TensorMismatchError: buffers are on another GPU than the group's.
        CollectiveMismatchError: ranks hold different buffers.
    """

    def __init__(self, module: Any, group: ProcessGroup, mode: str) -> None:
        if mode not in MODES:
            raise UsageError(f"buffers={mode!r} is no mode", hint=f"use one of: {', '.join(MODES)}")
        self._module = module
        self.mode = mode
        try:
            self._packer = Packer({} if mode == "local" else named_buffers(module), "buffer", group)
        except UsageError as problem:
            hint = f'{problem.hint}; or leave each rank its own buffers: buffers="local"'
            raise problem.again(hint) from None
        self._buckets = self._packer.layout.buckets if group.size > 1 else ()
        """Those that are exchanged."""
        self._is_root = group.rank == 0
        require_same(group, "buffers", f"mode {mode}\n{self._packer.layout.text}")
        self._stream = group.stream()
        self._numbers = count()
        self._in_flight: list[tuple[Bucket, Any, Work[Any]]] = []
        self._arrays: dict[str, Any] = {}
        """The buffers that are being exchanged."""

    @property
    def are_exchanged(self) -> bool:
        """Whether there are any to exchange, and others to exchange them with."""
        return bool(self._buckets)

    def check(self) -> None:
        """Raises TensorMismatchError if the dtype, shape or GPU of a buffer has changed since the module was wrapped."""
        if self._packer.layout.buckets:
            self._packer.check(named_buffers(self._module))

    def begin(self) -> None:
        """Starts the exchange. Raises as `check`; nothing was sent then."""
        if self._buckets:
            self._arrays = named_buffers(self._module)
            packed = [self._packer.packed(bucket, self._arrays) for bucket in self._buckets]
            pairs = zip(self._buckets, packed, strict=True)
            self._in_flight = [(bucket, each, self._start(bucket, each)) for bucket, each in pairs]

    def _has_mean(self, bucket: Bucket) -> bool:
        return self.mode == "mean" and refusal(ReduceOp.MEAN, bucket.dtype) is None

    def _start(self, bucket: Bucket, packed: Any) -> Work[Any]:
        number = next(self._numbers)
        if self._has_mean(bucket):
            typed = self._packer.typed(bucket, packed)
            return self._stream.all_reduce(typed, number, op=ReduceOp.MEAN, out=typed)
        return self._stream.broadcast(packed, number, root=0)

    def finish(self) -> None:
        """Waits, and writes the results in place; not called where the step was refused. Raises the error that ended the
        generation."""
        for bucket, packed, work in self._in_flight:
            work.wait(host=True)
            if not self._is_root or self._has_mean(bucket):
                self._packer.unpack(bucket, packed, self._arrays)
        self._in_flight, self._arrays = [], {}
