"""Simulates a schedule: makespan, bubbles, and the peak of each rank's activations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, TypedDict

from ferrorpc.errors import UsageError
from ferrorpc.pipeline.actions import B, F, I, Kind, W
from ferrorpc.pipeline.schedules.lowering import KIND_LABELS, Lowering, has_messages
from ferrorpc.pipeline.schedules.table import Table
from ferrorpc.pipeline.schedules.validation import findings
from ferrorpc.plans import simulate as plans
from ferrorpc.plans.span import Span
from ferrorpc.plans.timeline import Timeline
from ferrorpc.types import number_of

Cost: TypeAlias = float | Sequence[float]
"""Time units of a whole rank, the same for all; or a list by rank, or by piece of the model."""


class PieceCosts(TypedDict):
    """Time units by piece of the model, as `schedule.simulate` takes them."""

    forward: list[float]
    backward_input: list[float]
    backward_weight: list[float]


class PipelineTimeline(Timeline):
    """What each rank of a pipeline did and when.

    Attributes:
        peak_activations: the most activations that each rank held at once, in whole-rank microbatches: an activation of one of
            v chunks counts as 1/v. It is held from its forward to the end of its backward, weights included.
        unit: of time, for pictures.
    """

    key = "numbers are microbatches"

    def __init__(
        self, schedule: Table, spans: Sequence[Span], peak_activations: Sequence[float], title: str, unit: str = "time units"
    ) -> None:
        super().__init__([_lane(rank, schedule.pieces(rank)) for rank in range(schedule.stages)], spans, title, unit)
        self.peak_activations = list(peak_activations)

    def summary(self) -> str:
        return f"{super().summary()}, peak {max(self.peak_activations, default=0.0):g} activations"

    def note(self, lane: int) -> str:
        return f"{super().note(lane)}, holds {self.peak_activations[lane]:g}"

    def costs(self, schedule: Table) -> PieceCosts:
        """The average cost of each piece of the model, as `schedule.simulate(**costs)` takes it.

        Compared with a simulation at these costs, a recorded run shows what its messages added. A whole backward counts half as
        the input's, half as the weights'.
        """
        lengths: dict[tuple[str, int], list[float]] = {}
        for span in self.spans:
            place = span.kind, schedule.pieces(span.lane)[span.shade]
            lengths.setdefault(place, []).append(span.stop - span.start)
        mean = {place: sum(found) / len(found) for place, found in lengths.items()}
        pieces = range(schedule.virtual_stages)
        halves = [mean.get((KIND_LABELS[Kind.BACKWARD], piece), 0.0) / 2 for piece in pieces]
        return {
            "forward": [mean.get((KIND_LABELS[Kind.FORWARD], piece), 0.0) for piece in pieces],
            "backward_input": [mean.get((KIND_LABELS[Kind.BACKWARD_INPUT], piece), halves[piece]) for piece in pieces],
            "backward_weight": [mean.get((KIND_LABELS[Kind.BACKWARD_WEIGHT], piece), halves[piece]) for piece in pieces],
        }


def simulate(table: Table, costs: Sequence[Cost], latency: float, transfer: float) -> PipelineTimeline:
    """As `Schedule.simulate`. `costs` are those of forward, backward of input and backward of weights."""
    found = findings(table)
    if found:
        said = "; ".join(str(each) for each in found[:3])
        raise UsageError(f"{table} is not sound: {said}", hint="its validate() lists all that is wrong with it")
    durations = durations_of(table, costs)
    latency, transfer = time_units(latency, "a latency"), time_units(transfer, "a transfer")
    rows = table.with_messages().actions
    program = Lowering(rows, table.placement, table.edges, durations, latency, transfer).program()
    spans = [span for span in plans.simulate(program).spans if span.kind != "message"]
    return PipelineTimeline(table, spans, table.peak_activations, f"{table}, simulated")


def durations_of(table: Table, costs: Sequence[Cost]) -> dict[tuple[Kind, int], float]:
    """(kind, piece) -> time units, of a whole backward the sum of its parts. `costs` as for `simulate`; raises as it does."""
    forward, backward_input, backward_weight = (_of_pieces(cost, table) for cost in costs)
    found = {}
    for piece in range(table.virtual_stages):
        found[F, piece], found[I, piece], found[W, piece] = forward[piece], backward_input[piece], backward_weight[piece]
        found[B, piece] = backward_input[piece] + backward_weight[piece]
    return found


def columns(table: Table) -> list[list[str]]:
    """The cells of its CSV (`Schedule.to_csv`), by row."""
    rows = [[str(each) for each in row] for row in table.actions]
    if has_messages(table.actions) or findings(table):
        return rows
    every = {(kind, stage): 1.0 for kind in Kind if kind.computes for stage in range(table.virtual_stages)}
    program = Lowering(table.with_messages().actions, table.placement, table.edges, every).program()
    cells: list[list[str]] = [[] for _ in rows]
    for span in sorted(plans.simulate(program).spans, key=lambda span: span.start):
        if span.kind != "message":
            row = cells[span.lane]
            row += [""] * (round(span.start) - len(row))
            row.append(span.name)
    return cells


def _lane(rank: int, pieces: Sequence[int]) -> str:
    return f"rank {rank}: stage{'s' * (len(pieces) > 1)} {', '.join(str(piece) for piece in pieces)}"


def _of_pieces(cost: Cost, table: Table) -> list[float]:
    """The cost of each piece of the model."""
    given: Any = cost
    costs = [time_units(each, "a cost") for each in (given if is_list(given) else [given] * table.stages)]
    if len(costs) == table.stages:
        held = [len(table.pieces(rank)) for rank in range(table.stages)]
        return [costs[rank] / held[rank] for rank in table.placement]
    if len(costs) == table.virtual_stages:
        return costs
    lengths = " or ".join(str(length) for length in sorted({table.stages, table.virtual_stages}))
    raise UsageError(f"a list of {len(costs)} costs for {table}", hint=f"give one number, or a list of {lengths}")


def is_list(cost: Any) -> bool:
    """Whether this is a list of costs, or an array of them, rather than one cost."""
    return isinstance(cost, Iterable) and not isinstance(cost, str) and getattr(cost, "ndim", 1) > 0


def time_units(value: Any, what: str) -> float:
    """A cost or a latency as a number. Raises UsageError if it is none, negative, or endless."""
    number = number_of(value)
    if not 0 <= number < math.inf:
        raise UsageError(f"{value!r} is no time, so it cannot be {what}", hint="give a number of time units, 0 or more")
    return number
