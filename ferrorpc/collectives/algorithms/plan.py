"""A plan: what one rank does in one collective, as data.

Every algorithm in this package is a pure function from (rank, size, element counts) to a `Plan`. One executor runs any plan
on any transport; the validator (validate.py) proves plans correct without running them.

A rank has three lists of arrays: IN (the caller's input; never written), WORK (accumulators of a reduction, in the
kernel's work dtype: float32 for halves; in a move, blocks in transit, in the call's dtype) and OUT (results).
A `Region` is a run of elements of one of them. Actions are done in order; sends do not wait for receipt, so "send all, then
receive all" is sound. A send ends before the next action begins: its region may then be overwritten. OUT may be the
memory of IN, so no plan reads an element of IN after it has written the same element of OUT.

Messages are self-describing. Those from IN and OUT hold the call's dtype, those from WORK the work dtype; an action on WORK
takes either. Regions of reductions are bounded, so that all ranks cut alike; moves send whole items, which may differ in
size from rank to rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique
from typing import TypeAlias


@unique
class Buffer(Enum):
    """Which list of arrays."""

    IN = "in"
    WORK = "work"
    OUT = "out"


@dataclass(frozen=True, slots=True)
class Region:
    """Elements [start, stop) of the flattened array `item` of a buffer; stop None: the whole array, whatever its size."""

    buffer: Buffer
    item: int = 0
    start: int = 0
    stop: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it has no elements, whatever the size of the array."""
        return self.start == self.stop

    def __str__(self) -> str:
        return f"{self.buffer.value}{self.item}[{self.start}:{'' if self.stop is None else self.stop}]"


@dataclass(frozen=True, slots=True)
class Send:
    """Sends a region to group rank `peer` as message `slot`. (source, slot) is unique among what a rank receives."""

    peer: int
    slot: int
    region: Region


@dataclass(frozen=True, slots=True)
class Receive:
    """Awaits message `slot` of `peer` and stores it, widened where the region is in WORK.

    Whole items of OUT are allocated from the message's own description.
    """

    peer: int
    slot: int
    region: Region


@dataclass(frozen=True, slots=True)
class Fold:
    """Awaits message `slot` of `peer`; region = region op message (the message is the right operand). WORK only."""

    peer: int
    slot: int
    region: Region


@dataclass(frozen=True, slots=True)
class FoldUnder:
    """As Fold with the message as the *left* operand: region = message op region.

    For algorithms that receive from lower ranks late.
    """

    peer: int
    slot: int
    region: Region


@dataclass(frozen=True, slots=True)
class Load:
    """WORK region = IN or WORK region, in the work dtype."""

    source: Region
    region: Region


@dataclass(frozen=True, slots=True)
class FoldOwn:
    """WORK region = WORK region op IN or WORK region."""

    source: Region
    region: Region


@dataclass(frozen=True, slots=True)
class Finish:
    """OUT region = WORK region, divided by the group's size for MEAN, rounded once to the call's dtype."""

    source: Region
    region: Region


@dataclass(frozen=True, slots=True)
class Copy:
    """OUT region = IN region, or WORK region of a move, bit for bit."""

    source: Region
    region: Region


@dataclass(frozen=True, slots=True)
class Quantise:
    """OUT region = decode(encode(region)) with the call's wire codec: the owner keeps the bits that the others receive.

    It comes after the sends of the region: encoding twice may give other bits than encoding once.
    """

    region: Region


Action: TypeAlias = Send | Receive | Fold | FoldUnder | Load | FoldOwn | Finish | Copy | Quantise


@dataclass(frozen=True, slots=True)
class Plan:
    """One rank's part.

    Attributes:
        actions: in order.
        work_items: element counts of the WORK arrays (() when there are none).
        out_items: how many OUT arrays there are.
        alike: in a move, every OUT array has dtype and shape of the call's first input. Otherwise the message that brings it
            describes it.
    """

    actions: tuple[Action, ...]
    work_items: tuple[int, ...] = ()
    out_items: int = 1
    alike: bool = False
