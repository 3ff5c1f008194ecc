"""Which gradients travel together: the layout of parameters into buckets, a pure function of names, specs and caps.

Many small messages cost a round trip each, one large one cannot start before the last gradient is there. Buckets lie between.
Gradients become ready from the last layer to the first, so buckets are filled in reverse order of registration; the first
one is small, so that the network has something to do early. A bucket holds one dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ferrorpc.types import DType, TensorSpec

FIRST_BUCKET_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one gradient lies: elements [start, stop) of its bucket."""

    name: str
    spec: TensorSpec
    bucket: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients of one dtype that are reduced by one call.

    Attributes:
        index: buckets are numbered in the order in which they are expected to be full.
        count: elements in all.
    """

    index: int
    dtype: DType
    slots: tuple[Slot, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Layout:
    """All buckets, and where each name lies.

    Attributes:
        text: one line a fact; equal texts mean equal layouts. Ranks compare it before they exchange anything.
    """

    buckets: tuple[Bucket, ...]
    slots: dict[str, Slot]
    text: str


@dataclass(slots=True)
class _Open:
    """A bucket while it is filled."""

    dtype: DType
    cap_bytes: int
    members: list[tuple[str, TensorSpec]] = field(default_factory=list)
    filled_bytes: int = 0

    def takes(self, nbytes: int) -> bool:
        return not self.members or self.filled_bytes + nbytes <= self.cap_bytes

    def add(self, name: str, spec: TensorSpec, nbytes: int) -> None:
        self.members.append((name, spec))
        self.filled_bytes += nbytes


def lay_out(parameters: Sequence[tuple[str, TensorSpec]], cap_bytes: int, first_cap_bytes: int = FIRST_BUCKET_BYTES) -> Layout:
    """The layout of parameters, given in order of registration with names that differ.

    Args:
        cap_bytes: how large a bucket may get; a larger gradient has one of its own.
        first_cap_bytes: the same for the first bucket, if smaller.
    """
    full: list[_Open] = []
    filling: dict[DType, _Open] = {}
    started = 0
    for name, spec in reversed(parameters):
        nbytes = math.prod(spec.shape) * spec.dtype.itemsize
        current = filling.get(spec.dtype)
        if current is None or not current.takes(nbytes):
            if current is not None:
                full.append(current)
            current = filling[spec.dtype] = _Open(spec.dtype, cap_bytes if started else min(cap_bytes, first_cap_bytes))
            started += 1
        current.add(name, spec, nbytes)
    expected = {name: place for place, (name, _) in enumerate(reversed(parameters))}
    full.extend(filling.values())
    full.sort(key=lambda bucket: expected[bucket.members[-1][0]])
    return _numbered(full, parameters, cap_bytes)


def _numbered(full: Iterable[_Open], parameters: Sequence[tuple[str, TensorSpec]], cap_bytes: int) -> Layout:
    buckets = []
    slots: dict[str, Slot] = {}
    for index, bucket in enumerate(full):
        start = 0
        for name, spec in bucket.members:
            stop = start + math.prod(spec.shape)
            slots[name] = Slot(name, spec, index, start, stop)
            start = stop
        buckets.append(Bucket(index, bucket.dtype, tuple(slots[name] for name, _ in bucket.members), start))
    lines = [f"bucket cap {cap_bytes} bytes", f"{len(parameters)} parameters"]
    lines += [f"{name}: {spec}" for name, spec in parameters]
    return Layout(tuple(buckets), slots, "\n".join(lines))
