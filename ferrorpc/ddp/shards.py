"""Divides parameters into one shard for each rank: gradients are reduce-scattered, and updated weights are all-gathered.

Idea. Parameters are packed into flat buffers of one dtype, padded so that every rank's shard has the same length; a shard may
begin and end within a parameter. Each rank gets only the mean gradients of its shard, updates its weights, and all ranks
gather the new weights. This is the first stage of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", 2020. Buffers have a size limit, so that one is packed while others are in transfer. Weights are unpacked
when all of them are there, so that an error leaves none half updated.

Cost, for n bytes of gradients on p ranks: n (p-1)/p bytes sent to reduce and as many to gather, as for an all_reduce. Memory:
n bytes of buffers, 2 n/p for the shards of gradients and weights, and 1/p of the update rule's state. Buffers are on the
device of the parameters. Updates run on the host, so a shard of parameters on a GPU is copied there and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from typing import Any

import numpy as np

from ferrorpc.arrays.cupy_kind import CupyKind
from ferrorpc.arrays.error_prefix import ErrorPrefix
from ferrorpc.arrays.kinds import copy_into, spec_of, split, view, view_out
from ferrorpc.consistency import require_same
from ferrorpc.ddp.bucket import ALIGNMENT_BYTES, Bucket, lay_out
from ferrorpc.ddp.bucket_memory import Array
from ferrorpc.ddp.packing import unpack
from ferrorpc.ddp.placement import current_device
from ferrorpc.ddp.reducer import cap_bytes, check_means
from ferrorpc.ddp.stream_order import StreamOrder
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import Guard
from ferrorpc.types import ReduceOp, TensorSpec
from ferrorpc.work import Work


class Shard:
    """This rank's part of one buffer.

    Args:
        kind: of CuPy arrays on the GPU that holds the buffer; None for the host.

    Attributes:
        weights: shape (length,), storage dtype, on the host: read and written by the update.
        gradient: the same, the mean over all ranks.
    """

    def __init__(self, bucket: Bucket, group: ProcessGroup, kind: CupyKind | None) -> None:
        self.bucket = bucket
        self._slots = [slot for slot in bucket.slots if slot.stop > slot.start]
        unit = ALIGNMENT_BYTES // bucket.dtype.itemsize
        length = -(-bucket.count // (group.size * unit)) * unit
        self._group = group
        self._first = group.rank * length
        gaps = [*bucket.gaps, (bucket.count, group.size * length)]
        mine = [(max(start - self._first, 0), min(stop - self._first, length)) for start, stop in gaps]
        self._gaps = [slice(start, stop) for start, stop in mine if start < stop]
        """The elements of this rank's part that belong to no parameter."""
        self._kind = kind
        self._order = None if kind is None else StreamOrder(kind.device, "optimizer's last")
        if self._order is not None:
            self._order.allocating()
        shape = (group.size * length,)
        self._flat: Any = group.empty(shape, bucket.dtype) if kind is None else kind.empty(shape, bucket.dtype)
        self._storage: Any = self._flat.view(bucket.dtype.storage)
        with current_device(kind):
            self._storage[...] = 0
        self.weights: Array = np.zeros(length, bucket.dtype.storage)
        self.gradient: Array = np.zeros(length, bucket.dtype.storage)
        self._typed = [np.ndarray((length,), self._flat.dtype, each.data) for each in (self.weights, self.gradient)]

    def __del__(self) -> None:
        order = getattr(self, "_order", None)
        if order is not None:
            order.release(dict(vars(self)))

    def check_not_captured(self) -> None:
        """Raises UsageError if a graph is being captured from the current stream, or from that of the buffer's last use."""
        if self._order is not None:
            self._order.check()

    def _enter(self) -> AbstractContextManager[Any]:
        """A context for the buffer's next use, on its device and after all earlier ones."""
        if self._order is not None:
            self._order.enter()
        return current_device(self._kind)

    def reduce(self, gradients: Mapping[str, Any]) -> Work[Any]:
        """Starts the reduction, for `finish_reduce`. A gradient that is None counts as zeros."""
        with self._enter():
            for slot in self.bucket.slots:
                given, place = gradients[slot.name], self._storage[slot.start : slot.stop]
                if given is None:
                    place[...] = 0
                else:
                    copy_into(place, view(given, on_device=self._kind is not None).data.reshape(-1))
        out = self._typed[1] if self._kind is None else None
        parts = split(self._flat, self._group.size)
        work: Work[Any] = self._group.reduce_scatter(parts, op=ReduceOp.MEAN, out=out, async_op=True)
        return work

    def finish_reduce(self, work: Work[Any]) -> None:
        """Waits until `gradient` is the mean."""
        mean = work.wait(host=True)
        if self._kind is not None:
            np.copyto(self.gradient, self._kind.staging.to_host(mean, self._group.guard()))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter with elements in the buffer, by name."""
        return {slot.name: slot.spec.shape for slot in self._slots}

    @property
    def places(self) -> list[str]:
        """Each of these parameters with its dtype, its shape and where it begins in the buffer."""
        return [f"{slot.name}: {slot.spec} at {slot.start}" for slot in self._slots]

    def extract(self, arrays: Mapping[str, Any], into: Any, guard: Guard | None = None) -> None:
        """Copies this rank's shard of arrays shaped like the parameters, by name, to a host array of the shard's length.

        NumPy converts dtypes that differ; bfloat16, which NumPy lacks, must be that of both.

        `guard` and errors as for `Staging.to_host`.
        """
        place = view_out(into, spec_of(into))
        for slot in self.bucket.slots:
            first, last = max(slot.start, self._first), min(slot.stop, self._first + len(self.weights))
            if first < last:
                source = view(arrays[slot.name], on_device=self._kind is not None).data.reshape(-1)
                found = source[first - slot.start : last - slot.start]
                copy_into(place.data[first - self._first : last - self._first], found, guard)
        place.commit()

    def assemble(self, mine: Any, root: int) -> dict[str, Any]:
        """The reverse of `extract`, on rank `root`: new arrays of `mine`'s kind. Empty on the other ranks. Collective."""
        given = view(mine)
        parts = self._group.gather(given.data if self._kind is None else self._kind.staging.to_device(given.data), root=root)
        if parts is None:
            return {}
        flat = np.concatenate([view(part).data for part in parts])
        return {
            slot.name: given.kind.wrap(flat[slot.start : slot.stop], TensorSpec(given.spec.dtype, slot.spec.shape))
            for slot in self._slots
        }

    def gather(self) -> Work[Any]:
        """Starts to gather all ranks' `weights`. What the update has made of those that belong to no parameter becomes zeros:
        in the next step the buffer's elements there are taken for gradients."""
        for gap in self._gaps:
            self.weights[gap] = 0
        mine = self._typed[0] if self._kind is None else self._kind.staging.to_device(self._typed[0])
        work: Work[Any] = self._group.all_gather(mine, out=self._flat, async_op=True)
        return work

    def store(self, weights: Mapping[str, Any]) -> None:
        """Writes the gathered weights to those of the parameters that are given."""
        with self._enter():
            unpack(self.bucket, self._storage, weights)


