"""One pass of a rank through its actions: computing, handing on, freeing, and taking note of when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ferrorpc.guard import Clock
from ferrorpc.pipeline.actions import Action, Kind
from ferrorpc.pipeline.ends import Ends
from ferrorpc.pipeline.exchange import Exchange
from ferrorpc.pipeline.schedules.lowering import NAMES
from ferrorpc.pipeline.stage import Piece
from ferrorpc.plans.timeline import Span


class Execution:
    """Performs actions.

    Args:
        rank: this rank.
        pieces: the pieces of the model it holds, by number.
        placement: the rank of each piece.
        exchange: of this pass.
        ends: of this pass.
        clock: tells when things happen.
        keeps: whether a backward follows, so that contexts are kept.

    Attributes:
        spans: what was computed, and when.
        peak: the most contexts that were kept at once.
    """

    def __init__(
        self,
        rank: int,
        pieces: Mapping[int, Piece],
        placement: Sequence[int],
        exchange: Exchange,
        ends: Ends,
        clock: Clock,
        keeps: bool,
    ) -> None:
        self.spans: list[Span] = []
        self.peak = 0
        self._rank = rank
        self._pieces = pieces
        self._placement = placement
        self._exchange = exchange
        self._ends = ends
        self._clock = clock
        self._keeps = keeps
        self._handed: dict[Action, Any] = {}
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
                self._exchange.send(each, self._handed.pop(each))
            elif each.kind.computes:
                self._perform(each)
        self._exchange.finish()

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

    def _take(self, each: Action) -> Any:
        """What an action works on: from outside, from a piece of this rank, or from a message."""
        forward = each.kind is Kind.FORWARD
        if forward and each.stage == 0:
            return self._ends.input(each.microbatch)
        if not forward and each.stage == len(self._placement) - 1:
            return self._ends.grad(each.microbatch)
        arrival = Action(each.stage, Kind.RECV_FORWARD if forward else Kind.RECV_BACKWARD, each.microbatch)
        if arrival in self._handed:
            return self._handed.pop(arrival)
        return self._exchange.receive(arrival, self._pieces[each.stage].kind)

    def _give(self, each: Action, result: Any) -> None:
        """Hands a result to the piece that wants it: at once where it is here, else when its send is due."""
        forward = each.kind is Kind.FORWARD
        target = each.stage + (1 if forward else -1)
        if not 0 <= target < len(self._placement):
            return
        if self._placement[target] == self._rank:
            self._handed[Action(target, Kind.RECV_FORWARD if forward else Kind.RECV_BACKWARD, each.microbatch)] = result
        else:
            self._handed[Action(each.stage, Kind.SEND_FORWARD if forward else Kind.SEND_BACKWARD, each.microbatch)] = result
