"""Direct exchange: every rank sends its data straight to the ranks that need it.

Idea. Every pair of ranks has its own stream, so p-1 messages to p-1 peers travel in parallel. Small arrays are sent whole to
all ranks, and each rank reduces all of them (one round). Large ones are cut into p slices: slice r goes to rank r, which
reduces it and sends the result to all ranks (two rounds, the fewest bytes possible). Every fold is in rank order, so the
result is canonical, with the same bits either way.

Source. The all-to-all exchange of the MPI literature (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005, which calls the second form reduce-scatter and all-gather by pairwise exchange).

Cost, in rounds, bytes sent and bytes folded by the busiest rank, for n bytes a rank on p ranks:

    all_reduce one_shot      1    (p-1) n          (p-1) n
    all_reduce two_shot      2    2 n (p-1)/p      n (p-1)/p
    reduce                   1    (p-1) n, in      (p-1) n, at the root
    reduce_scatter           1    n (p-1)/p        n (p-1)/p
    gather, scatter          1    (p-1) n          0
    all_gather, broadcast    1    (p-1) n          0
    broadcast two_shot       2    n, by the root   0
    all_to_all               1    n (p-1)/p        0
"""

from __future__ import annotations

from collections.abc import Sequence

from ferrorpc.collectives.algorithms.partition import holds, others, slices
from ferrorpc.collectives.algorithms.plan import (
    Action,
    Buffer,
    Copy,
    Finish,
    Fold,
    FoldOwn,
    Load,
    Plan,
    Quantise,
    Receive,
    Region,
    Send,
)

_PARTS = 0
"""The slot of the inputs."""
_RESULTS = 1
"""The slot of reduced slices."""


def all_reduce_one_shot(count: int, rank: int, size: int) -> Plan:
    """Every rank sends its array to every other and reduces all of them."""
    if count == 0:
        return Plan(())
    own = Region(Buffer.IN, 0, 0, count)
    total = Region(Buffer.WORK, 0, 0, count)
    actions: list[Action] = [Send(peer, _PARTS, own) for peer in others(rank, size)]
    actions += fold_in_order(own, total, range(size), rank, _PARTS)
    actions.append(Finish(total, Region(Buffer.OUT, 0, 0, count)))
    return Plan(tuple(actions), work_items=(count,))


def all_reduce_two_shot(count: int, rank: int, size: int, *, compressed: bool = False) -> Plan:
    """Slice r of every rank goes to rank r, which reduces it and sends the result to all ranks.

    Args:
        compressed: the call has a wire codec: the owner then rounds its own slice as its messages were rounded, so that all
            ranks end with the same bits.
    """
    cuts = slices(count, size)
    start, stop = cuts[rank]
    actions: list[Action] = [
        Send(peer, _PARTS, Region(Buffer.IN, 0, *cuts[peer])) for peer in others(rank, size) if holds(cuts[peer])
    ]
    if start < stop:
        total, result = Region(Buffer.WORK, 0, 0, stop - start), Region(Buffer.OUT, 0, start, stop)
        actions += fold_in_order(Region(Buffer.IN, 0, start, stop), total, range(size), rank, _PARTS)
        actions.append(Finish(total, result))
        actions += [Send(peer, _RESULTS, result) for peer in others(rank, size)]
        if compressed:
            actions.append(Quantise(result))
    actions += [Receive(peer, _RESULTS, Region(Buffer.OUT, 0, *cuts[peer])) for peer in others(rank, size) if holds(cuts[peer])]
    return Plan(tuple(actions), work_items=(stop - start,))


def reduce(count: int, rank: int, size: int, root: int) -> Plan:
    """Every rank sends its array to the root, which reduces them."""
    own = Region(Buffer.IN, 0, 0, count)
    if rank != root:
        return Plan((Send(root, _PARTS, own),) if count else (), out_items=0)
    if count == 0:
        return Plan(())
    total = Region(Buffer.WORK, 0, 0, count)
    actions = fold_in_order(own, total, range(size), rank, _PARTS)
    actions.append(Finish(total, Region(Buffer.OUT, 0, 0, count)))
    return Plan(tuple(actions), work_items=(count,))


