"""Pipeline: a model cut into stages, one or more on each rank, trained by a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from ferrorpc.consistency import require_same
from ferrorpc.errors import UsageError
from ferrorpc.group import ProcessGroup, group_given
from ferrorpc.guard import SYSTEM_CLOCK, Clock, seconds_of
from ferrorpc.pipeline.actions import Action, Kind, action
from ferrorpc.pipeline.batch import check_like, cut, join, rows, shares, split
from ferrorpc.pipeline.direct import lanes_of
from ferrorpc.pipeline.ends import Ends, Inference, LossFunction, Training
from ferrorpc.pipeline.exchange import Exchange
from ferrorpc.pipeline.performer import Performer
from ferrorpc.pipeline.schedules.edges import Edge
from ferrorpc.pipeline.schedules.lowering import NAMES
from ferrorpc.pipeline.schedules.named import named
from ferrorpc.pipeline.schedules.schedule import Schedule
from ferrorpc.pipeline.schedules.simulation import PipelineTimeline
from ferrorpc.pipeline.stage import Piece
from ferrorpc.pipeline.ties import Ties
from ferrorpc.pipeline.wire import Wire, arrivals, departures, ways
from ferrorpc.plans.timeline import Span

MICROBATCHES = 8
"""How many there are where nobody says."""
_made: Final[WeakKeyDictionary[ProcessGroup, int]] = WeakKeyDictionary()
"""How many pipelines each group has had: as many on every rank, since ranks make theirs together."""


class Pipeline:
    """This rank's part of a model that is cut into stages.

        pipe = ferrorpc.Pipeline(stage, group, schedule="1f1b", num_microbatches=8)
        loss = pipe.step(x, target, loss_fn)      # gradients are where the stage keeps them; then step the optimizer

    Gradients equal those of the whole batch in one process, and bit for bit those of one process that runs the same
    microbatches one after the other: all named schedules take a stage's microbatches in ascending order.

    Args:
        stage: this rank's piece of the model (see `Stage`), or a list of them for schedules with several chunks a rank, in the
            order of `schedule.pieces(rank)`.
        group: every rank constructs its part at the same point of its program.
        schedule: a name (gpipe, 1f1b, looped_bfs, interleaved, zb1p, zbv, dualpipe_v) or a `Schedule`.
        num_microbatches: how many parts a batch is cut into; 8 where neither it nor a Schedule says.
        edges: (from, to) of the model's pieces, all of them, where they are no chain: [(0, 1), (0, 2), (1, 2)]. A stage that is
            wired to several gives a tuple with a value for each in their order, and takes one of what several send to it;
            gradients alike.
        tied: weights that stages share, each as the names of its copies, "piece/name": [("0/embedding", "3/head")]. All
            copies begin with the first one's value, and get the sum of all their gradients.
        clock: what recorded times are read from.

    Raises:
        UsageError: the schedule is not sound, does not admit these counts, or asks for other stages.
        CollectiveMismatchError: ranks have different schedules, edges or ties.
    """

    def __init__(
        self,
        stage: Any,
        group: ProcessGroup,
        schedule: str | Schedule = "1f1b",
        num_microbatches: int | None = None,
        *,
        edges: Iterable[Edge] | None = None,
        tied: Iterable[Iterable[str]] = (),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        group = group_given(group)
        stages = list(stage) if isinstance(stage, list | tuple) else [stage]
        self.schedule = _chosen(schedule, group.size, num_microbatches, len(stages), edges)
        numbers = self.schedule.pieces(group.rank)
        if len(stages) != len(numbers):
            wanted = ", ".join(str(number) for number in numbers)
            raise UsageError(
                f"rank {group.rank} was given {len(stages)} stages, but {self.schedule} gives it pieces {wanted} of the model",
                hint="pass a list with a stage for each of these pieces of the model",
            )
        self._group = group
        self._clock = clock
        self._pieces = {number: Piece(each, number) for number, each in zip(numbers, stages, strict=True)}
        self._rows = self.schedule.with_messages().actions
        self._is_first = 0 in numbers
        self._is_last = self.schedule.virtual_stages - 1 in numbers
        ties = _given(tied)
        self._name = _agreed(self.schedule, ties, group)
        self._ties = Ties(ties, self._pieces, self.schedule.placement, group)
        self._lanes = lanes_of(
            group, ways(self.schedule.placement, self.schedule.edges), [piece.kind for piece in self._pieces.values()]
        )
        self._steps = 0
        self._spans: list[Span] = []
        self._peak = 0
        self._row_counts: list[int] | None = None
        self._awaits_backward = False
        if ties:
            self._spread_ties()

    @property
    def peak_activations(self) -> float:
        """The most activations this rank kept at once in its last step, in whole-rank microbatches."""
        return self._peak / len(self._pieces)

    def named_parameters(self, piece: int | None = None) -> Iterator[tuple[str, Any]]:
        """("piece/name", parameter) of this rank's pieces, or of one of them; a stage without names counts its own."""
        for number, held in self._pieces.items():
            if piece in (None, number):
                yield from ((f"{number}/{name}", each) for name, each in held.named_parameters().items())

    def step(
        self,
        x: Any = None,
        target: Any = None,
        loss_fn: LossFunction | None = None,
        reduction: str = "mean",
        *,
        weight: Callable[[Any], float] | None = None,
        on_gradients: Callable[[int], None] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Forward and backward of a batch, as the schedule says. Every rank calls it.

        Args:
            x: the batch, on the rank of the first stage: an array or a tuple of arrays, cut along axis 0 as by np.array_split,
                or a list of microbatches. Other ranks' is not looked at.
            target: likewise, on the rank of the last stage.
            loss_fn: loss_fn(y, target) -> (loss, gradient of y) of one microbatch, on the rank of the last stage.
            reduction: what loss_fn takes over its microbatch, "mean" or "sum": the gradients are then those of the same over
                the whole batch.
            weight: for means over something else than rows: what a microbatch's target counts, such as its tokens.
            on_gradients: called on this thread with the number of each piece of this rank as soon as its gradients are those of
                the whole batch, which is often while others still compute: the moment to send them to replicas.
            timeout: seconds to wait for any one message; None for the group's.

        Returns:
            The batch's loss on the rank of the last stage, None elsewhere.

        Raises:
            UsageError: the batch does not fit the schedule; nothing was sent.
            CollectiveTimeoutError: a message did not come in time.
            FerroError: whatever ended the generation. What a stage, loss_fn or on_gradients raises ends it,
                too, and is raised here.
        """
        ends = Training(split(x, self.schedule.microbatches, "x") if self._is_first else [])
        if self._is_last:
            loss = _loss_given(loss_fn)
            targets = split(target, self.schedule.microbatches, "target")
            ends.expect(targets, shares(targets, reduction, weight), loss)
        _check_function("on_gradients", on_gradients, "it is called with the number of a piece")
        self._begin(awaits_backward=False)
        self._run(_any, ends, True, timeout, on_gradients or _nothing)
        return ends.loss

    def forward(self, x: Any = None, *, timeout: float | None = None) -> Any:
        """The model's outputs for a batch: on the rank of the last stage, put together along axis 0; None elsewhere.

        Only where the schedule does all forwards first (gpipe, looped_bfs) contexts are kept for a `backward`.

        Args:
            x, timeout: as in `step`.

        Raises:
            UsageError, CollectiveTimeoutError, FerroError: as in `step`.
        """
        ends = Inference(split(x, self.schedule.microbatches, "x") if self._is_first else [])
        keeps = self.schedule.is_forward_first
        self._begin(awaits_backward=keeps)
        self._run(_is_forward, ends, keeps, timeout)
        if not self._is_last:
            return None
        outputs = [ends.outputs[microbatch] for microbatch in sorted(ends.outputs)]
        joined = join(outputs, "the outputs")
        self._row_counts = [rows(each, "an output") for each in outputs]
        return joined

    def backward(
        self,
        outputs: Any = None,
        grads: Any = None,
        *,
        on_gradients: Callable[[int], None] | None = None,
        timeout: float | None = None,
    ) -> None:
        """The backward of the last `forward`. Every rank calls it.

        Args:
            outputs, grads: on the rank of the last stage, what `forward` returned and its gradient, of the same length.
                Gradients are taken as they are: those of the whole batch's loss.
            on_gradients, timeout: as in `step`.

        Raises:
            UsageError: the schedule mixes forwards and backwards, there was no forward, or the lengths differ.
        """
        if not self.schedule.is_forward_first:
            raise UsageError(
                f"{self.schedule} begins backwards before it ends forwards, so they cannot be called apart",
                hint='call step(), or use schedule="gpipe"',
            )
        if not self._awaits_backward:
            raise UsageError(
                "there is no forward whose backward this could be", hint="call forward() first, once for each backward()"
            )
        ends = Inference([])
        if self._is_last:
            counts = self._row_counts or []
            for what, value in (("outputs", outputs), ("grads", grads)):
                if value is None or rows(value, what) != sum(counts):
                    raise UsageError(
                        f"{what} must have the {sum(counts)} rows that forward returned", hint="pass what it returned, whole"
                    )
            check_like(grads, outputs, "grads")
            ends.grads = cut(grads, counts)
        _check_function("on_gradients", on_gradients, "it is called with the number of a piece")
        self._awaits_backward = False
        self._run(_is_backward, ends, True, timeout, on_gradients or _nothing)

    def recorded(self) -> PipelineTimeline:
        """What all ranks did in their last step, in seconds from its start. Every rank calls it.

        Times of ranks on different hosts are only as comparable as their monotonic clocks are.
        """
        lines = "\n".join(f"{each.name} {each.start!r} {each.stop!r} {each.shade}" for each in self._spans)
        texts = self._group.all_gather(np.frombuffer(f"{self.peak_activations!r}\n{lines}".encode(), np.uint8))
        peaks, spans = [], []
        for rank, text in enumerate(bytes(each).decode().splitlines() for each in texts):
            peaks.append(float(text[0]))
            spans += [_span(line, rank) for line in text[1:]]
        origin = min((each.start for each in spans), default=0.0)
        moved = [Span(s.name, s.lane, s.start - origin, s.stop - origin, s.kind, s.text, s.shade) for s in spans]
        return PipelineTimeline(self.schedule, moved, peaks, f"{self.schedule}, recorded", "seconds")

    def _begin(self, awaits_backward: bool) -> None:
        """A new pass over the batch; what an earlier forward kept goes."""
        for piece in self._pieces.values():
            piece.forget()
        self._awaits_backward = awaits_backward
        self._spans, self._peak = [], 0
        self._steps += 1

    def _run(
        self,
        chosen: Callable[[Action], bool],
        ends: Ends,
        keeps: bool,
        timeout: float | None,
        on_gradients: Callable[[int], None] | None = None,
    ) -> None:
        """Performs the chosen actions; with backwards among them if there is an `on_gradients`."""
        trains = on_gradients is not None
        rows = [list(filter(chosen, row)) for row in self._rows]
        actions, placement, edges = rows[self._group.rank], self.schedule.placement, self.schedule.edges
        coming = arrivals(actions, placement, edges) + self._ties.arrivals() * trains
        sources = [source for source, _ in self._lanes]
        orders = {source: departures(rows[source], placement, edges, self._group.rank) for source in sources}
        exchange = self._exchange(coming, timeout, orders)

        def completed(piece: int) -> None:
            self._ties.complete(piece, exchange)
            if on_gradients is not None and not self._ties.holds(piece):
                on_gradients(piece)

        performer = Performer(self._group.rank, self._pieces, self.schedule, exchange, ends, self._clock, keeps, completed)
        try:
            if trains:
                self._ties.begin()
            performer.run(actions)
            if on_gradients is not None:
                self._ties.settle(exchange)
                for piece in filter(self._ties.holds, self._pieces):
                    on_gradients(piece)
            exchange.finish()
        except (Exception, KeyboardInterrupt) as error:
            exchange.abandon()
            self._group.abort(error)
            raise
        finally:
            self._spans += performer.spans
            self._peak = max(self._peak, performer.peak)

    def _spread_ties(self) -> None:
        exchange = self._exchange(self._ties.spreads(), None)
        self._ties.spread(exchange)
        exchange.finish()

    def _exchange(
        self, coming: Sequence[Wire], timeout: float | None, orders: Mapping[int, Iterable[Wire]] | None = None
    ) -> Exchange:
        seconds, lanes = seconds_of(timeout, self._group.timeout), {} if orders is None else self._lanes
        return Exchange(self._group, self.schedule.placement, coming, self._name, self._steps, seconds, lanes, orders or {})

    def __repr__(self) -> str:
        pieces = ", ".join(str(number) for number in self._pieces)
        return f"<Pipeline {self.schedule}, rank {self._group.rank} with stage {pieces}>"


def _chosen(
    schedule: str | Schedule, size: int, microbatches: int | None, chunks: int, edges: Iterable[Edge] | None
) -> Schedule:
    """The schedule to run, sound and of this many ranks."""
    if isinstance(schedule, str):
        schedule = named(schedule, size, MICROBATCHES if microbatches is None else microbatches, chunks)
    if not isinstance(schedule, Schedule):
        raise UsageError(
            f"schedule={schedule!r} is no schedule", hint="pass a name such as '1f1b', or ferrorpc.schedules.zbv(...)"
        )
    if schedule.stages != size:
        raise UsageError(
            f"{schedule} is for {schedule.stages} ranks, but the group has {size}", hint=f"make it with stages={size}"
        )
    if microbatches not in (None, schedule.microbatches):
        raise UsageError(f"num_microbatches={microbatches}, but the schedule is {schedule}", hint="leave num_microbatches away")
    chosen = schedule if edges is None else schedule.with_edges(edges)
    findings = chosen.validate()
    if findings:
        said = "; ".join(str(each) for each in findings[:3])
        raise UsageError(f"{schedule} is not sound: {said}", hint="schedule.validate() lists all that is wrong with it")
    return chosen


def _check_function(name: str, function: Any, hint: str) -> None:
    if function is not None and not callable(function):
        raise UsageError(f"{name}={function!r} is no function", hint=hint)


def _loss_given(loss_fn: Any) -> LossFunction:
    hint = "loss_fn(y, target) -> (loss, gradient of y); ferrorpc.torch.with_gradient(loss) makes one of a loss of torch"
    if loss_fn is None:
        raise UsageError("the rank of the last stage needs loss_fn", hint=hint)
    if isinstance(loss_fn, type) or not callable(loss_fn):
        raise UsageError(f"loss_fn={loss_fn!r} is no function", hint=hint)
    given: LossFunction = loss_fn
    return given


def _given(tied: Any) -> list[str | list[str]]:
    """The ties, if they hold nothing but text."""
    try:
        ties = [names if isinstance(names, str) else list(names) for names in tied]
    except TypeError:
        ties = [[None]]
    if isinstance(tied, str) or not all(isinstance(name, str) for names in ties for name in names):
        hint = 'list the copies of each weight: [("0/embedding", "3/head")]'
        raise UsageError(f"tied={tied!r} are no names of weights", hint=hint)
    return ties


def _agreed(schedule: Schedule, ties: Sequence[str | Sequence[str]], group: ProcessGroup) -> str:
    """The pipeline's name in messages: the same on every rank, and no other pipeline's of the group."""
    wiring = f"edges {schedule.edges.pairs}\ntied {ties}"
    require_same(group, "pipeline schedules", f"{schedule}\n{wiring}\n{schedule.to_text()}")
    number = _made[group] = _made.get(group, 0) + 1
    return f"{schedule} #{number}"


def _nothing(piece: int) -> None:
    """For those who need not know when gradients are complete."""


def _any(each: Action) -> bool:
    return True


def _is_backward(each: Action) -> bool:
    return not _is_forward(each)


def _is_forward(each: Action) -> bool:
    return each.kind in (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD)


def _span(line: str, rank: int) -> Span:
    name, start, stop, shade = line.split()
    each = action(name)
    return Span(name, rank, float(start), float(stop), NAMES[each.kind], str(each.microbatch), int(shade))