def check_state_rank(group: ProcessGroup, saved: Any, gather: str) -> None:
    """Raises UsageError if a sharded state was saved on another rank, or in a group of another size.

    Args:
        saved: rank and size.
        gather: the method whose result a group of any size can load.
    """
    try:
        rank, size = (int(number) for number in saved)
    except (TypeError, ValueError):
        hint = f"load what this rank's optimizer gave, or {gather}()"
        raise UsageError(f"rank={saved!r} in the state is no rank and size", hint=hint) from None
    if (rank, size) != (group.rank, group.size):
        raise UsageError(
            f"the state is that of rank {rank} of {size}, and this is rank {group.rank} of {group.size}",
            hint=f"load each rank's own, or what {gather}() gave: that is for groups of any size",
        )


class StepsTaken:
    """How many steps a sharded state has taken, and whether it can be used: with the states of the other ranks, and with the
    weights.

    Args:
        group: the group of those ranks.
        load: the method that loads a state.
    """

    def __init__(self, group: ProcessGroup, load: str) -> None:
        self._group = group
        self._load = load
        self.set(0)

    def set(self, count: int) -> None:
        """A new state has taken this many."""
        self.count = count
        self._is_agreed = False
        """Whether the states of all ranks are known to be of the same step."""
        self._is_ahead = False
        """Whether the state is a step ahead of the weights, because that step has failed."""

    def agree(self) -> None:
        """Returns if the states of all ranks are of the same step, to be called before each step. Collective.

        A job that is killed while each rank saves its own may leave states of different steps, or none on some ranks. Training
        would go on from them with the same weights on all ranks, and wrong.

        Raises:
            CollectiveMismatchError: they are not; on every rank, and the group stays open.
        """
        if not self._is_agreed:
            hint = "load what all ranks have saved after the same step"
            require_same(self._group, "states of the optimizer", f"that of step {self.count}", hint)
            self._is_agreed = True

    @contextmanager
    def next(self) -> Iterator[None]:
        """A context for the next step, in which the state is updated, and then the weights."""
        self._is_ahead = True
        self.count += 1
        yield
        self._is_ahead = False

    def check_not_ahead(self) -> None:
        """Raises UsageError if a step has failed between the update of the state and that of the weights."""
        if self._is_ahead:
            raise UsageError(
                "a step has failed: this state is a step ahead of the weights, and would apply the step twice",
                hint=f"pass the last saved state to {self._load}(), or make a new optimizer, which begins without memory",
            )


