"""Pipeline: trains a model that is cut into stages, one or more on each rank, by a schedule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from ferrorpc.consistency import require_same
from ferrorpc.errors import UsageError
from ferrorpc.failure import others_told
from ferrorpc.group import ProcessGroup, group_given
from ferrorpc.guard import SYSTEM_CLOCK, Clock, seconds_of
from ferrorpc.pipeline.actions import Kind, action
from ferrorpc.pipeline.batch import check_like, check_reduction, cut, join, loss_weights, rows, shapes_of, split
from ferrorpc.pipeline.batch_io import BatchIO, InferenceBatch, LossFunction, TrainingBatch
from ferrorpc.pipeline.device_lanes import open_lanes
from ferrorpc.pipeline.exchange import Exchange
from ferrorpc.pipeline.executor import Executor
from ferrorpc.pipeline.schedules.edges import Edge
from ferrorpc.pipeline.schedules.lowering import KIND_LABELS, Rows
from ferrorpc.pipeline.schedules.named import named
from ferrorpc.pipeline.schedules.schedule import Schedule
from ferrorpc.pipeline.schedules.simulation import PipelineTimeline
from ferrorpc.pipeline.stage import Piece
from ferrorpc.pipeline.tied_weights import TiedWeights
from ferrorpc.pipeline.transfers import Transfer, links_of, receives, sends_to
from ferrorpc.plans.span import Span

DEFAULT_MICROBATCHES = 8
_FORWARDS: Final = (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD)
_BACKWARDS: Final = tuple(kind for kind in Kind if kind not in _FORWARDS)
_made: Final[WeakKeyDictionary[ProcessGroup, int]] = WeakKeyDictionary()
"""How many pipelines each group has had. The number is the same on every rank, because ranks make their pipelines together."""


def _ignore(piece: int) -> None:
    """An `on_gradients` that does nothing."""


class Pipeline:
    """This rank's part of a model that is cut into stages, and what trains it.

        pipe = ferrorpc.Pipeline(stage, group, schedule="1f1b", num_microbatches=8)
        loss = pipe.step(x, target, loss_fn)      # gradients are where the stage keeps them; then step the optimizer

    Gradients equal those of the whole batch in one process, and bit for bit those of one process that runs the same
    microbatches one after the other: all named schedules take a stage's microbatches in ascending order.

    Args:
        stage: this rank's piece of the model (see `Stage`), or a list of them for schedules with several chunks a rank, in the
            order of `schedule.pieces(rank)`.
        group: the pipeline's ranks. Every rank constructs its part at the same point of its program.
        schedule: a name (gpipe, 1f1b, looped_bfs, interleaved, zb1p, zbv, dualpipe_v) or a `Schedule`.
        num_microbatches: how many parts a batch is cut into; None for the schedule's number, or 8 if the schedule is a name.
        edges: all edges (from, to) between the model's pieces, where they are not a chain: [(0, 1), (0, 2), (1, 2)]. A stage
            with several successors gives a tuple with a value for each, in their order; one with several predecessors takes a
            tuple. The same holds for gradients.
        tied: weights that stages share, each as the names of its copies, "piece/name": [("0/embedding", "3/head")]. All
            copies begin with the first one's value, and get the sum of all their gradients.
        clock: what recorded times are read from.

    Raises:
        UsageError: the schedule is not sound, does not admit these counts, or asks for another number of stages.
        CollectiveMismatchError: ranks have different schedules, edges or tied weights.
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
        self.schedule = _sound_schedule(schedule, group.size, num_microbatches, len(stages), edges)
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
        tied_names = _names_of_tied(tied)
        self._name = _agreed_name(self.schedule, tied_names, group)
        self._tied = TiedWeights(tied_names, self._pieces, self.schedule.placement, group)
        links = links_of(self.schedule.placement, self.schedule.edges)
        self._lanes = open_lanes(group, links, [piece.kind for piece in self._pieces.values()])
        self._steps = 0
        self._spans: list[Span] = []
        self._peak = 0
        self._output_rows: list[int] | None = None
        """Of the outputs of the last `forward`, on the rank of the last stage; None unless a backward may follow."""
        nothing: Rows = [()] * group.size
        with others_told(group), self._exchange(nothing, self._tied.broadcast_receives(), group.timeout) as exchange:
            self._tied.broadcast(exchange)

    @property
    def peak_activations(self) -> float:
        """The most activations this rank kept at once in its last step, in whole-rank microbatches."""
        return self._peak / len(self._pieces)

    def named_parameters(self, piece: int | None = None) -> Iterator[tuple[str, Any]]:
        """("piece/name", parameter) of this rank's pieces, or of one of them; numbers where a stage gives no names."""
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
        """Runs forward and backward of a batch by the schedule. Every rank calls it.

        Args:
            x: the batch, on the rank of the first stage: an array or a tuple of arrays, cut along axis 0 as by np.array_split,
                or a list of microbatches. Ignored on other ranks.
            target: likewise, on the rank of the last stage.
            loss_fn: loss_fn(y, target) -> (loss, gradient of y) of one microbatch, on the rank of the last stage.
            reduction: whether loss_fn takes the "mean" or the "sum" over its microbatch. The gradients are those of the same
                reduction over the whole batch.
            weight: for means over something other than rows: weight(target) is what a microbatch counts, such as its tokens.
                One that counts 0 has no loss and no backward; if all do, the loss is 0.0 and no gradient changes. There can be
                none where stages average in each backward, as a wrapped module does over several replicas.
            on_gradients: called on this thread with the number of each piece of this rank as soon as its gradients are those of
                the whole batch, and what other ranks wait for was sent. They often still compute then, so it is the moment to
                send gradients to replicas.
            timeout: seconds to wait for any one message; None for the group's.

        Returns:
            The batch's loss on the rank of the last stage, None elsewhere. It is of the type that loss_fn gives, but a float if
            the batch counts nothing: float(loss) reads either.

        Raises:
            UsageError: the batch does not fit the schedule, or on_gradients needs a tie of a weight that two stages share;
                nothing was sent. Or a microbatch counts 0 for a stage that averages; that ends the generation.
            CollectiveTimeoutError: a message did not come in time.
            FerroError: the generation was ended, by this cause. An exception of a stage, of loss_fn or of on_gradients ends it,
                too, and is raised here as it is.
        """
        check_reduction(reduction, weight)
        inputs = split(x, self.schedule.microbatches, "x") if self._is_first else []
        if self._is_last:
            loss = _loss_given(loss_fn)
            targets = split(target, self.schedule.microbatches, "target")
            batch = TrainingBatch(inputs, targets, loss_weights(targets, reduction, weight), loss)
        else:
            batch = TrainingBatch(inputs)
        self._check_on_gradients(on_gradients)
        seconds = seconds_of(timeout, self._group.timeout)
        with others_told(self._group):
            self._begin()
            self._run(tuple(Kind), batch, seconds, on_gradients or _ignore)
        return batch.loss

    def forward(self, x: Any = None, *, timeout: float | None = None) -> Any:
        """The model's outputs for a batch, joined along axis 0, on the rank of the last stage; None elsewhere.

        Contexts are kept for a `backward` only if the schedule does all forwards first (gpipe, looped_bfs).

        Args:
            x, timeout: as in `step`.

        Raises:
            UsageError, CollectiveTimeoutError, FerroError: as in `step`.
        """
        batch = InferenceBatch(split(x, self.schedule.microbatches, "x") if self._is_first else [])
        seconds = seconds_of(timeout, self._group.timeout)
        with others_told(self._group):
            self._begin()
            self._output_rows = []
            self._run(_FORWARDS, batch, seconds)
        if not self._is_last:
            return None
        outputs = [batch.outputs[microbatch] for microbatch in sorted(batch.outputs)]
        joined = join(outputs, "the outputs")
        self._output_rows = [rows(each, "an output") for each in outputs]
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
            outputs, grads: on the rank of the last stage, what `forward` returned and its gradient, of the same length: the
                gradient of the whole batch's loss. It is not scaled.
            on_gradients, timeout: as in `step`.

        Raises:
            UsageError: the schedule mixes forwards and backwards, there was no forward, or the lengths differ.
        """
        if not self.schedule.is_forward_first:
            raise UsageError(
                f"{self.schedule} starts backwards before all forwards are done, so they cannot be two calls",
                hint='call step(), or use schedule="gpipe"',
            )
        if self._output_rows is None:
            raise UsageError("there is no forward for this backward", hint="call forward() first, once for each backward()")
        parts = []
        if self._is_last:
            total = sum(self._output_rows)
            for what, value in (("outputs", outputs), ("grads", grads)):
                count = None if value is None else rows(value, what)
                if count != total:
                    found = "is None" if count is None else f"has {count}"
                    raise UsageError(
                        f"{what} must have the {total} rows that forward returned, and {found}",
                        hint="backward(outputs, grads) takes all that forward returned, and the loss's gradient of it",
                    )
            check_like(grads, shapes_of(outputs), "grads", "y")
            parts = cut(grads, self._output_rows)
        self._check_on_gradients(on_gradients)
        seconds = seconds_of(timeout, self._group.timeout)
        with others_told(self._group):
            self._output_rows = None
            self._run(_BACKWARDS, InferenceBatch([], parts), seconds, on_gradients or _ignore)

    def recorded(self) -> PipelineTimeline:
        """What all ranks did in their last step, in seconds from its start. Every rank calls it.

        Times of ranks on different hosts are comparable only as far as the hosts' monotonic clocks are.
        """
        lines = "\n".join(f"{each.name} {each.start!r} {each.stop!r} {each.shade}" for each in self._spans)
        texts = self._group.all_gather(np.frombuffer(f"{self.peak_activations!r}\n{lines}".encode(), np.uint8))
        peaks, spans = [], []
        for rank, text in enumerate(bytes(each).decode().splitlines() for each in texts):
            peaks.append(float(text[0]))
            spans += [_span(line, rank) for line in text[1:]]
        origin = min((each.start for each in spans), default=0.0)
        moved = [replace(each, start=each.start - origin, stop=each.stop - origin) for each in spans]
        return PipelineTimeline(self.schedule, moved, peaks, f"{self.schedule}, recorded", "seconds")

    def _check_on_gradients(self, function: Any) -> None:
        if function is None:
            return
        if not callable(function):
            raise UsageError(f"on_gradients={function!r} is no function", hint="it is called with the number of a piece")
        if len(self._pieces) > 1:
            self._tied.check_shared(list(self.named_parameters()))

    def _begin(self) -> None:
        """Begins a new pass over a batch, and frees the contexts that an earlier forward kept."""
        for piece in self._pieces.values():
            piece.forget()
        self._output_rows = None
        self._spans, self._peak = [], 0
        self._steps += 1

    def _run(
        self,
        kinds: Collection[Kind],
        batch_io: BatchIO,
        seconds: float,
        on_gradients: Callable[[int], None] = _ignore,
    ) -> None:
        """Runs the actions of these kinds."""
        rank = self._group.rank
        rows = [[each for each in row if each.kind in kinds] for row in self._rows]
        has_backwards = Kind.BACKWARD in kinds
        keep_contexts = has_backwards or self.schedule.is_forward_first
        tied_receives = self._tied.gradient_receives() if has_backwards else []
        tied_step = self._tied.step() if has_backwards else nullcontext()
        with tied_step, self._exchange(rows, tied_receives, seconds) as exchange:
            executor = Executor(rank, self._pieces, self.schedule, exchange, batch_io, self._clock, keep_contexts)
            try:
                for piece in executor.run(rows[rank]):
                    self._tied.piece_completed(piece, exchange)
                    if not self._tied.in_piece(piece):
                        on_gradients(piece)
                if has_backwards:
                    self._tied.sum_gradients(exchange)
                for piece in filter(self._tied.in_piece, self._pieces):
                    on_gradients(piece)
            finally:
                self._spans += executor.spans
                self._peak = max(self._peak, executor.peak)

    @contextmanager
    def _exchange(self, rows: Rows, tied_receives: Sequence[Transfer], seconds: float) -> Iterator[Exchange]:
        """A context with the exchange of these actions' messages, and then of tied weights; its end waits until what was sent
        has left."""
        rank, placement, edges, lanes = self._group.rank, self.schedule.placement, self.schedule.edges, self._lanes
        expected = [*receives(rows[rank], placement, edges), *tied_receives]
        orders = {source: sends_to(rank, rows[source], placement, edges) for source, _ in lanes}
        exchange = Exchange(self._group, placement, expected, self._name, self._steps, seconds, lanes, orders)
        try:
            yield exchange
            exchange.finish()
        except BaseException:
            exchange.abandon()
            raise

    def __repr__(self) -> str:
        pieces = ", ".join(str(number) for number in self._pieces)
        return f"<Pipeline {self.schedule}, rank {self._group.rank} with stage {pieces}>"


def _sound_schedule(
    schedule: str | Schedule, size: int, microbatches: int | None, chunks: int, edges: Iterable[Edge] | None
) -> Schedule:
    """The schedule to run. Raises UsageError if it is not sound, or not for this many ranks."""
    if isinstance(schedule, str):
        schedule = named(schedule, size, DEFAULT_MICROBATCHES if microbatches is None else microbatches, chunks)
    if not isinstance(schedule, Schedule):
        raise UsageError(
            f"schedule={schedule!r} is no schedule", hint="pass a name such as '1f1b', or ferrorpc.schedules.zbv(...)"
        )
    if schedule.stages != size:
        raise UsageError(
            f"{schedule} is for {schedule.stages} ranks, but the group has {size}", hint=f"make it with stages={size}"
        )
    if microbatches not in (None, schedule.microbatches):
        raise UsageError(f"num_microbatches={microbatches}, but the schedule is {schedule}", hint="omit num_microbatches")
    chosen = schedule if edges is None else schedule.with_edges(edges)
    findings = chosen.validate()
    if findings:
        said = "; ".join(str(each) for each in findings[:3])
        raise UsageError(f"{schedule} is not sound: {said}", hint="schedule.validate() lists all that is wrong with it")
    return chosen


def _loss_given(loss_fn: Any) -> LossFunction:
    hint = "loss_fn(y, target) -> (loss, gradient of y); ferrorpc.torch.with_gradient(loss) makes one of a loss of torch"
    if loss_fn is None:
        raise UsageError("the rank of the last stage needs loss_fn", hint=hint)
    if isinstance(loss_fn, type) or not callable(loss_fn):
        raise UsageError(f"loss_fn={loss_fn!r} is no function", hint=hint)
    given: LossFunction = loss_fn
    return given


def _names_of_tied(tied: Any) -> list[list[str]]:
    """The names of each tied weight's copies. Raises UsageError if they are not all text."""
    try:
        found = [[names] if isinstance(names, str) else list(names) for names in tied]
    except TypeError:
        found = [[None]]
    if isinstance(tied, str) or not all(isinstance(name, str) for names in found for name in names):
        hint = 'list the copies of each weight: [("0/embedding", "3/head")]'
        raise UsageError(f"tied={tied!r} are no names of weights", hint=hint)
    return found


def _agreed_name(schedule: Schedule, tied_names: Sequence[Sequence[str]], group: ProcessGroup) -> str:
    """The pipeline's name in messages, unique in the group. Compares schedule, edges and tied weights of all ranks first."""
    wiring = f"edges {schedule.edges.pairs}\ntied {tied_names}"
    require_same(group, "pipeline schedules", f"{schedule}\n{wiring}\n{schedule.to_text()}")
    number = _made[group] = _made.get(group, 0) + 1
    return f"{schedule} #{number}"


def _span(line: str, rank: int) -> Span:
    name, start, stop, shade = line.split()
    each = action(name)
    return Span(name, rank, float(start), float(stop), KIND_LABELS[each.kind], str(each.microbatch), int(shade))
