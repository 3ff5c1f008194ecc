"""Broadcast as scatter and all-gather: every rank gets one slice from the root and the others from its neighbours.

Idea. The root's link is the bottleneck of a broadcast. So the array is cut into p slices that leave the root once: down a
binomial tree, each rank keeping its own and passing on those of its subtree. Then the slices travel round a ring. Every
rank, not only the root, sends then.

Source. Van de Geijn and Watts; as in Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005.

Cost, for n bytes on p ranks: ceil(log2 p) + p-1 rounds; the root sends about 2 n (p-1)/p bytes. All ranks must know n.
"""

from __future__ import annotations

from ferrorpc.collectives.algorithms.partition import holds, joined, slices
from ferrorpc.collectives.algorithms.plan import Action, Buffer, Copy, Plan, Receive, Region, Send
from ferrorpc.collectives.algorithms.tree import parent_and_children

_SCATTER = 0
_FIRST_TURN = 1


def broadcast(count: int, rank: int, size: int, root: int) -> Plan:
    """The root's array of `count` elements, on every rank."""
    place = (rank - root) % size
    cuts = slices(count, size)
    parent, children = parent_and_children(rank, size, root)
    source = Buffer.IN if place == 0 else Buffer.OUT
    actions: list[Action] = []
    branch = joined(Buffer.OUT, cuts, *_branch(place, size))
    if parent is not None and not branch.is_empty:
        actions.append(Receive(parent, _SCATTER, branch))
    for child in reversed(children):
        branch = joined(source, cuts, *_branch((child - root) % size, size))
        if not branch.is_empty:
            actions.append(Send(child, _SCATTER, branch))
    actions += _ring(cuts, rank, size, root, source)
    if place == 0:
        actions.append(Copy(Region(Buffer.IN, 0, 0, count), Region(Buffer.OUT, 0, 0, count)))
    return Plan(tuple(actions), alike=True)


def _ring(cuts: list[tuple[int, int]], rank: int, size: int, root: int, source: Buffer) -> list[Action]:
    """Slice by slice round the ring, by place. What the scatter brought already is not sent again."""
    place, after, before = (rank - root) % size, (rank + 1) % size, (rank - 1) % size
    actions: list[Action] = []
    for step in range(size - 1):
        outgoing, incoming = (place - step) % size, (place - step - 1) % size
        if holds(cuts[outgoing]) and not _has(place + 1, outgoing, size):
            actions.append(Send(after, _FIRST_TURN + step, Region(source, 0, *cuts[outgoing])))
        if holds(cuts[incoming]) and not _has(place, incoming, size):
            actions.append(Receive(before, _FIRST_TURN + step, Region(Buffer.OUT, 0, *cuts[incoming])))
    return actions


def _branch(place: int, size: int) -> tuple[int, int]:
    """The places of a subtree, which are neighbours: [first, last)."""
    return (place, min(place + (place & -place), size)) if place else (0, size)


def _has(place: int, piece: int, size: int) -> bool:
    """Whether a place has a slice once the scatter is over."""
    first, last = _branch(place % size, size)
    return first <= piece < last
