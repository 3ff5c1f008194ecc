"""Broadcast as scatter and all-gather: every rank gets one slice from the root and the others from its neighbours.

Idea. The root's link is the bottleneck of a broadcast. So the array is cut into p slices that leave the root once: down a
binomial tree, each rank keeping its own and passing on those of its subtree. Then the slices travel round a ring. Every
rank, not only the root, sends then.

Source. Van de Geijn and Watts; as in Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005.

Cost, for n bytes on p ranks: ceil(log2 p) + p-1 rounds; the root sends about 2 n (p-1)/p bytes. All ranks must know n.
"""

from __future__ import annotations

from ferrorpc.collectives.algorithms.partition import COPY_PLAN, slices
from ferrorpc.collectives.algorithms.plan import Action, Buffer, Copy, Plan, Receive, Region, Send
from ferrorpc.collectives.algorithms.tree import parent_and_children

_SCATTER = 0
_FIRST_TURN = 1


def broadcast(count: int, rank: int, size: int, root: int) -> Plan:
    """The root's array of `count` elements, on every rank."""
    if size == 1:
        return COPY_PLAN
    place = (rank - root) % size
    cuts = slices(count, size)
    parent, children = parent_and_children(rank, size, root)
    source = Buffer.IN if place == 0 else Buffer.OUT
    actions: list[Action] = []
    if parent is not None and _length(cuts, _branch(place, size)):
        actions.append(Receive(parent, _SCATTER, _region(Buffer.OUT, cuts, _branch(place, size))))
    for child in reversed(children):
        branch = _branch((child - root) % size, size)
        if _length(cuts, branch):
            actions.append(Send(child, _SCATTER, _region(source, cuts, branch)))
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
        if _length(cuts, (outgoing, outgoing + 1)) and not _has(place + 1, outgoing, size):
            actions.append(Send(after, _FIRST_TURN + step, _region(source, cuts, (outgoing, outgoing + 1))))
        if _length(cuts, (incoming, incoming + 1)) and not _has(place, incoming, size):
            actions.append(Receive(before, _FIRST_TURN + step, _region(Buffer.OUT, cuts, (incoming, incoming + 1))))
    return actions


def _branch(place: int, size: int) -> tuple[int, int]:
    """The places of a subtree, which are neighbours: [first, last)."""
    return (place, min(place + (place & -place), size)) if place else (0, size)


def _has(place: int, piece: int, size: int) -> bool:
    """Whether a place has a slice once the scatter is over."""
    first, last = _branch(place % size, size)
    return first <= piece < last


def _region(buffer: Buffer, cuts: list[tuple[int, int]], run: tuple[int, int]) -> Region:
    return Region(buffer, 0, cuts[run[0]][0], cuts[run[1] - 1][1])


def _length(cuts: list[tuple[int, int]], run: tuple[int, int]) -> int:
    return cuts[run[1] - 1][1] - cuts[run[0]][0]
