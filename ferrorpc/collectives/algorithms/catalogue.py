"""All algorithms, by operation and name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ferrorpc.collectives.algorithms import (
    barrier,
    bruck,
    chain,
    direct,
    hierarchical,
    pairwise,
    rabenseifner,
    recursive,
    ring,
    scatter_all_gather,
    tree,
)
from ferrorpc.collectives.algorithms.algorithm import Algorithm, Cost, Order
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.transports.credit import CHUNK_BYTES


def _count(call: Call) -> int:
    return math.prod(call.inputs[0].shape)


def _counts(call: Call) -> list[int]:
    return [math.prod(spec.shape) for spec in call.inputs]


def _root(call: Call) -> int:
    assert call.root is not None, f"{call.operation.value} has a root"
    return call.root


def _log2(size: int) -> int:
    """Rounds in which doubling reaches `size` ranks."""
    return (size - 1).bit_length()


def _share(size: int) -> float:
    """The share of an array that the other ranks own."""
    return (size - 1) / size


def _recursive_doubling_cost(size: int, nbytes: int) -> Cost:
    rounds = size.bit_length() - 1
    uneven = size != 1 << rounds
    return Cost(rounds + 2 * uneven, (rounds + uneven) * nbytes, (rounds + uneven) * nbytes)


def _rabenseifner_cost(size: int, nbytes: int) -> Cost:
    rounds = size.bit_length() - 1
    uneven = size != 1 << rounds
    half = _share(1 << rounds)
    return Cost(2 * rounds + 2 * uneven, (2 * half + uneven) * nbytes, (half + uneven) * nbytes)


def _rooted_cost(size: int, nbytes: int) -> Cost:
    """The root exchanges `nbytes` with every other rank."""
    there = size - 1
    return Cost(1, there * nbytes, messages=there, all_messages=there, all_bytes=there * nbytes)


def _tree_cost(size: int, nbytes: int) -> Cost:
    rounds, edges = _log2(size), size - 1
    return Cost(rounds, rounds * nbytes, all_messages=edges, all_bytes=edges * nbytes)


def _tree_all_reduce_cost(size: int, nbytes: int) -> Cost:
    """Up the tree and down again: the root receives as much as it sends later."""
    rounds, edges = _log2(size), size - 1
    return Cost(2 * rounds, rounds * nbytes, rounds * nbytes, all_messages=2 * edges, all_bytes=2 * edges * nbytes)


def _chain_cost(size: int, nbytes: int) -> Cost:
    edges = size - 1
    filling = max(size - 2, 0) * min(nbytes, CHUNK_BYTES)
    return Cost(edges, nbytes if edges else 0, filling_bytes=filling, all_messages=edges, all_bytes=edges * nbytes)


def _broadcast_two_shot_cost(size: int, nbytes: int) -> Cost:
    others = size - 1
    if not others:
        return Cost(0, 0)
    filling = _share(others) * nbytes
    return Cost(
        min(others, 2),
        nbytes,
        filling_bytes=filling,
        messages=2 * others - 1,
        all_messages=others**2,
        all_bytes=others * nbytes,
    )


def _scatter_all_gather_cost(size: int, nbytes: int) -> Cost:
    """Each slice passes about half of the tree's levels, then goes round the ring to every rank."""
    others, depth = size - 1, _log2(size)
    return Cost(
        depth + others,
        2 * _share(size) * nbytes,
        all_messages=others * (size + 1),
        all_bytes=(others + depth / 2) * nbytes,
    )


def _bruck_all_to_all_cost(size: int, nbytes: int) -> Cost:
    """A block is sent once for every bit set in its number."""
    return Cost(_log2(size), nbytes / size * sum(block.bit_count() for block in range(size)))


