"""Runs one rank's actions: computes, passes values on, and records when each action ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ferrorpc.arrays.error_prefix import ErrorPrefix
from ferrorpc.errors import UsageError
from ferrorpc.guard import Clock
from ferrorpc.pipeline.actions import Action, Kind
from ferrorpc.pipeline.batch import converted
from ferrorpc.pipeline.batch_io import LEFT_OUT, BatchIO, is_left_out
from ferrorpc.pipeline.exchange import Exchange
from ferrorpc.pipeline.schedules.lowering import KIND_LABELS
from ferrorpc.pipeline.schedules.schedule import Schedule
from ferrorpc.pipeline.stage import Piece
from ferrorpc.pipeline.transfers import Transfer, inputs_of, outputs_of
from ferrorpc.plans.span import Span

_COMPLETING: Final = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT, Kind.SEND_BACKWARD)
"""The last of these completes a piece's gradients, and what others wait for."""


class Executor:
    """Runs the actions of one pass over a batch.

    Args:
        rank: this rank.
        pieces: this rank's pieces of the model, by number.
        schedule: says which rank has which piece, and the edges between them.
        exchange: the messages of this pass.
        batch_io: inputs and outputs of this pass.
        clock: what recorded times are read from.
        keep_contexts: whether a backward follows.

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
        batch_io: BatchIO,
        clock: Clock,
        keep_contexts: bool,
    ) -> None:
        self.spans: list[Span] = []
        self.peak = 0
        self._rank = rank
        self._pieces = pieces
        self._kinds = {number: piece.kind for number, piece in pieces.items()}
        self._edges = schedule.edges
        self._placement = schedule.placement
        self._exchange = exchange
        self._batch_io = batch_io
        self._clock = clock
        self._keep_contexts = keep_contexts
        self._values: dict[Transfer, Any] = {}
        """Results that wait for an action of this rank, or for their send."""
        self._chunk = {number: chunk for chunk, number in enumerate(sorted(pieces))}

    def run(self, actions: Sequence[Action]) -> Iterator[int]:
        """Runs them in order, sends included. A receive happens when the action that needs it runs.

        Yields the number of each piece as soon as its last backward is done and sent on: nobody waits while the caller uses it.
        """
        last = {each.stage: each for each in actions if each.kind in _COMPLETING}
        completed: list[int] = []
        for each in actions:
            if each.kind.sends:
                for transfer in outputs_of(each, self._edges):
                    if self._placement[transfer.target] != self._rank:
                        self._exchange.send(transfer, self._values.pop(transfer))
            elif each.kind.computes:
                yield from completed
                completed.clear()
                self._run_compute(each)
            if each == last.get(each.stage):
                completed.append(each.stage)
        yield from completed

    def _run_compute(self, each: Action) -> None:
        value = None if each.kind is Kind.BACKWARD_WEIGHT else self._input(each)
        name = str(each)
        self._exchange.show(name)
        start = self._clock.now()
        result = self._computed(each, value)
        if each.kind is Kind.FORWARD and each.stage == len(self._placement) - 1:
            self._batch_io.output(each.microbatch, result)
        stop = self._clock.now()
        label, chunk = KIND_LABELS[each.kind], self._chunk[each.stage]
        self.spans.append(Span(name, self._rank, start, stop, label, str(each.microbatch), chunk))
        self.peak = max(self.peak, sum(piece.held for piece in self._pieces.values()))
        self._keep(each, result)

    def _computed(self, each: Action, value: Any) -> Any:
        """The result of an action on a value."""
        piece, microbatch = self._pieces[each.stage], each.microbatch
        if each.kind is Kind.FORWARD:
            return piece.forward(microbatch, value, self._keep_contexts)
        if each.kind is Kind.BACKWARD_WEIGHT:
            piece.backward_weight(microbatch)
            return None
        if is_left_out(value):  # all pieces before get that they shall leave it out, too
            piece.leave_out(microbatch)
            targets = len(outputs_of(each, self._edges))
            return (LEFT_OUT,) * targets if targets > 1 else LEFT_OUT
        return piece.backward(microbatch, value) if each.kind is Kind.BACKWARD else piece.backward_input(microbatch, value)

    def _input(self, each: Action) -> Any:
        """What an action works on: from the batch, or from each piece with an edge to it, here or on other ranks."""
        transfers = inputs_of(each, self._edges)
        if not transfers:
            batch, microbatch = self._batch_io, each.microbatch
            return batch.inputs[microbatch] if each.kind is Kind.FORWARD else batch.grads.pop(microbatch)
        values = tuple(self._received(transfer) for transfer in transfers)
        return values[0] if len(values) == 1 else values

    def _received(self, transfer: Transfer) -> Any:
        kind = self._kinds[transfer.target]
        if self._placement[transfer.source] != self._rank:
            return self._exchange.receive(transfer, kind)
        value = self._values.pop(transfer)
        if self._kinds[transfer.source] is kind:
            return value
        with ErrorPrefix(f"the value of {transfer}"):
            return converted(value, kind)

    def _keep(self, each: Action, result: Any) -> None:
        """Keeps a result for the pieces that it goes to; those on other ranks get theirs when the send is due."""
        transfers = outputs_of(each, self._edges)
        if len(transfers) > 1 and not (isinstance(result, tuple) and len(result) == len(transfers)):
            targets = ", ".join(str(transfer.target) for transfer in transfers)
            raise UsageError(
                f"{each} returned {_describe(result)}, but stage {each.stage} has edges to stages {targets}",
                hint=f"return a tuple of {len(transfers)}, one value for each of them in this order",
            )
        self._values.update(zip(transfers, result if len(transfers) > 1 else (result,), strict=False))


def _describe(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else f"one {type(result).__name__}"
