"""Barriers: no rank leaves before every rank has entered. Messages are empty: their arrival is the information.

Idea. Direct: every rank sends to every other; one round, and a waiting rank knows exactly who is missing. Dissemination: in
round k a rank sends to the one 2^k places on; after ceil(log2 p) rounds every rank has heard of every other, with log2(p)
messages each.

Source. Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988.

Cost: direct 1 round and p-1 messages a rank; dissemination ceil(log2 p) of both.
"""

from __future__ import annotations

from ferrorpc.collectives.algorithms.partition import others
from ferrorpc.collectives.algorithms.plan import Action, Buffer, Plan, Receive, Region, Send

_NOTHING = Region(Buffer.IN, 0, 0, 0)
_NOWHERE = Region(Buffer.OUT, 0, 0, 0)


def direct(rank: int, size: int) -> Plan:
    """Every rank sends to every other."""
    actions: list[Action] = [Send(peer, 0, _NOTHING) for peer in others(rank, size)]
    actions += [Receive(peer, 0, _NOWHERE) for peer in others(rank, size)]
    return Plan(tuple(actions), out_items=0)


def dissemination(rank: int, size: int) -> Plan:
    """Every rank sends over doubling distances."""
    actions: list[Action] = []
    for step in range((size - 1).bit_length()):
        distance = 1 << step
        actions.append(Send((rank + distance) % size, step, _NOTHING))
        actions.append(Receive((rank - distance) % size, step, _NOWHERE))
    return Plan(tuple(actions), out_items=0)
