"""Recursive doubling: exchange everything with a partner at distance 1, 2, 4, ...; after log2(p) rounds all have all.

Idea. After round k every rank holds the reduction of its block of 2^k ranks. Both partners compute lower op upper, so they hold
the same bits, and in the end everyone does. Where p is no power of two, the first 2(p - 2^k) ranks pair up beforehand: the
odd one of each pair hands its array to the even one and gets the result back at the end. Partial results cover contiguous
runs of ranks, in order, but this is no left fold: (x0 op x1) op (x2 op x3).

Source. Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.

Cost, for n bytes a rank on p ranks, with k = floor(log2 p): k rounds, k n bytes sent and folded by each rank; where p is no
power of two, two more rounds, one of them with a fold.
"""

from __future__ import annotations

from ferrorpc.collectives.algorithms.cut import alone
from ferrorpc.collectives.algorithms.plan import Action, Buffer, Finish, Fold, FoldUnder, Load, Plan, Receive, Region, Send

_HAND_OVER = 0
_HAND_BACK = 1
_FIRST_ROUND = 2


def all_reduce(count: int, rank: int, size: int) -> Plan:
    """Any number of ranks; every rank ends with the same bits."""
    if size == 1:
        return alone("recursive_doubling")
    if count == 0:
        return Plan("recursive_doubling", ())
    own, total, result = (Region(buffer, 0, 0, count) for buffer in (Buffer.IN, Buffer.WORK, Buffer.OUT))
    core = 1 << (size.bit_length() - 1)
    paired = 2 * (size - core)
    if rank < paired and rank % 2:
        return Plan("recursive_doubling", (Send(rank - 1, _HAND_OVER, own), Receive(rank - 1, _HAND_BACK, result)))
    actions: list[Action] = [Load(own, total)]
    if rank < paired:
        actions.append(Fold(rank + 1, _HAND_OVER, total))
    actions += _doubling(total, rank // 2 if rank < paired else rank - paired // 2, core, paired)
    actions.append(Finish(total, result))
    if rank < paired:
        actions.append(Send(rank + 1, _HAND_BACK, result))
    return Plan("recursive_doubling", tuple(actions), work_items=(count,))


def _doubling(total: Region, place: int, core: int, paired: int) -> list[Action]:
    """The rounds among the `core` ranks that take part; `place` counts only those."""
    actions: list[Action] = []
    for step in range(core.bit_length() - 1):
        partner = place ^ (1 << step)
        peer = 2 * partner if partner < paired // 2 else partner + paired // 2
        actions.append(Send(peer, _FIRST_ROUND + step, total))
        fold = Fold if place < partner else FoldUnder
        actions.append(fold(peer, _FIRST_ROUND + step, total))
    return actions
