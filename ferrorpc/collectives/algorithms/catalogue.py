"""Every algorithm by operation and name: how its plan is built, what it costs, and whether it folds in rank order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ferrorpc.collectives.algorithms import barrier, direct, recursive, ring, tree
from ferrorpc.collectives.algorithms.plan import Plan
from ferrorpc.collectives.call import Call, Operation


@dataclass(frozen=True, slots=True)
class Cost:
    """What the busiest rank does, in the terms of the alpha-beta-gamma model."""

    rounds: float
    """Messages that wait for one another: times alpha."""
    sent_bytes: float
    """Bytes through one rank's link, the busier direction: times beta."""
    folded_bytes: float = 0.0
    """Bytes that go through a reduction kernel: times gamma."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One algorithm for one operation.

    Attributes:
        build: (call, rank, size) -> this rank's plan.
        cost: (group size, bytes one rank brings) -> cost. For scatter the bytes of one part, for reduce_scatter and
            all_to_all those of all parts.
        rank_order: results are the canonical left fold in rank order (or nothing is folded).
        compresses: sound with a wire codec: every value is rounded once on its way in and once on its way out, and all
            ranks end with the same bits.
    """

    name: str
    build: Callable[[Call, int, int], Plan]
    cost: Callable[[int, int], Cost]
    rank_order: bool = True
    compresses: bool = False


def _count(call: Call) -> int:
    return math.prod(call.inputs[0].shape)


def _counts(call: Call) -> list[int]:
    return [math.prod(spec.shape) for spec in call.inputs]


def _root(call: Call) -> int:
    if call.root is None:
        raise AssertionError(f"{call.operation.value} was called without a root")
    return call.root


def _log2(size: int) -> int:
    """Rounds in which doubling reaches `size` ranks."""
    return (size - 1).bit_length()


def _recursive_doubling_cost(size: int, nbytes: int) -> Cost:
    rounds = size.bit_length() - 1
    uneven = size != 1 << rounds
    return Cost(rounds + 2 * uneven, (rounds + uneven) * nbytes, (rounds + uneven) * nbytes)


def _share(size: int) -> float:
    """What is not one's own."""
    return (size - 1) / size


_ALL_REDUCE: Final = (
    Entry(
        "one_shot",
        lambda call, rank, size: direct.all_reduce_one_shot(_count(call), rank, size),
        lambda size, nbytes: Cost(1, (size - 1) * nbytes, (size - 1) * nbytes),
    ),
    Entry(
        "two_shot",
        lambda call, rank, size: direct.all_reduce_two_shot(_count(call), rank, size, compressed=call.wire is not None),
        lambda size, nbytes: Cost(2, 2 * _share(size) * nbytes, _share(size) * nbytes),
        compresses=True,
    ),
    Entry(
        "ring",
        lambda call, rank, size: ring.all_reduce(_count(call), rank, size),
        lambda size, nbytes: Cost(2 * (size - 1), 2 * _share(size) * nbytes, _share(size) * nbytes),
        rank_order=False,
    ),
    Entry(
        "recursive_doubling",
        lambda call, rank, size: recursive.all_reduce(_count(call), rank, size),
        _recursive_doubling_cost,
        rank_order=False,
    ),
    Entry(
        "tree",
        lambda call, rank, size: tree.all_reduce(_count(call), rank, size),
        lambda size, nbytes: Cost(2 * _log2(size), _log2(size) * nbytes, _log2(size) * nbytes),
        rank_order=False,
    ),
)

_REDUCE: Final = (
    Entry(
        "direct",
        lambda call, rank, size: direct.reduce(_count(call), rank, size, _root(call)),
        lambda size, nbytes: Cost(1, (size - 1) * nbytes, (size - 1) * nbytes),
        compresses=True,
    ),
    Entry(
        "tree",
        lambda call, rank, size: tree.reduce(_count(call), rank, size, _root(call)),
        lambda size, nbytes: Cost(_log2(size), _log2(size) * nbytes, _log2(size) * nbytes),
        rank_order=False,
    ),
)

_REDUCE_SCATTER: Final = (
    Entry(
        "direct",
        lambda call, rank, size: direct.reduce_scatter(_counts(call), rank, size),
        lambda size, nbytes: Cost(1, _share(size) * nbytes, _share(size) * nbytes),
        compresses=True,
    ),
    Entry(
        "ring",
        lambda call, rank, size: ring.reduce_scatter(_counts(call), rank, size),
        lambda size, nbytes: Cost(size - 1, _share(size) * nbytes, _share(size) * nbytes),
        rank_order=False,
    ),
)

_BROADCAST: Final = (
    Entry(
        "tree",
        lambda call, rank, size: tree.broadcast(rank, size, _root(call)),
        lambda size, nbytes: Cost(_log2(size), _log2(size) * nbytes),
    ),
    Entry(
        "direct",
        lambda call, rank, size: direct.broadcast(rank, size, _root(call)),
        lambda size, nbytes: Cost(1, (size - 1) * nbytes),
    ),
)

_ALL_GATHER: Final = (
    Entry(
        "direct",
        lambda call, rank, size: direct.all_gather(rank, size),
        lambda size, nbytes: Cost(1, (size - 1) * nbytes),
    ),
    Entry(
        "ring",
        lambda call, rank, size: ring.all_gather(rank, size),
        lambda size, nbytes: Cost(size - 1, (size - 1) * nbytes),
    ),
)

_BARRIER: Final = (
    Entry("direct", lambda call, rank, size: barrier.direct(rank, size), lambda size, nbytes: Cost(1, 0)),
    Entry(
        "dissemination",
        lambda call, rank, size: barrier.dissemination(rank, size),
        lambda size, nbytes: Cost(_log2(size), 0),
    ),
)

_GATHER: Final = Entry(
    "direct",
    lambda call, rank, size: direct.gather(rank, size, _root(call)),
    lambda size, nbytes: Cost(1, (size - 1) * nbytes),
)
_SCATTER: Final = Entry(
    "direct",
    lambda call, rank, size: direct.scatter(rank, size, _root(call)),
    lambda size, nbytes: Cost(1, (size - 1) * nbytes),
)
_ALL_TO_ALL: Final = Entry(
    "direct",
    lambda call, rank, size: direct.all_to_all(rank, size),
    lambda size, nbytes: Cost(1, _share(size) * nbytes),
)

CATALOGUE: Final[dict[Operation, tuple[Entry, ...]]] = {
    Operation.ALL_REDUCE: _ALL_REDUCE,
    Operation.BROADCAST: _BROADCAST,
    Operation.REDUCE: _REDUCE,
    Operation.GATHER: (_GATHER,),
    Operation.SCATTER: (_SCATTER,),
    Operation.ALL_GATHER: _ALL_GATHER,
    Operation.REDUCE_SCATTER: _REDUCE_SCATTER,
    Operation.ALL_TO_ALL: (_ALL_TO_ALL,),
    Operation.BARRIER: _BARRIER,
}
"""The algorithms of each operation, the preferred one first. `collectives.select` chooses among them."""
