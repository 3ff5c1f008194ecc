"""The hypercube of the recursive algorithms, for any number of ranks.

A hypercube of 2^k ranks exchanges along one axis after another. Where p is no power of two, the first 2(p - 2^k) ranks pair up
beforehand: the odd rank of each pair sends its array to the even one, which represents both, and receives the result at the
end. So places of the hypercube cover contiguous runs of ranks, in order.

Source. Rabenseifner, "Optimization of Collective Reduction Operations", 2004.
"""

from __future__ import annotations

from ferrorpc.collectives.algorithms.plan import Action, Receive, Region, Send

HAND_OVER = 0
"""The slot in which the odd rank of a pair sends its array."""
HAND_BACK = 1
"""The slot in which it receives the result."""
FIRST_ROUND = 2
"""The first slot for the exchanges of the hypercube."""


class Hypercube:
    """The hypercube of a group of `size` ranks.

    Attributes:
        steps: its axes, k.
        count: its places, 2^k.
    """

    def __init__(self, size: int) -> None:
        self.steps = size.bit_length() - 1
        self.count = 1 << self.steps
        self._paired = 2 * (size - self.count)

    def is_paired(self, rank: int) -> bool:
        """Whether this rank belongs to a pair."""
        return rank < self._paired

    def place(self, rank: int) -> int | None:
        """The place of a rank; None for one that its even neighbour represents."""
        if rank >= self._paired:
            return rank - self._paired // 2
        return None if rank % 2 else rank // 2

    def rank(self, place: int) -> int:
        """The rank at a place."""
        return 2 * place if place < self._paired // 2 else place + self._paired // 2


def hand_over(rank: int, own: Region, result: Region) -> tuple[Action, ...]:
    """The actions of a rank without a place."""
    return (Send(rank - 1, HAND_OVER, own), Receive(rank - 1, HAND_BACK, result))
