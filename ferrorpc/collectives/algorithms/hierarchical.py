"""Hierarchical: inside each host, then across hosts, then inside again, so that the links between hosts carry the least.

Idea. Every host cuts the array into as many shards as the smallest host has ranks, and gives each to one of its ranks. An
all-reduce folds shards inside the host; the ranks that hold the same shard on all hosts form a column and exchange only
that; results spread inside the host. So every rank of a host drives a part of its link to the others, and a shard crosses
it once each way. Broadcast does the same without folding; across hosts each column is a binomial tree. The fold is that of
each host in rank order, then that of the hosts in order: every run the same, all ranks the same bits, but not rank order.

Source. The shape of Open MPI's HAN (Luo et al., "HAN: a Hierarchical AutotuNed Collective Communication Framework", 2020) and
of Horovod's hierarchical all-reduce.

Cost, for n bytes on H hosts, the smallest of which has S ranks and the largest L: an all-reduce takes 4 rounds; the holder of a
shard sends n (S-1)/S + 2 (n/S) (H-1)/H + (L-1) n/S bytes, of which the second term crosses hosts. A broadcast takes
2 + ceil(log2 H) rounds, and n/S bytes cross from a host for each host it serves.
"""

from __future__ import annotations

from collections.abc import Sequence

from ferrorpc.collectives.algorithms.direct import fold_in_order
from ferrorpc.collectives.algorithms.partition import holds, slices
from ferrorpc.collectives.algorithms.plan import (
    Action,
    Buffer,
    Copy,
    Finish,
    Fold,
    Plan,
    Receive,
    Region,
    Send,
)
from ferrorpc.collectives.algorithms.tree import parent_and_children

_PARTS = 0
"""The slot of what a rank sends to the holder of a shard on its host."""
_ACROSS = 1
_RESULTS = 2
_INSIDE = 3
"""The slot of finished shards that are distributed inside a host."""


class Layout:
    """Which ranks share a host.

    Args:
        hosts: the host of each group rank, as a number or any other value.

    Attributes:
        members: the ranks of each host in order; hosts in the order of their first rank.
        shards: pieces the array is cut into, as many as the smallest host has ranks.
    """

    def __init__(self, hosts: Sequence[object]) -> None:
        names = list(dict.fromkeys(hosts))
        self.members = [[rank for rank, host in enumerate(hosts) if host == name] for name in names]
        self.shards = min(len(ranks) for ranks in self.members)

    @property
    def is_worth_it(self) -> bool:
        """Whether there are several hosts, and several ranks on one of them."""
        return 1 < len(self.members) < sum(len(ranks) for ranks in self.members)

    def host(self, rank: int) -> int:
        """The place of a rank's host among the hosts."""
        return next(place for place, ranks in enumerate(self.members) if rank in ranks)

    def column(self, shard: int) -> list[int]:
        """The ranks that hold a shard, host by host."""
        return [ranks[shard] for ranks in self.members]


def all_reduce(count: int, rank: int, layout: Layout) -> Plan:
    """Every host may have another number of ranks."""
    if count == 0:
        return Plan(())
    local = layout.members[layout.host(rank)]
    place = local.index(rank)
    cuts = slices(count, layout.shards)
    actions: list[Action] = [Send(local[shard], _PARTS, Region(Buffer.IN, 0, *cut)) for shard, cut in _others(cuts, place)]
    work_items: tuple[int, ...] = ()
    if place < layout.shards and holds(cuts[place]):
        start, stop = cuts[place]
        total = Region(Buffer.WORK, 0, 0, stop - start)
        actions += fold_in_order(Region(Buffer.IN, 0, start, stop), total, local, rank, _PARTS)
        actions += _exchange(layout.column(place), rank, start, stop)
        actions += [Send(peer, _INSIDE, Region(Buffer.OUT, 0, start, stop)) for peer in local if peer != rank]
        work_items = (stop - start, -(-(stop - start) // len(layout.members)))
    actions += [Receive(local[shard], _INSIDE, Region(Buffer.OUT, 0, *cut)) for shard, cut in _others(cuts, place)]
    return Plan(tuple(actions), work_items=work_items)


def _exchange(column: Sequence[int], rank: int, start: int, stop: int) -> list[Action]:
    """The shard of all hosts, [start, stop) of OUT, by direct exchange: each host folds one slice and returns it."""
    here = column.index(rank)
    cuts = slices(stop - start, len(column))
    others = [(peer, cut) for peer, cut in zip(column, cuts, strict=True) if peer != rank]
    actions: list[Action] = [Send(peer, _ACROSS, Region(Buffer.WORK, 0, *cut)) for peer, cut in others if holds(cut)]
    if holds(cuts[here]):
        total = Region(Buffer.WORK, 0, *cuts[here])
        if here:
            own, total = total, Region(Buffer.WORK, 1, 0, cuts[here][1] - cuts[here][0])
            actions += fold_in_order(own, total, column, rank, _ACROSS)
        else:
            actions += [Fold(peer, _ACROSS, total) for peer in column[1:]]
        result = Region(Buffer.OUT, 0, start + cuts[here][0], start + cuts[here][1])
        actions.append(Finish(total, result))
        actions += [Send(peer, _RESULTS, result) for peer, _ in others]
    actions += [
        Receive(peer, _RESULTS, Region(Buffer.OUT, 0, start + cut[0], start + cut[1])) for peer, cut in others if holds(cut)
    ]
    return actions


def broadcast(count: int, rank: int, layout: Layout, root: int) -> Plan:
    """The root's array of `count` elements, on every rank."""
    here, origin = layout.host(rank), layout.host(root)
    local = layout.members[here]
    place = local.index(rank)
    cuts = slices(count, layout.shards)
    source = Buffer.IN if rank == root else Buffer.OUT
    actions: list[Action] = []
    if rank == root:
        actions += [Send(local[shard], _PARTS, Region(Buffer.IN, 0, *cut)) for shard, cut in _others(cuts, place)]
    if place < layout.shards and holds(cuts[place]):
        shard = Region(source, 0, *cuts[place])
        column = layout.column(place)
        parent, children = parent_and_children(here, len(layout.members), origin)
        if parent is not None:
            actions.append(Receive(column[parent], _ACROSS, shard))
        elif rank != root:
            actions.append(Receive(root, _PARTS, shard))
        actions += [Send(column[child], _ACROSS, shard) for child in reversed(children)]
        actions += [Send(peer, _INSIDE, shard) for peer in local if peer not in (rank, root)]
    if rank == root:
        actions.append(Copy(Region(Buffer.IN, 0, 0, count), Region(Buffer.OUT, 0, 0, count)))
    else:
        actions += [Receive(local[shard], _INSIDE, Region(Buffer.OUT, 0, *cut)) for shard, cut in _others(cuts, place)]
    return Plan(tuple(actions), alike=True)


def _others(cuts: Sequence[tuple[int, int]], place: int) -> list[tuple[int, tuple[int, int]]]:
    """The shards of other places that are not empty."""
    return [(shard, cut) for shard, cut in enumerate(cuts) if shard != place and holds(cut)]
