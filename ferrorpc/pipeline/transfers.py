"""Transfers: the values that go from one piece of the model to another, each with a name and a message tag of its own."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, unique
from typing import Final, NamedTuple

from ferrorpc.pipeline.actions import Action, Kind
from ferrorpc.pipeline.schedules.edges import Edges
from ferrorpc.pipeline.schedules.lowering import Link, sources_of, targets_of

FIRST_TAG: Final = 1 << 61
"""Tags of pipelines begin here, above those that users count from 0."""


@unique
class TransferKind(IntEnum):
    """What is transferred."""

    FORWARD = 0
    BACKWARD = 1
    TIED = 2


class Transfer(NamedTuple):
    """One value: an output or gradient of a microbatch on an edge, or a tied weight's gradient (at first the weight itself).

    Attributes:
        source, target: the pieces it goes from and to.
        kind: what it is.
        number: of the microbatch, or of the tied weight.
    """

    source: int
    target: int
    kind: TransferKind
    number: int

    def tag(self, pieces: int) -> int:
        """The tag of its message; unique among the transfers of a model of so many pieces."""
        place = (self.number * pieces + self.source) * pieces + self.target
        return FIRST_TAG + len(TransferKind) * place + self.kind

    def __str__(self) -> str:
        if self.kind is TransferKind.TIED:
            return f"tied weight {self.number} from stage {self.source} to {self.target}"
        send = Kind.SEND_FORWARD if self.kind is TransferKind.FORWARD else Kind.SEND_BACKWARD
        text = str(Action(self.source, send, self.number))
        return text if abs(self.source - self.target) == 1 else f"{text} to {self.target}"


def inputs_of(action: Action, edges: Edges) -> list[Transfer]:
    """What an action takes, in the order of the pieces that it comes from."""
    kind = TransferKind.FORWARD if action.kind is Kind.FORWARD else TransferKind.BACKWARD
    return [Transfer(source, action.stage, kind, action.microbatch) for source in sources_of(action, edges)]


def outputs_of(action: Action, edges: Edges) -> list[Transfer]:
    """What an action gives, or a send sends, in the order of the pieces that it goes to."""
    kind = TransferKind.FORWARD if action.kind in (Kind.FORWARD, Kind.SEND_FORWARD) else TransferKind.BACKWARD
    return [Transfer(action.stage, target, kind, action.microbatch) for target in targets_of(action, edges)]


def receives(actions: Sequence[Action], placement: Sequence[int], edges: Edges) -> list[Transfer]:
    """What one rank receives from other ranks for these actions, in the order in which they use it."""
    return [
        transfer
        for each in actions
        for transfer in inputs_of(each, edges)
        if placement[transfer.source] != placement[transfer.target]
    ]


def sends_to(rank: int, actions: Sequence[Action], placement: Sequence[int], edges: Edges) -> list[Transfer]:
    """What these actions of another rank send to `rank`, in the order in which they send it."""
    return [
        transfer
        for each in actions
        if each.kind.sends
        for transfer in outputs_of(each, edges)
        if placement[transfer.target] == rank
    ]


def links_of(placement: Sequence[int], edges: Edges) -> set[Link]:
    """All pairs of ranks between which the edges need messages: activations one way, gradients the other."""
    forward = {(placement[source], placement[target]) for source, target in edges.pairs}
    return {link for source, target in forward if source != target for link in ((source, target), (target, source))}