def reduce_scatter(counts: Sequence[int], rank: int, size: int) -> Plan:
    """Part r of every rank goes to rank r, which reduces it. `counts`: elements of each part, the same on all ranks."""
    actions: list[Action] = [
        Send(peer, _PARTS, Region(Buffer.IN, peer, 0, counts[peer])) for peer in others(rank, size) if counts[peer]
    ]
    count = counts[rank]
    if count:
        total = Region(Buffer.WORK, 0, 0, count)
        actions += fold_in_order(Region(Buffer.IN, rank, 0, count), total, range(size), rank, _PARTS)
        actions.append(Finish(total, Region(Buffer.OUT, 0, 0, count)))
    return Plan(tuple(actions), work_items=(count,))


def gather(rank: int, size: int, root: int) -> Plan:
    """Every rank sends its array to the root. Arrays may differ in size."""
    if rank != root:
        return Plan((Send(root, _PARTS, Region(Buffer.IN)),), out_items=0)
    actions: list[Action] = [Copy(Region(Buffer.IN), Region(Buffer.OUT, rank))]
    actions += [Receive(peer, _PARTS, Region(Buffer.OUT, peer)) for peer in others(rank, size)]
    return Plan(tuple(actions), out_items=size)


def scatter(rank: int, size: int, root: int) -> Plan:
    """The root sends part r to rank r. Parts may differ in size; only the root needs to know them."""
    if rank != root:
        return Plan((Receive(root, _PARTS, Region(Buffer.OUT)),))
    actions: list[Action] = [Send(peer, _PARTS, Region(Buffer.IN, peer)) for peer in others(rank, size)]
    actions.append(Copy(Region(Buffer.IN, rank), Region(Buffer.OUT)))
    return Plan(tuple(actions))


def all_gather(rank: int, size: int) -> Plan:
    """Every rank sends its array to every other. Arrays may differ in size."""
    actions: list[Action] = [Send(peer, _PARTS, Region(Buffer.IN)) for peer in others(rank, size)]
    actions.append(Copy(Region(Buffer.IN), Region(Buffer.OUT, rank)))
    actions += [Receive(peer, _PARTS, Region(Buffer.OUT, peer)) for peer in others(rank, size)]
    return Plan(tuple(actions), out_items=size)


def all_to_all(rank: int, size: int) -> Plan:
    """Every rank sends part r to rank r. Parts may differ in size."""
    actions: list[Action] = [Send(peer, _PARTS, Region(Buffer.IN, peer)) for peer in others(rank, size)]
    actions.append(Copy(Region(Buffer.IN, rank), Region(Buffer.OUT, rank)))
    actions += [Receive(peer, _PARTS, Region(Buffer.OUT, peer)) for peer in others(rank, size)]
    return Plan(tuple(actions), out_items=size)


def broadcast(rank: int, size: int, root: int) -> Plan:
    """The root sends its array to every other rank."""
    if rank != root:
        return Plan((Receive(root, _PARTS, Region(Buffer.OUT)),))
    actions: list[Action] = [Send(peer, _PARTS, Region(Buffer.IN)) for peer in others(rank, size)]
    actions.append(Copy(Region(Buffer.IN), Region(Buffer.OUT)))
    return Plan(tuple(actions))


def broadcast_two_shot(count: int, rank: int, size: int, root: int) -> Plan:
    """The root's array of `count` elements: every other rank gets one slice, and sends it to the others."""
    receivers = others(root, size)
    pieces = [(peer, cut) for peer, cut in zip(receivers, slices(count, size - 1), strict=True) if holds(cut)]
    if rank == root:
        actions: list[Action] = [Send(peer, _PARTS, Region(Buffer.IN, 0, *cut)) for peer, cut in pieces]
        return Plan((*actions, Copy(Region(Buffer.IN, 0, 0, count), Region(Buffer.OUT, 0, 0, count))), alike=True)
    actions = []
    for own in (Region(Buffer.OUT, 0, *cut) for peer, cut in pieces if peer == rank):
        actions.append(Receive(root, _PARTS, own))
        actions += [Send(peer, _RESULTS, own) for peer in others(rank, size) if peer != root]
    actions += [Receive(peer, _RESULTS, Region(Buffer.OUT, 0, *cut)) for peer, cut in pieces if peer != rank]
    return Plan(tuple(actions), alike=True)


def fold_in_order(own: Region, total: Region, ranks: Sequence[int], rank: int, slot: int) -> list[Action]:
    """total = ((x op y) op z) ... of these ranks, where that of `rank` is `own` and the others come as messages `slot`."""
    first: Action = Load(own, total) if ranks[0] == rank else Receive(ranks[0], slot, total)
    return [first, *(FoldOwn(own, total) if peer == rank else Fold(peer, slot, total) for peer in ranks[1:])]
