"""Chain: the array passes through the ranks one after the other, each chunk sent on while the next is still arriving.

Idea. Every rank receives from the one before and sends to the one after. One array would travel p-1 times; cut into chunks,
all links carry different chunks at once, so the whole takes little longer than one trip. The executor cuts every message into
chunks and sends on what has arrived, so the plan need not know the size. For few ranks and large arrays nothing is quicker.

Source. Known in MPI implementations as pipeline or chain broadcast; see Pjesivac-Grbovic et al., "Performance Analysis of MPI
Collective Operations", 2007.

Cost, for n bytes on p ranks in chunks of c bytes: p-1 rounds; n bytes through every link, and (p-2) c while the chain fills.
"""

from __future__ import annotations

from ferrorpc.collectives.algorithms.plan import Action, Buffer, Copy, Plan, Receive, Region, Send

_DOWN = 0


def broadcast(rank: int, size: int, root: int) -> Plan:
    """The root's array goes from rank to rank. Only the root needs to know its size."""
    place = (rank - root) % size
    whole = Region(Buffer.OUT)
    onward = [Send((rank + 1) % size, _DOWN, Region(Buffer.IN) if place == 0 else whole)] if place < size - 1 else []
    if place == 0:
        # The root's own copy comes last: the others wait.
        actions: list[Action] = [*onward, Copy(Region(Buffer.IN), whole)]
    else:
        actions = [Receive((rank - 1) % size, _DOWN, whole), *onward]
    return Plan(tuple(actions))
