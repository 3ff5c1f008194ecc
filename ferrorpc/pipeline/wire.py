"""Wires: the values that go from one piece of the model to another, each with a name and a tag of its own."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, unique
from typing import Final, NamedTuple

from ferrorpc.pipeline.actions import Action, Kind
from ferrorpc.pipeline.schedules.edges import Edges
from ferrorpc.pipeline.schedules.lowering import Way, sources_of, takers_of

TAGS_FROM: Final = 1 << 61
"""Pipelines' tags begin here, out of the way of the user's own."""


@unique
class Sort(IntEnum):
    """What a wire carries."""

    FORWARD = 0
    BACKWARD = 1
    TIED = 2


class Wire(NamedTuple):
    """One value: of an edge and a microbatch, or of a tied weight (its gradient; before the first step the weight).

    Attributes:
        source, target: the pieces it goes from and to.
        sort: what it carries.
        number: of the microbatch, or of the tie.
    """

    source: int
    target: int
    sort: Sort
    number: int

    def tag(self, pieces: int) -> int:
        """The tag of its message; no two wires of a model of so many pieces share one."""
        place = (self.number * pieces + self.source) * pieces + self.target
        return TAGS_FROM + len(Sort) * place + self.sort

    def __str__(self) -> str:
        if self.sort is Sort.TIED:
            return f"tied weight {self.number} from stage {self.source} to {self.target}"
        sent = Action(self.source, Kind.SEND_FORWARD if self.sort is Sort.FORWARD else Kind.SEND_BACKWARD, self.number)
        return str(sent) if abs(self.source - self.target) == 1 else f"{sent} to {self.target}"


def wires_in(each: Action, edges: Edges) -> list[Wire]:
    """What an action takes, in the order of the pieces it comes from."""
    sort = Sort.FORWARD if each.kind is Kind.FORWARD else Sort.BACKWARD
    return [Wire(source, each.stage, sort, each.microbatch) for source in sources_of(each, edges)]


def wires_out(each: Action, edges: Edges) -> list[Wire]:
    """What an action gives, or a send sends, in the order of the pieces it goes to."""
    sort = Sort.FORWARD if each.kind in (Kind.FORWARD, Kind.SEND_FORWARD) else Sort.BACKWARD
    return [Wire(each.stage, taker, sort, each.microbatch) for taker in takers_of(each, edges)]


def arrivals(actions: Sequence[Action], placement: Sequence[int], edges: Edges) -> list[Wire]:
    """What comes from other ranks for these actions of one rank, in the order in which it is used."""
    return [
        wire
        for each in actions
        if each.kind.computes
        for wire in wires_in(each, edges)
        if placement[wire.source] != placement[wire.target]
    ]


def departures(actions: Sequence[Action], placement: Sequence[int], edges: Edges, target: int) -> list[Wire]:
    """What these actions of one rank send to rank `target`, in the order in which they send it."""
    return [wire for each in actions if each.kind.sends for wire in wires_out(each, edges) if placement[wire.target] == target]


def ways(placement: Sequence[int], edges: Edges) -> set[Way]:
    """Between which ranks anything is sent, by edges: forward, and gradients back."""
    there = {(placement[source], placement[target]) for source, target in edges.pairs}
    return {way for source, target in there if source != target for way in ((source, target), (target, source))}
