"""One algorithm for one operation: how it is planned, what it costs, and in which order it folds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, unique
from typing import Final

from ferrorpc.collectives.algorithms.plan import Buffer, Copy, Plan, Region
from ferrorpc.collectives.call import Call, Operation

_COPY: Final = Plan((Copy(Region(Buffer.IN), Region(Buffer.OUT)),))


@unique
class Order(Enum):
    """The order of summation. Algorithms of one order give the same bits, so a measurement may choose between them."""

    NONE = "moves only"
    RANKS = "in rank order"
    PAIRS = "in pairs, then pairs of pairs"
    TREE = "in the tree's order"
    RING = "each slice round the ring"
    HOSTS = "host by host"

    @property
    def is_canonical(self) -> bool:
        """Whether results are the left fold in rank order, or nothing is folded."""
        return self in (Order.NONE, Order.RANKS)


@dataclass(frozen=True, slots=True)
class Cost:
    """The work of the busiest rank in terms of the alpha-beta-gamma model, and of all ranks where others do less."""

    rounds: float
    """Messages that wait for one another: times alpha."""
    sent_bytes: float
    """Bytes through one rank's link, the busier direction: times beta."""
    folded_bytes: float = 0.0
    """Bytes that a reduction kernel processes: times gamma."""
    filling_bytes: float = 0.0
    """Bytes that pass other links before the busiest one can begin: also times beta."""
    messages: float = 0.0
    """Messages the busiest rank sends, or receives, one after another; 0 for one a round."""
    all_messages: float = 0.0
    """Messages that all ranks send together; 0 where each sends as many as the busiest."""
    all_bytes: float = 0.0
    """Bytes that all ranks send together; 0 where each sends as many as the busiest."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm for one operation.

    Attributes:
        plan: (call, rank, size) -> this rank's plan; but for a barrier, in a group of at least two.
        cost: (group size, bytes of one rank's input) -> cost. For scatter the bytes of one part, for reduce_scatter and
            all_to_all those of all parts.
        order: of summation.
        compresses: supports a wire codec: every value is rounded once as an operand and once as a result, and all ranks
            get the same bits.
        needs_size: `plan` needs the root's array in `call.inputs` on every rank, not only on the root.
        needs_alike: works only where all arrays of all ranks have one shape.
    """

    name: str
    plan: Callable[[Call, int, int], Plan]
    cost: Callable[[int, int], Cost]
    order: Order = Order.NONE
    compresses: bool = False
    needs_size: bool = False
    needs_alike: bool = False

    def reaches_all_at_once(self, size: int) -> bool:
        """Whether a rank exchanges messages with all others at a time, by its cost."""
        return self.cost(size, 0).messages >= size - 1

    def build(self, call: Call, rank: int, size: int) -> Plan:
        """This rank's plan. In a group of one every result is a copy of its input, bit for bit."""
        return _COPY if size == 1 and call.operation is not Operation.BARRIER else self.plan(call, rank, size)
