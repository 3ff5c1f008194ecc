"""One algorithm for one operation: how it is planned, what it costs, and in which order it folds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, unique

from ferrorpc.collectives.algorithms.plan import Plan
from ferrorpc.collectives.call import Call


@unique
class Order(Enum):
    """How an algorithm folds. Two of the same order give the same bits, so a measurement may choose between them."""

    NONE = "moves only"
    RANKS = "in rank order"
    PAIRS = "in pairs, then pairs of pairs"
    TREE = "in the tree's order"
    RING = "each slice round the ring"
    HOSTS = "host by host"

    @property
    def is_canonical(self) -> bool:
        """Whether results are the left fold in rank order, or nothing is folded at all."""
        return self in (Order.NONE, Order.RANKS)


@dataclass(frozen=True, slots=True)
class Cost:
    """What the busiest rank does, in the terms of the alpha-beta-gamma model; and all together, where others do less."""

    rounds: float
    """Messages that wait for one another: times alpha."""
    sent_bytes: float
    """Bytes through one rank's link, the busier direction: times beta."""
    folded_bytes: float = 0.0
    """Bytes that go through a reduction kernel: times gamma."""
    filling_bytes: float = 0.0
    """Bytes that pass other links before the busiest one can begin: times beta too."""
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
        build: (call, rank, size) -> this rank's plan.
        cost: (group size, bytes one rank brings) -> cost. For scatter the bytes of one part, for reduce_scatter and
            all_to_all those of all parts.
        order: how it folds.
        compresses: sound with a wire codec: every value is rounded once on its way in and once on its way out, and all
            ranks end with the same bits.
        needs_size: `build` wants the root's array in `call.inputs` on every rank, not only on the root.
        needs_alike: sound only where all arrays of all ranks have one shape.
    """

    name: str
    build: Callable[[Call, int, int], Plan]
    cost: Callable[[int, int], Cost]
    order: Order = Order.NONE
    compresses: bool = False
    needs_size: bool = False
    needs_alike: bool = False
