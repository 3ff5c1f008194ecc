"""Ring: every rank exchanges messages with its two neighbours only, and slices travel round.

Idea. Cut the array into p slices. Slice c starts at rank c+1 and visits every rank, which folds its own part in, until it is
complete at rank c. A second turn brings every complete slice to all ranks. Each link carries the fewest bytes possible, and a
rank receives from one peer at a time, which suits large groups and slow links; the price is 2(p-1) rounds. The fold of slice c
runs x_{c+1} op ... op x_{p-1} op x_0 ... op x_c: the same on every run, the same bits on all ranks, but not rank order.

Source. Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

Cost, in rounds, bytes sent and bytes folded by each rank, for n bytes a rank on p ranks:

    all_reduce        2(p-1)    2 n (p-1)/p    n (p-1)/p
    reduce_scatter    p-1       n (p-1)/p      n (p-1)/p
    all_gather        p-1       (p-1) n        0
"""

from __future__ import annotations

from collections.abc import Sequence

from ferrorpc.collectives.algorithms.partition import slices
from ferrorpc.collectives.algorithms.plan import (
    Action,
    Buffer,
    Copy,
    Finish,
    FoldUnder,
    Load,
    Plan,
    Receive,
    Region,
    Send,
)


def all_reduce(count: int, rank: int, size: int) -> Plan:
    """A turn that reduces the slices, then a turn that distributes them."""
    cuts = slices(count, size)
    parts = [Region(Buffer.IN, 0, *cut) for cut in cuts]
    results = [Region(Buffer.OUT, 0, *cut) for cut in cuts]
    actions = _reduce_turn(parts, results[rank], rank, size)
    after, before = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        outgoing, incoming = results[(rank - step) % size], results[(rank - step - 1) % size]
        if _length(outgoing):
            actions.append(Send(after, size + step, outgoing))
        if _length(incoming):
            actions.append(Receive(before, size + step, incoming))
    return Plan(tuple(actions), work_items=(max(map(_length, parts)),))


def reduce_scatter(counts: Sequence[int], rank: int, size: int) -> Plan:
    """The first turn alone, on given parts. `counts`: elements of each part, the same on all ranks."""
    parts = [Region(Buffer.IN, item, 0, count) for item, count in enumerate(counts)]
    actions = _reduce_turn(parts, Region(Buffer.OUT, 0, 0, counts[rank]), rank, size)
    return Plan(tuple(actions), work_items=(max(counts),))


def all_gather(rank: int, size: int) -> Plan:
    """The second turn alone, on whole arrays, which may differ in size."""
    actions: list[Action] = [Copy(Region(Buffer.IN), Region(Buffer.OUT, rank))]
    after, before = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        actions.append(Send(after, step, Region(Buffer.OUT, (rank - step) % size)))
        actions.append(Receive(before, step, Region(Buffer.OUT, (rank - step - 1) % size)))
    return Plan(tuple(actions), out_items=size)


def _reduce_turn(parts: Sequence[Region], result: Region, rank: int, size: int) -> list[Action]:
    """Part c visits the ranks c+1, c+2, ..., c. One accumulator is enough: what was sent on is no longer needed."""
    after, before = (rank + 1) % size, (rank - 1) % size
    actions: list[Action] = []
    outgoing = parts[before]
    for step in range(size - 1):
        own = parts[(rank - step - 2) % size]
        total = Region(Buffer.WORK, 0, 0, _length(own))
        if _length(outgoing):
            actions.append(Send(after, step, outgoing))
        if _length(own):
            actions.append(Load(own, total))
            actions.append(FoldUnder(before, step, total))
        outgoing = total
    if _length(result):
        actions.append(Finish(outgoing, result))
    return actions


def _length(region: Region) -> int:
    return 0 if region.stop is None else region.stop - region.start
