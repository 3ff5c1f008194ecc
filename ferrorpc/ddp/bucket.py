"""The layout of gradients in buckets, a pure function of names, specs and caps.

Many small messages cost a round trip each, and one large message cannot start before the last gradient is ready. Buckets are a
compromise. Gradients become ready from the last layer to the first, so buckets are filled in reverse order of registration. The
first bucket is small, so that communication starts early. The last one is halved repeatedly: no computation follows the last
gradient, so the reduction of its bucket is exposed in full. A bucket holds one dtype.

A bucket is one array. Where gradients are averaged, it begins with a header in its own dtype: one element for each gradient,
which is not zero if the rank has used that parameter, one for the rank's weight, and one that is zero if the rank has left an
`uneven` block and only follows the others. Header and gradients are reduced by the same call, so the used parameters, the sum
of the weights, and whether all have left need no message of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

from ferrorpc.errors import UsageError
from ferrorpc.types import DType, TensorSpec

FIRST_BUCKET_BYTES: Final = 1 << 20
ALIGNMENT_BYTES: Final = 64
"""Every gradient starts at a multiple of it: the size of a cache line, and of the widest vector register."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one gradient lies: elements [start, stop) of its bucket.

    Attributes:
        flag: the index of the header element that says whether it was used.
    """

    name: str
    spec: TensorSpec
    bucket: int
    flag: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients of one dtype that are reduced by one call.

    Attributes:
        index: its number in the order in which buckets are expected to be complete.
        header: how many elements precede the first gradient; 0 where there is no header.
        count: how many elements it has in all.
    """

    index: int
    dtype: DType
    slots: tuple[Slot, ...]
    header: int
    count: int

    @property
    def key(self) -> str:
        """Names its contents: equal for gradients of the same names and specs in the same places, whatever other buckets there
        are."""
        contents = "\n".join(f"{slot.start} {slot.spec} {slot.name!r}" for slot in self.slots)
        return f"bucket-{hashlib.sha256(contents.encode()).hexdigest()[:16]}"

    @property
    def weight(self) -> int:
        """The index of the header element that holds the weight."""
        return len(self.slots)

    @property
    def takers(self) -> int:
        """The index of the header element that holds how many ranks take the step and do not only follow."""
        return len(self.slots) + 1

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """[start, stop) of the elements behind the header that belong to no gradient."""
        return between([(slot.start, slot.stop) for slot in self.slots], self.header, self.count)


@dataclass(frozen=True, slots=True)
class Layout:
    """All buckets, and the slot of each name.

    Attributes:
        text: one fact per line; equal texts mean equal layouts. Ranks compare it before they exchange anything.
    """

    buckets: tuple[Bucket, ...]
    slots: dict[str, Slot]
    text: str


@dataclass(slots=True)
class _OpenBucket:
    """A bucket while it is being filled."""

    dtype: DType
    cap_bytes: int
    members: list[tuple[str, TensorSpec]] = field(default_factory=list)
    filled_bytes: int = 0

    def has_room(self, spec: TensorSpec) -> bool:
        return self.filled_bytes + spec.nbytes <= self.cap_bytes

    def add(self, name: str, spec: TensorSpec) -> None:
        self.members.append((name, spec))
        self.filled_bytes += spec.nbytes


def lay_out(
    parameters: Sequence[tuple[str, TensorSpec]],
    cap_bytes: int,
    first_cap_bytes: int = FIRST_BUCKET_BYTES,
    order: Sequence[str] | None = None,
    with_header: bool = True,
) -> Layout:
    """The layout of parameters, given in order of registration. Names are unique.

    Args:
        cap_bytes: how many bytes of gradients a bucket may hold; a larger gradient has one of its own.
        first_cap_bytes: the same for the first and last bucket, if smaller; a larger gradient is not divided.
        order: all names, in the order in which their gradients are expected; None for the reverse of registration.
        with_header: whether buckets have room for a header. Behind it gradients lie alike with and without one.

    Raises:
        UsageError: `order` does not name each parameter once.
    """
    specs = dict(parameters)
    names = list(reversed(specs)) if order is None else _checked_order(order)
    if sorted(names) != sorted(specs):
        strange = sorted(set(names) ^ set(specs)) or sorted(name for name in specs if names.count(name) > 1)
        raise UsageError(f"order= does not name each parameter once: see {', '.join(strange)}", hint="list every name once")
    full: list[_OpenBucket] = []
    filling: dict[DType, _OpenBucket] = {}
    for name in names:
        spec = specs[name]
        current = filling.get(spec.dtype)
        if current is None or not current.has_room(spec):
            if current is not None:
                full.append(current)
            cap = cap_bytes if full or filling else min(cap_bytes, first_cap_bytes)
            current = filling[spec.dtype] = _OpenBucket(spec.dtype, cap)
        current.add(name, spec)
    full.extend(filling.values())
    position = {name: number for number, name in enumerate(names)}
    full.sort(key=lambda bucket: position[bucket.members[-1][0]])
    if full:
        full.extend(_halved(full.pop(), first_cap_bytes))
    facts = [f"bucket cap {cap_bytes} bytes, first and last {min(cap_bytes, first_cap_bytes)}", f"{len(specs)} parameters"]
    facts += [f"{name}: {spec}" for name, spec in specs.items()]
    facts += [] if order is None else [f"expected: {name}" for name in names]
    return _numbered(full, "\n".join(facts), with_header)


def between(runs: Sequence[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """[start, stop) of what is left of the elements from `first` to `last` without these runs, which are in order."""
    starts, stops = [*(start for start, _ in runs), last], [first, *(stop for _, stop in runs)]
    return [(stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start]


def _halved(last: _OpenBucket, small_bytes: int) -> list[_OpenBucket]:
    """Divides a bucket: cuts off the half that is expected first, again and again, until the rest is small."""
    pieces = []
    rest = last
    while rest.filled_bytes > small_bytes and len(rest.members) > 1:
        filled = list(accumulate(spec.nbytes for _, spec in rest.members))
        cut = min(range(1, len(filled)), key=lambda count: abs(2 * filled[count - 1] - rest.filled_bytes))
        pieces.append(_OpenBucket(last.dtype, last.cap_bytes, rest.members[:cut], filled[cut - 1]))
        rest = _OpenBucket(last.dtype, last.cap_bytes, rest.members[cut:], rest.filled_bytes - filled[cut - 1])
    return [*pieces, rest]


def _numbered(full: Iterable[_OpenBucket], text: str, with_header: bool) -> Layout:
    buckets = []
    slots: dict[str, Slot] = {}
    for index, bucket in enumerate(full):
        unit = ALIGNMENT_BYTES // bucket.dtype.itemsize
        header = stop = _aligned(len(bucket.members) + 2, unit) if with_header else 0
        for flag, (name, spec) in enumerate(bucket.members):
            start = _aligned(stop, unit)
            stop = start + spec.elements
            slots[name] = Slot(name, spec, index, flag, start, stop)
        buckets.append(Bucket(index, bucket.dtype, tuple(slots[name] for name, _ in bucket.members), header, stop))
    return Layout(tuple(buckets), slots, text)


def _aligned(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _checked_order(order: Any) -> list[str]:
    if isinstance(order, str) or not isinstance(order, Iterable):
        raise UsageError(f"order={order!r} is no list of names", hint="list every name once")
    names = list(order)
    if not all(isinstance(name, str) for name in names):
        raise UsageError(f"order={order!r} has entries that are no names", hint="names are paths: a list's first leaf is '0'")
    return names
