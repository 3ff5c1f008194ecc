"""Barriers: nobody leaves before everyone has entered. Messages are empty; that they came is all they say.

Idea. Direct: everyone tells everyone; one round, and whoever waits knows exactly who is missing. Dissemination: in round k tell
the rank 2^k further on; after ceil(log2 p) rounds word of every rank has reached every rank, with log2(p) messages each.

Source. Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988.

Cost: direct 1 round and p-1 messages a rank; dissemination ceil(log2 p) of both.
"""

from __future__ import annotations

from ferrorpc.collectives.algorithms.cut import others
from ferrorpc.collectives.algorithms.plan import Action, Buffer, Plan, Receive, Region, Send

_NOTHING = Region(Buffer.IN, 0, 0, 0)
_NOWHERE = Region(Buffer.OUT, 0, 0, 0)


def direct(rank: int, size: int) -> Plan:
    """Everyone tells everyone."""
    actions: list[Action] = [Send(peer, 0, _NOTHING) for peer in others(rank, size)]
    actions += [Receive(peer, 0, _NOWHERE) for peer in others(rank, size)]
    return Plan("direct", tuple(actions), out_items=0)


def dissemination(rank: int, size: int) -> Plan:
    """Word spreads by doubling distances."""
    actions: list[Action] = []
    for step in range((size - 1).bit_length()):
        distance = 1 << step
        actions.append(Send((rank + distance) % size, step, _NOTHING))
        actions.append(Receive((rank - distance) % size, step, _NOWHERE))
    return Plan("dissemination", tuple(actions), out_items=0)
