"""A rank's way through its actions: computing, handing on, freeing, and taking note of when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ferrorpc.errors import UsageError
from ferrorpc.guard import Clock
from ferrorpc.pipeline.actions import Action, Kind
from ferrorpc.pipeline.ends import Ends
from ferrorpc.pipeline.exchange import Exchange
from ferrorpc.pipeline.schedules.lowering import NAMES
from ferrorpc.pipeline.schedules.schedule import Schedule
from ferrorpc.pipeline.stage import Piece
from ferrorpc.pipeline.wire import Wire, wires_in, wires_out
from ferrorpc.plans.timeline import Span


class Performer:
    """Performs actions.

    Args:
        rank: this rank.
        pieces: the pieces of the model it holds, by number.
        schedule: tells where all pieces are, and the edges between them.
        exchange: of this pass over the batch.
        ends: likewise.
        clock: tells when things happen.
        keeps: whether a backward follows, so that contexts are kept.
        completed: called with the number of a piece when its last backward is done.

    Attributes:
        spans: what was computed, and when.
        peak: the most contexts that were kept at once.
    """

    def __init__(
        self,
        rank: int,
        pieces: Mapping[int, Piece],
        schedule: Schedule,
        exchange: Exchange,
        ends: Ends,
        clock: Clock,
        keeps: bool,
        completed: Callable[[int], None],
    ) -> None:
        self.spans: list[Span] = []
        self.peak = 0
        self._rank = rank
        self._pieces = pieces
        self._kinds = {number: piece.kind for number, piece in pieces.items()}
        self._edges = schedule.edges
        self._placement = schedule.placement
        self._microbatches = schedule.microbatches
        self._exchange = exchange
        self._ends = ends
        self._clock = clock
        self._completed = completed
        self._handed: dict[Wire, Any] = {}
        self._backwards: Counter[int] = Counter()
        self._chunk = {number: chunk for chunk, number in enumerate(sorted(pieces))}
        self._compute: dict[Kind, Callable[[Action, Any], Any]] = {
            Kind.FORWARD: lambda each, x: pieces[each.stage].forward(each.microbatch, x, keeps),
            Kind.BACKWARD: lambda each, grad: pieces[each.stage].backward(each.microbatch, grad),
            Kind.BACKWARD_INPUT: lambda each, grad: pieces[each.stage].backward_input(each.microbatch, grad),
            Kind.BACKWARD_WEIGHT: lambda each, _: pieces[each.stage].backward_weight(each.microbatch),
        }

    def run(self, actions: Sequence[Action]) -> None:
        """Performs them in order; messages are among them."""
        for each in actions:
            if each.kind.sends:
                for wire in wires_out(each, self._edges):
                    if self._placement[wire.target] != self._rank:
                        self._exchange.send(wire, self._handed.pop(wire))
            elif each.kind.computes:
                self._perform(each)

    def _perform(self, each: Action) -> None:
        given = None if each.kind is Kind.BACKWARD_WEIGHT else self._take(each)
        start = self._clock.now()
        result = self._compute[each.kind](each, given)
        if each.kind is Kind.FORWARD and each.stage == len(self._placement) - 1:
            self._ends.output(each.microbatch, result)
        stop = self._clock.now()
        kind, shade = NAMES[each.kind], self._chunk[each.stage]
        self.spans.append(Span(str(each), self._rank, start, stop, kind, str(each.microbatch), shade))
        self.peak = max(self.peak, sum(piece.held for piece in self._pieces.values()))
        if each.kind is not Kind.BACKWARD_WEIGHT:
            self._give(each, result)
        if each.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            self._backwards[each.stage] += 1
            if self._backwards[each.stage] == self._microbatches:
                self._completed(each.stage)

    def _take(self, each: Action) -> Any:
        """What an action works on: from outside, or from each piece that is wired to it, here or on other ranks."""
        wires = wires_in(each, self._edges)
        if not wires:
            outside = self._ends.input if each.kind is Kind.FORWARD else self._ends.grad
            return outside(each.microbatch)
        values = tuple(self._arrived(wire) for wire in wires)
        return values[0] if len(values) == 1 else values

    def _arrived(self, wire: Wire) -> Any:
        if self._placement[wire.source] == self._rank:
            return self._handed.pop(wire)
        return self._exchange.receive(wire, self._kinds[wire.target])

    def _give(self, each: Action, result: Any) -> None:
        """Lays out a result for the pieces that are wired to it: those on other ranks get theirs when the send is due."""
        wires = wires_out(each, self._edges)
        if len(wires) > 1 and not (isinstance(result, tuple) and len(result) == len(wires)):
            others = ", ".join(str(wire.source if wire.target == each.stage else wire.target) for wire in wires)
            raise UsageError(
                f"{each} gave {_told(result)}, but stage {each.stage} is wired to stages {others}",
                hint=f"give a tuple of {len(wires)}, one value for each of them in this order",
            )
        self._handed.update(zip(wires, result if len(wires) > 1 else (result,), strict=False))


def _told(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else f"one {type(result).__name__}"