_ALL_REDUCE: Final = (
    Algorithm(
        "one_shot",
        lambda call, rank, size: direct.all_reduce_one_shot(_count(call), rank, size),
        lambda size, nbytes: Cost(1, (size - 1) * nbytes, (size - 1) * nbytes, messages=size - 1),
        Order.RANKS,
    ),
    Algorithm(
        "two_shot",
        lambda call, rank, size: direct.all_reduce_two_shot(_count(call), rank, size, compressed=call.wire is not None),
        lambda size, nbytes: Cost(2, 2 * _share(size) * nbytes, _share(size) * nbytes, messages=2 * (size - 1)),
        Order.RANKS,
        compresses=True,
    ),
    Algorithm(
        "ring",
        lambda call, rank, size: ring.all_reduce(_count(call), rank, size),
        lambda size, nbytes: Cost(2 * (size - 1), 2 * _share(size) * nbytes, _share(size) * nbytes),
        Order.RING,
    ),
    Algorithm(
        "recursive_doubling",
        lambda call, rank, size: recursive.all_reduce(_count(call), rank, size),
        _recursive_doubling_cost,
        Order.PAIRS,
    ),
    Algorithm(
        "rabenseifner",
        lambda call, rank, size: rabenseifner.all_reduce(_count(call), rank, size),
        _rabenseifner_cost,
        Order.PAIRS,
    ),
    Algorithm(
        "tree",
        lambda call, rank, size: tree.all_reduce(_count(call), rank, size),
        _tree_all_reduce_cost,
        Order.TREE,
    ),
)

_REDUCE: Final = (
    Algorithm(
        "direct",
        lambda call, rank, size: direct.reduce(_count(call), rank, size, _root(call)),
        lambda size, nbytes: replace(_rooted_cost(size, nbytes), folded_bytes=(size - 1) * nbytes),
        Order.RANKS,
        compresses=True,
    ),
    Algorithm(
        "tree",
        lambda call, rank, size: tree.reduce(_count(call), rank, size, _root(call)),
        lambda size, nbytes: replace(_tree_cost(size, nbytes), folded_bytes=_log2(size) * nbytes),
        Order.TREE,
    ),
)

_REDUCE_SCATTER: Final = (
    Algorithm(
        "direct",
        lambda call, rank, size: direct.reduce_scatter(_counts(call), rank, size),
        lambda size, nbytes: Cost(1, _share(size) * nbytes, _share(size) * nbytes, messages=size - 1),
        Order.RANKS,
        compresses=True,
    ),
    Algorithm(
        "ring",
        lambda call, rank, size: ring.reduce_scatter(_counts(call), rank, size),
        lambda size, nbytes: Cost(size - 1, _share(size) * nbytes, _share(size) * nbytes),
        Order.RING,
    ),
)

_BROADCAST: Final = (
    Algorithm(
        "tree",
        lambda call, rank, size: tree.broadcast(rank, size, _root(call)),
        _tree_cost,
    ),
    Algorithm(
        "direct",
        lambda call, rank, size: direct.broadcast(rank, size, _root(call)),
        _rooted_cost,
    ),
    Algorithm("chain", lambda call, rank, size: chain.broadcast(rank, size, _root(call)), _chain_cost),
    Algorithm(
        "two_shot",
        lambda call, rank, size: direct.broadcast_two_shot(_count(call), rank, size, _root(call)),
        _broadcast_two_shot_cost,
        needs_size=True,
    ),
    Algorithm(
        "scatter_all_gather",
        lambda call, rank, size: scatter_all_gather.broadcast(_count(call), rank, size, _root(call)),
        _scatter_all_gather_cost,
        needs_size=True,
    ),
)

_ALL_GATHER: Final = (
    Algorithm(
        "direct",
        lambda call, rank, size: direct.all_gather(rank, size),
        lambda size, nbytes: Cost(1, (size - 1) * nbytes, messages=size - 1),
    ),
    Algorithm(
        "ring",
        lambda call, rank, size: ring.all_gather(rank, size),
        lambda size, nbytes: Cost(size - 1, (size - 1) * nbytes),
    ),
    Algorithm(
        "bruck",
        lambda call, rank, size: bruck.all_gather(_count(call), rank, size),
        lambda size, nbytes: Cost(_log2(size), (size - 1) * nbytes),
        needs_alike=True,
    ),
)

