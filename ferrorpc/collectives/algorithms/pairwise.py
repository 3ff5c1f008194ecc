"""Pairwise exchange: in step s every rank sends to the one s places on and receives from the one s places back.

Idea. In an all-to-all by direct exchange all ranks send at once, so a rank may receive from p-1 senders at the same time. In
steps, every rank has one sender and one receiver at a time: the same bytes, more rounds, and no congestion.

Source. Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.

Cost, for n bytes brought by each rank (all parts) on p ranks: p-1 rounds, n (p-1)/p bytes sent.
"""

from __future__ import annotations

from ferrorpc.collectives.algorithms.plan import Action, Buffer, Copy, Plan, Receive, Region, Send

_PARTS = 0


def all_to_all(rank: int, size: int) -> Plan:
    """Part r goes to rank r. Parts may differ in size."""
    actions: list[Action] = [Copy(Region(Buffer.IN, rank), Region(Buffer.OUT, rank))]
    for step in range(1, size):
        target, source = (rank + step) % size, (rank - step) % size
        actions.append(Send(target, _PARTS, Region(Buffer.IN, target)))
        actions.append(Receive(source, _PARTS, Region(Buffer.OUT, source)))
    return Plan(tuple(actions), out_items=size)