def check_state_layout(saved: str, own: str) -> None:
    """Raises UsageError if a sharded state is of other parameters, or of the same in other places. See `Shards.layout`."""
    for there, here in zip_longest(saved.split("\n"), own.split("\n"), fillvalue="nothing"):
        if there != here:
            raise UsageError(
                f"the state is not this optimizer's: it has {there!r} where this one has {here!r}",
                hint="make the optimizer of the same parameters in the same order, with the same bucket_cap_mb",
            )


class Shards:
    """The shards of one optimizer's parameters.

    Args:
        parameters: name and spec of each, in order. All ranks give the same; that is checked here.
        group: every rank constructs its shards at the same point of its program.
        bucket_cap_mb: how many MiB a buffer may hold; a larger parameter gets one of its own.
        text: what else must be the same on all ranks.
        kind: of CuPy arrays on the GPU that holds the buffers; None for the host.

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
        kind: CupyKind | None,
    ) -> None:
        check_means(parameters, "parameter")
        self._group = group
        self._specs = dict(parameters)
        cap = cap_bytes(bucket_cap_mb)
        layout = lay_out(parameters, cap, cap, with_header=False)
        require_same(group, "optimizer", f"{layout.text}\n{text}")
        self.shards = [Shard(bucket, group, kind) for bucket in layout.buckets if bucket.count]

    @property
    def layout(self) -> str:
        """Where each parameter lies, one a line. A rank's own state fits where it is the same."""
        return "\n".join(f"{place} of buffer {number}" for number, shard in enumerate(self.shards) for place in shard.places)

    def check(self, gradients: Mapping[str, Any]) -> None:
        """Checks gradients for `reduce`.

        Raises:
            UsageError: one is no plain array, or (TensorMismatchError) not like its parameter; or a graph is being captured
                from a stream in whose order the shards are used.
        """
        for shard in self.shards:
            shard.check_not_captured()
        for name, spec in self._specs.items():
            if gradients[name] is None:
                continue
            with ErrorPrefix(f"the gradient of {name!r}"):
                found = spec_of(gradients[name])
            if found != spec:
                raise TensorMismatchError(
                    f"the gradient of {name!r} is {found}, but the parameter is {spec}",
                    hint="convert parameters before their optimizer is made",
                )

    def reduce(self, weights: Mapping[str, Any], gradients: Mapping[str, Any]) -> None:
        """Sets every shard's `gradient` to the mean over all ranks, and its `weights` to the current ones.

        Args:
            weights: name -> array.
            gradients: name -> this rank's gradient, or None for zeros; checked before.
        """
        for shard, work in [(shard, shard.reduce(gradients)) for shard in self.shards]:
            shard.extract(weights, shard.weights, self._group.guard())
            shard.finish_reduce(work)

    def gather(self, weights: Mapping[str, Any]) -> None:
        """Gathers all ranks' `weights` and writes them to the arrays, by name; a parameter that is not given is left alone.

        Nothing is written before everything has arrived.
        """
        for work in [shard.gather() for shard in self.shards]:
            work.wait(host=True)
        for shard in self.shards:
            shard.store(weights)
