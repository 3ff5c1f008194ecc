"""Pipeline: a model cut into stages, one or more on each rank, trained by a schedule."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ferrorpc.agreement import agree
from ferrorpc.errors import UsageError
from ferrorpc.guard import SYSTEM_CLOCK, Clock
from ferrorpc.operations.arguments import seconds_of
from ferrorpc.pipeline.actions import Action, Kind, action
from ferrorpc.pipeline.batch import cut, join, rows, shares, split
from ferrorpc.pipeline.ends import Ends, Inference, LossFunction, Training
from ferrorpc.pipeline.exchange import Exchange
from ferrorpc.pipeline.execution import Execution
from ferrorpc.pipeline.schedules.lowering import NAMES
from ferrorpc.pipeline.schedules.named import named
from ferrorpc.pipeline.schedules.schedule import Schedule
from ferrorpc.pipeline.schedules.simulation import PipelineTimeline
from ferrorpc.pipeline.stage import Piece
from ferrorpc.plans.timeline import Span

if TYPE_CHECKING:
    from ferrorpc.group import ProcessGroup

MICROBATCHES = 8
"""How many there are where nobody says."""


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
        clock: what recorded times are read from.

    Raises:
        UsageError: the schedule is not sound, does not admit these counts, or asks for other stages.
        CollectiveMismatchError: ranks have different schedules.
    """

    def __init__(
        self,
        stage: Any,
        group: ProcessGroup,
        schedule: str | Schedule = "1f1b",
        num_microbatches: int | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        stages = list(stage) if isinstance(stage, list | tuple) else [stage]
        self.schedule = _chosen(schedule, group.size, num_microbatches, len(stages))
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
        self._actions = self.schedule.with_messages().actions[group.rank]
        self._is_first = 0 in numbers
        self._is_last = self.schedule.virtual_stages - 1 in numbers
        self._name = _agreed(self.schedule, group)
        self._steps = 0
        self._spans: list[Span] = []
        self._peak = 0
        self._row_counts: list[int] | None = None
        self._awaits_backward = False

    @property
    def peak_activations(self) -> float:
        """The most activations this rank kept at once in its last step, in whole-rank microbatches."""
        return self._peak / len(self._pieces)

    def step(
        self,
        x: Any = None,
        target: Any = None,
        loss_fn: LossFunction | None = None,
        reduction: str = "mean",
        *,
        weight: Callable[[Any], float] | None = None,
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
            timeout: seconds to wait for any one message; None for the group's.

        Returns:
            The batch's loss on the rank of the last stage, None elsewhere.

        Raises:
            UsageError: the batch does not fit the schedule; nothing was sent.
            CollectiveTimeoutError: a message did not come in time.
            FerroError: whatever ended the generation. What a stage or loss_fn raises ends it, too, and is raised here.
        """
        ends = Training(split(x, self.schedule.microbatches, "x") if self._is_first else [])
        if self._is_last:
            if loss_fn is None:
                raise UsageError("the rank of the last stage needs loss_fn", hint="loss_fn(y, target) -> (loss, grad_y)")
            targets = split(target, self.schedule.microbatches, "target")
            ends.expect(targets, shares(targets, reduction, weight), loss_fn)
        self._begin(awaits_backward=False)
        self._run(self._actions, ends, True, timeout)
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
        self._run([each for each in self._actions if _is_forward(each)], ends, keeps, timeout)
        if not self._is_last:
            return None
        outputs = [ends.outputs[microbatch] for microbatch in sorted(ends.outputs)]
        joined = join(outputs, "the outputs")
        self._row_counts = [rows(each, "an output") for each in outputs]
        return joined

    def backward(self, outputs: Any = None, grads: Any = None, *, timeout: float | None = None) -> None:
        """The backward of the last `forward`. Every rank calls it.

        Args:
            outputs, grads: on the rank of the last stage, what `forward` returned and its gradient, of the same length.
                Gradients are taken as they are: those of the whole batch's loss.
            timeout: as in `step`.

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
                    raise UsageError(f"{what} must have the {sum(counts)} rows that forward returned")
            ends.grads = cut(grads, counts)
        self._awaits_backward = False
        self._run([each for each in self._actions if not _is_forward(each)], ends, True, timeout)

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
        return PipelineTimeline(moved, peaks, f"{self.schedule}, recorded")

    def _begin(self, awaits_backward: bool) -> None:
        """A new pass over the batch; what an earlier forward kept goes."""
        for piece in self._pieces.values():
            piece.forget()
        self._awaits_backward = awaits_backward
        self._spans, self._peak = [], 0
        self._steps += 1

    def _run(self, actions: Sequence[Action], ends: Ends, keeps: bool, timeout: float | None) -> None:
        seconds = seconds_of(timeout, self._group.timeout)
        receives = [each for each in actions if not each.kind.sends and not each.kind.computes]
        placement = self.schedule.placement
        exchange = Exchange(self._group, placement, receives, self._name, self._steps, seconds)
        execution = Execution(self._group.rank, self._pieces, placement, exchange, ends, self._clock, keeps)
        try:
            execution.run(actions)
        except Exception as error:
            self._group.abort(error)
            raise
        finally:
            self._spans += execution.spans
            self._peak = max(self._peak, execution.peak)

    def __repr__(self) -> str:
        pieces = ", ".join(str(number) for number in self._pieces)
        return f"<Pipeline {self.schedule}, rank {self._group.rank} with stage {pieces}>"


def _chosen(schedule: str | Schedule, size: int, microbatches: int | None, chunks: int) -> Schedule:
    """The schedule to run, sound and of this many ranks."""
    if isinstance(schedule, str):
        return named(schedule, size, MICROBATCHES if microbatches is None else microbatches, chunks)
    if schedule.stages != size:
        raise UsageError(f"{schedule} is for {schedule.stages} ranks, but the group has {size}")
    if microbatches not in (None, schedule.microbatches):
        raise UsageError(f"num_microbatches={microbatches}, but the schedule is {schedule}", hint="leave num_microbatches away")
    findings = schedule.validate()
    if findings:
        raise UsageError(f"{schedule} is not sound: " + "; ".join(str(each) for each in findings[:3]))
    return schedule


def _agreed(schedule: Schedule, group: ProcessGroup) -> str:
    """The pipeline's name in messages, the same on every rank because the schedule is."""
    text = schedule.to_text()
    agree(group, "pipeline schedules", f"{schedule}\n{text}")
    return f"{schedule} {hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _is_forward(each: Action) -> bool:
    return each.kind in (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD)


def _span(line: str, rank: int) -> Span:
    name, start, stop, shade = line.split()
    each = action(name)
    return Span(name, rank, float(start), float(stop), NAMES[each.kind], str(each.microbatch), int(shade))
