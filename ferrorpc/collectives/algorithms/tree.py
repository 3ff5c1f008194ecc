"""Binomial tree: in each round, every rank that has the message passes it to one that has not.

Idea. Number the ranks from the root on. Rank v's parent is v without its lowest set bit; its children are v plus each smaller
power of two. Downwards this broadcasts in log2(p) rounds, with the root sending log2(p) times rather than p-1 times. Upwards it
reduces: each rank folds in its children, nearest first, so every partial result covers a contiguous run of ranks, in order
from the root on. That is the order of the ranks but not a left fold: (x0 op x1) op (x2 op x3).

Source. Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.

Cost, in rounds, bytes sent (or received) and bytes folded by the busiest rank, for n bytes on p ranks, with k = ceil(log2 p):

    broadcast     k     k n     0
    reduce        k     k n     k n
    all_reduce    2k    k n     k n
"""

from __future__ import annotations

from ferrorpc.collectives.algorithms.plan import Action, Buffer, Copy, Finish, Fold, Load, Plan, Receive, Region, Send

_DOWN = 0
_UP = 1


def broadcast(rank: int, size: int, root: int, slot: int = _DOWN) -> Plan:
    """The root's array goes down the tree, as message `slot`. Only the root needs to know its size."""
    whole = Region(Buffer.OUT)
    parent, children = parent_and_children(rank, size, root)
    if parent is None:
        # The root's own copy comes last: its children wait.
        actions: list[Action] = [Send(child, slot, Region(Buffer.IN)) for child in reversed(children)]
        actions.append(Copy(Region(Buffer.IN), whole))
    else:
        actions = [Receive(parent, slot, whole)]
        actions += [Send(child, slot, whole) for child in reversed(children)]
    return Plan(tuple(actions))


def reduce(count: int, rank: int, size: int, root: int) -> Plan:
    """Partial results go up the tree."""
    if count == 0:
        return Plan((), out_items=int(rank == root))
    actions = _upwards(count, rank, size, root)
    if rank == root:
        actions.append(Finish(Region(Buffer.WORK, 0, 0, count), Region(Buffer.OUT, 0, 0, count)))
    leaf = not parent_and_children(rank, size, root)[1]
    return Plan(tuple(actions), work_items=() if leaf else (count,), out_items=int(rank == root))


def all_reduce(count: int, rank: int, size: int) -> Plan:
    """Up the tree of rank 0, and the result down again."""
    if count == 0:
        return Plan(())
    result = Region(Buffer.OUT, 0, 0, count)
    parent, children = parent_and_children(rank, size, 0)
    actions = _upwards(count, rank, size, 0)
    if parent is None:
        actions.append(Finish(Region(Buffer.WORK, 0, 0, count), result))
    else:
        actions.append(Receive(parent, _DOWN, result))
    actions += [Send(child, _DOWN, result) for child in reversed(children)]
    return Plan(tuple(actions), work_items=(count,) if children else ())


def _upwards(count: int, rank: int, size: int, root: int) -> list[Action]:
    own, total = Region(Buffer.IN, 0, 0, count), Region(Buffer.WORK, 0, 0, count)
    parent, children = parent_and_children(rank, size, root)
    if not children and parent is not None:
        return [Send(parent, _UP, own)]
    actions: list[Action] = [Load(own, total)]
    actions += [Fold(child, _UP, total) for child in children]
    if parent is not None:
        actions.append(Send(parent, _UP, total))
    return actions


def parent_and_children(rank: int, size: int, root: int) -> tuple[int | None, list[int]]:
    """Parent (None for the root) and children, nearest first, of a rank."""
    place = (rank - root) % size
    lowest = place & -place if place else 1 << max(size - 1, 0).bit_length()
    children = []
    reach = 1
    while reach < lowest and place + reach < size:
        children.append((place + reach + root) % size)
        reach *= 2
    parent = None if place == 0 else (place - lowest + root) % size
    return parent, children