_ALL_TO_ALL: Final = (
    Algorithm(
        "direct",
        lambda call, rank, size: direct.all_to_all(rank, size),
        lambda size, nbytes: Cost(1, _share(size) * nbytes, messages=size - 1),
    ),
    Algorithm(
        "pairwise",
        lambda call, rank, size: pairwise.all_to_all(rank, size),
        lambda size, nbytes: Cost(size - 1, _share(size) * nbytes),
    ),
    Algorithm(
        "bruck",
        lambda call, rank, size: bruck.all_to_all(_count(call), rank, size),
        _bruck_all_to_all_cost,
        needs_alike=True,
    ),
)

_BARRIER: Final = (
    Algorithm(
        "direct", lambda call, rank, size: barrier.direct(rank, size), lambda size, nbytes: Cost(1, 0, messages=size - 1)
    ),
    Algorithm(
        "dissemination",
        lambda call, rank, size: barrier.dissemination(rank, size),
        lambda size, nbytes: Cost(_log2(size), 0),
    ),
)

_GATHER: Final = (Algorithm("direct", lambda call, rank, size: direct.gather(rank, size, _root(call)), _rooted_cost),)
_SCATTER: Final = (Algorithm("direct", lambda call, rank, size: direct.scatter(rank, size, _root(call)), _rooted_cost),)

CATALOGUE: Final[dict[Operation, tuple[Algorithm, ...]]] = {
    Operation.ALL_REDUCE: _ALL_REDUCE,
    Operation.BROADCAST: _BROADCAST,
    Operation.REDUCE: _REDUCE,
    Operation.GATHER: _GATHER,
    Operation.SCATTER: _SCATTER,
    Operation.ALL_GATHER: _ALL_GATHER,
    Operation.REDUCE_SCATTER: _REDUCE_SCATTER,
    Operation.ALL_TO_ALL: _ALL_TO_ALL,
    Operation.BARRIER: _BARRIER,
}
"""The algorithms of each operation that any group can run, the preferred one first. `collectives.select` chooses among them."""


def algorithms_of(operation: Operation, hosts: Sequence[object] = ()) -> tuple[Algorithm, ...]:
    """The algorithms of an operation, including the hierarchical ones where the hosts are known.

    Args:
        hosts: the host of each group rank, as any value; () when that is not known.
    """
    layout = hierarchical.Layout(hosts) if hosts else None
    if layout is None or not layout.is_worth_it:
        return CATALOGUE[operation]
    return CATALOGUE[operation] + _hierarchical(operation, layout)


def _hierarchical(operation: Operation, layout: hierarchical.Layout) -> tuple[Algorithm, ...]:
    largest = max(len(ranks) for ranks in layout.members)
    hosts, shards = len(layout.members), layout.shards
    across = _share(hosts) / shards
    if operation is Operation.ALL_REDUCE:
        holder = _share(shards) + 2 * across + (largest - 1) / shards
        return (
            Algorithm(
                "hierarchical",
                lambda call, rank, size: hierarchical.all_reduce(_count(call), rank, layout),
                lambda size, nbytes: Cost(4, max(holder, 1.0) * nbytes, ((largest - 1) / shards + across) * nbytes),
                Order.HOSTS,
            ),
        )
    if operation is Operation.BROADCAST:
        return (
            Algorithm(
                "hierarchical",
                lambda call, rank, size: hierarchical.broadcast(_count(call), rank, layout, _root(call)),
                lambda size, nbytes: Cost(2 + _log2(hosts), (_share(shards) + (_log2(hosts) + largest - 1) / shards) * nbytes),
                needs_size=True,
            ),
        )
    return ()
