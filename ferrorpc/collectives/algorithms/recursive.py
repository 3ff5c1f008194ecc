"""Recursive doubling: exchange everything with a partner at distance 1, 2, 4, ...; log2(p) rounds complete the result.

Idea. After round k every rank holds the reduction of its block of 2^k ranks. Both partners compute lower op upper, so they hold
the same bits, and in the end all ranks do. Where p is no power of two, the first 2(p - 2^k) ranks pair up beforehand: the
odd one of each pair sends its array to the even one and receives the result at the end. Partial results cover contiguous
runs of ranks, in order, but this is no left fold: (x0 op x1) op (x2 op x3).

Source. Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.

Cost, for n bytes a rank on p ranks, with k = floor(log2 p): k rounds, k n bytes sent and folded by each rank; where p is no
power of two, two more rounds, one of them with a fold.
"""

from __future__ import annotations

from ferrorpc.collectives.algorithms.hypercube import FIRST_ROUND, HAND_BACK, HAND_OVER, Hypercube, hand_over
from ferrorpc.collectives.algorithms.plan import Action, Buffer, Finish, Fold, FoldUnder, Load, Plan, Region, Send


def all_reduce(count: int, rank: int, size: int) -> Plan:
    """Any number of ranks; every rank ends with the same bits."""
    if count == 0:
        return Plan(())
    own, total, result = (Region(buffer, 0, 0, count) for buffer in (Buffer.IN, Buffer.WORK, Buffer.OUT))
    cube = Hypercube(size)
    place = cube.place(rank)
    if place is None:
        return Plan(hand_over(rank, own, result))
    actions: list[Action] = [Load(own, total)]
    if cube.is_paired(rank):
        actions.append(Fold(rank + 1, HAND_OVER, total))
    for step in range(cube.steps):
        partner = place ^ (1 << step)
        actions.append(Send(cube.rank(partner), FIRST_ROUND + step, total))
        fold = Fold if place < partner else FoldUnder
        actions.append(fold(cube.rank(partner), FIRST_ROUND + step, total))
    actions.append(Finish(total, result))
    if cube.is_paired(rank):
        actions.append(Send(rank + 1, HAND_BACK, result))
    return Plan(tuple(actions), work_items=(count,))
