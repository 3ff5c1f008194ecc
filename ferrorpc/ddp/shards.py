"""Parameters cut into one shard a rank: gradients are reduced to where they are used, new weights gathered from there.

Idea. Parameters are packed, one behind the other, into flat buffers of one dtype, padded so that every rank has a shard of
equal length; a shard may begin and end within a parameter. Each rank reduces the gradients of its shard alone, updates it, and
all gather the new weights. This is the first stage of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", 2020. Buffers are of limited size, so that one is packed or unpacked while others travel.

Cost, for n bytes of gradients on p ranks: n (p-1)/p bytes sent to reduce and as many to gather, as for an all_reduce. Memory:
the buffers, n bytes, and a shard each for gradients and weights, 2 n/p, besides what the update rule remembers, which is 1/p.
Buffers lie where the parameters do. Updates are NumPy's, so of parameters on a GPU a shard comes to the host and goes back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from ferrorpc.agreement import agree
from ferrorpc.arrays.cupy_kind import CupyKind
from ferrorpc.arrays.kinds import copy_into, kind_of, spec_of, split, view, view_out
from ferrorpc.ddp.bucket import Bucket, lay_out
from ferrorpc.ddp.naming import Named
from ferrorpc.ddp.parcel import current
from ferrorpc.ddp.reducer import cap_bytes
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.types import ReduceOp, TensorSpec, refusal
from ferrorpc.work import Work

if TYPE_CHECKING:
    from ferrorpc.group import ProcessGroup

Array: TypeAlias = np.ndarray[Any, Any]
_ALIGNMENT_BYTES: Final = 64


class Shard:
    """This rank's part of one buffer.

    Args:
        kind: of the arrays of the GPU where the buffer is to lie; None for the host.

    Attributes:
        weights: shape (length,), storage dtype, on the host: what the update reads and writes.
        gradient: the same: the mean over all ranks.
    """

    def __init__(self, bucket: Bucket, group: ProcessGroup, kind: CupyKind | None) -> None:
        self.bucket = bucket
        self._slots = [slot for slot in bucket.slots if slot.stop > slot.start]
        count = bucket.count - bucket.header
        unit = _ALIGNMENT_BYTES // bucket.dtype.itemsize
        length = -(-count // (group.size * unit)) * unit
        self._group = group
        self._first = group.rank * length
        self._kind = kind
        shape = (group.size * length,)
        self._flat: Any = group.empty(shape, bucket.dtype) if kind is None else kind.empty(shape, bucket.dtype)
        self._storage: Any = self._flat.view(bucket.dtype.storage)
        self._home = None if kind is None else kind.device.current()
        """The stream in which the buffer was made, and to which its memory goes back."""
        with current(kind):
            self._storage[...] = 0
        self.weights: Array = np.zeros(length, bucket.dtype.storage)
        self.gradient: Array = np.zeros(length, bucket.dtype.storage)
        self._typed = [np.ndarray((length,), self._flat.dtype, each.data) for each in (self.weights, self.gradient)]

    def reduce(self, gradients: Mapping[str, Any]) -> Work[Any]:
        """Begins to reduce, for `take`. A gradient that is None counts as zeros."""
        with self._in_turn():
            for slot in self.bucket.slots:
                given, place = gradients[slot.name], self._place(slot.start, slot.stop)
                if given is None:
                    place[...] = 0
                else:
                    copy_into(place, view(given, near=self._kind is not None).data.reshape(-1))
        out = self._typed[1] if self._kind is None else None
        parts = split(self._flat, self._group.size)
        work: Work[Any] = self._group.reduce_scatter(parts, op=ReduceOp.MEAN, out=out, async_op=True)
        return work

    def take(self, work: Work[Any]) -> None:
        """Waits until `gradient` is the mean."""
        mean = work.wait(host=True)
        if self._kind is not None:
            np.copyto(self.gradient, self._kind.staging.to_host(mean))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each parameter in it that has elements."""
        return {slot.name: slot.spec.shape for slot in self._slots}

    def cut(self, arrays: Mapping[str, Any], into: Any) -> None:
        """Copies this rank's shard of arrays shaped like the parameters, by their names, into a host array of its length."""
        place = view_out(into, spec_of(into))
        for slot in self.bucket.slots:
            start, stop = slot.start - self.bucket.header, slot.stop - self.bucket.header
            first, last = max(start, self._first), min(stop, self._first + len(self.weights))
            if first < last:
                source = view(arrays[slot.name], near=self._kind is not None).data.reshape(-1)
                copy_into(place.data[first - self._first : last - self._first], source[first - start : last - start])
        place.commit()

    def whole(self, mine: Any, root: int) -> dict[str, Any]:
        """The reverse of `cut`, on rank `root`: arrays of `mine`'s kind in memory of their own. Empty elsewhere. Collective."""
        parts = self._group.gather(mine if self._kind is None else self._kind.staging.to_device(mine), root=root)
        if parts is None:
            return {}
        kind, dtype, header = kind_of(mine), spec_of(mine).dtype, self.bucket.header
        flat = np.concatenate([view(part).data for part in parts])
        return {
            slot.name: kind.wrap(flat[slot.start - header : slot.stop - header], TensorSpec(dtype, slot.spec.shape))
            for slot in self._slots
        }

    def gather(self) -> Work[Any]:
        """Begins to gather everyone's `weights`."""
        mine = self._typed[0] if self._kind is None else self._kind.staging.to_device(self._typed[0])
        work: Work[Any] = self._group.all_gather(mine, out=self._flat, async_op=True)
        return work

    def store(self, weights: Mapping[str, Any]) -> None:
        """Writes what was gathered into the parameters."""
        with self._in_turn():
            for slot in self.bucket.slots:
                place = view_out(weights[slot.name], slot.spec, near=self._kind is not None)
                place.data.reshape(-1)[...] = self._place(slot.start, slot.stop)
                place.commit()

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """What the current stream does with the buffer comes after all that was done with it, and before what will be."""
        if self._kind is None or self._home is None:
            yield
            return
        device, home = self._kind.device, self._home
        stream = device.current()
        is_home = stream.pointer == home.pointer
        if not is_home:
            stream.wait(home.record())
        try:
            with device.here():
                yield
        finally:
            if not is_home:
                home.wait(stream.record())

    def _place(self, start: int, stop: int) -> Any:
        header = self.bucket.header
        return self._storage[start - header : stop - header]


def check_whose(group: ProcessGroup, whose: Any, gather: str) -> None:
    """Raises UsageError where what another rank, or one of another group's size, remembered is loaded.

    Args:
        whose: rank and size.
        gather: the method whose result any group can load.
    """
    try:
        rank, size = (int(number) for number in whose)
    except (TypeError, ValueError):
        hint = f"load what this rank's optimizer gave, or {gather}()"
        raise UsageError(f"rank={whose!r} in the state is no rank and size", hint=hint) from None
    if (rank, size) != (group.rank, group.size):
        raise UsageError(
            f"the state is that of rank {rank} of {size}, and this is rank {group.rank} of {group.size}",
            hint=f"load each rank's own, or what {gather}() gave: that is for groups of any size",
        )


class Shards:
    """The parameters of one optimizer.

    Args:
        parameters: name and spec of each, in order. All ranks give the same; that is checked here.
        group: every rank constructs its shards at the same point of its program.
        bucket_cap_mb: how many MiB a buffer may hold; a larger parameter has one of its own.
        text: what else all ranks must agree on.
        kind: of the arrays of the GPU where the buffers are to lie; None for the host.

    Raises:
        UsageError: a bad cap.
        TensorMismatchError: a dtype that has no mean.
        CollectiveMismatchError: ranks hold different parameters.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, TensorSpec]],
        group: ProcessGroup,
        bucket_cap_mb: float,
        text: str,
        kind: CupyKind | None = None,
    ) -> None:
        for name, spec in parameters:
            why_not = refusal(ReduceOp.MEAN, spec.dtype)
            if why_not is not None:
                raise TensorMismatchError(f"parameter {name}: {why_not.reason}", hint=why_not.hint)
        self._specs = dict(parameters)
        cap = cap_bytes(bucket_cap_mb)
        layout = lay_out(parameters, cap, cap)
        agree(group, "optimizer", f"{layout.text}\n{text}")
        filled = [bucket for bucket in layout.buckets if any(math.prod(slot.spec.shape) for slot in bucket.slots)]
        self.shards = [Shard(bucket, group, kind) for bucket in filled]

    def reduce(self, weights: Mapping[str, Any], gradients: Mapping[str, Any]) -> None:
        """Brings `gradient` of every shard to the mean over all ranks, and `weights` to what they are.

        Args:
            weights: name -> array.
            gradients: name -> this rank's gradient, or None for zeros.

        Raises:
            TensorMismatchError: a gradient is not like its parameter. Nothing was sent then.
        """
        for name, spec in self._specs.items():
            if gradients[name] is None:
                continue
            with Named(f"the gradient of {name!r}"):
                found = spec_of(gradients[name])
            if found != spec:
                raise TensorMismatchError(
                    f"the gradient of {name!r} is {found}, but the parameter is {spec}",
                    hint="convert parameters before their optimizer is made",
                )
        for shard, work in [(shard, shard.reduce(gradients)) for shard in self.shards]:
            shard.cut(weights, shard.weights)
            shard.take(work)

    def gather(self, weights: Mapping[str, Any]) -> None:
        """Writes everyone's `weights` into the arrays they were read from."""
        for shard, work in [(shard, shard.gather()) for shard in self.shards]:
            work.wait(host=True)
            shard.store(weights)
