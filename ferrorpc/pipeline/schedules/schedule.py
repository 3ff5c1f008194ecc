"""A schedule: what every rank of a pipeline does, action by action. It is a value: checked, simulated, drawn, and then run."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from ferrorpc.pipeline.actions import Action, Kind, action, actions_of_cell
from ferrorpc.pipeline.schedules import lowering, simulation, validation
from ferrorpc.pipeline.schedules.edges import Edge, Edges
from ferrorpc.pipeline.schedules.simulation import Cost, PipelineTimeline
from ferrorpc.pipeline.schedules.validation import Finding


@dataclass(frozen=True)
class Schedule:
    """What every rank does.

    A pipeline of `stages` ranks holds a model that is cut into `virtual_stages` pieces, numbered from the input on; where a
    rank holds several of them, they are its chunks. Actions name the piece and the microbatch they are about.

    Attributes:
        name: what it is called.
        actions: of each rank, in the order in which it does them. Messages are implied, unless they are among them.
        pairs: the edges between the pieces, as (from, to); None for a chain.
    """

    name: str
    actions: tuple[tuple[Action, ...], ...] = field(repr=False)
    pairs: tuple[Edge, ...] | None = None

    @classmethod
    def of(cls, name: str, rows: Iterable[Iterable[Action]]) -> Schedule:
        """The schedule with these actions, a row for each rank."""
        return cls(name, tuple(tuple(row) for row in rows))

    @property
    def stages(self) -> int:
        """How many ranks there are."""
        return len(self.actions)

    @cached_property
    def virtual_stages(self) -> int:
        """How many pieces the model is cut into."""
        return 1 + max((each.stage for row in self.actions for each in row), default=-1)

    @cached_property
    def microbatches(self) -> int:
        """How many there are."""
        return 1 + max((each.microbatch for row in self.actions for each in row), default=-1)

    @property
    def chunks(self) -> float:
        """Pieces of the model for each rank, on average."""
        return self.virtual_stages / self.stages if self.actions else 0.0

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank of each piece; -1 for a piece that none has."""
        ranks = {each.stage: rank for rank, row in enumerate(self.actions) for each in row}
        return tuple(ranks.get(stage, -1) for stage in range(self.virtual_stages))

    def pieces(self, rank: int) -> tuple[int, ...]:
        """The pieces of the model that a rank holds, in ascending order."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    @cached_property
    def edges(self) -> Edges:
        """Whose output goes to whom."""
        return Edges(self.virtual_stages, self.pairs)

    def with_edges(self, pairs: Iterable[Edge]) -> Schedule:
        """The same order for a model that is no chain.

        Args:
            pairs: all edges, as (from piece, to piece), from earlier to later ones. Whatever order is sound for a chain is
                sound for any such edges.

        Raises:
            UsageError: they are no edges of such a model.
        """
        return replace(self, pairs=Edges(self.virtual_stages, pairs).pairs)

    @cached_property
    def is_split(self) -> bool:
        """Whether some backward is in two actions."""
        return any(each.kind is Kind.BACKWARD_INPUT for row in self.actions for each in row)

    @cached_property
    def is_forward_first(self) -> bool:
        """Whether every rank does all its forwards before its first backward."""
        return all(_forward_first(row) for row in self.actions)

    # Checking, simulating, drawing.

    def validate(self, *, credits: int | None = None, peak: float | None = None) -> list[Finding]:
        """What is wrong with it; empty when it is sound: whoever runs it comes to the end, with every gradient.

        Args:
            credits: how many messages may be under way from one rank to another before a send blocks; None for any number, as
                the runtime sends.
            peak: how many activations a rank may hold at once, in whole-rank microbatches; None for any number.
        """
        return validation.findings(self, credits, peak)

    def simulate(
        self,
        forward: Cost = 1.0,
        backward_input: Cost = 1.0,
        backward_weight: Cost = 1.0,
        latency: float = 0.0,
        *,
        transfer: float = 0.0,
    ) -> PipelineTimeline:
        """When everything happens, at these costs in time units of the caller's choice.

        Args:
            forward, backward_input, backward_weight: of a whole rank and one microbatch, split evenly over its chunks: a
                number, or a list with one for each rank, or one for each piece of the model (then nothing is split). A whole
                backward costs the sum of its two.
            latency: of a message between two ranks.
            transfer: for how long a message occupies the way from its rank to the other, where messages queue.

        Raises:
            UsageError: it is not sound (the findings are in the message), or a list has another length.
        """
        return simulation.simulate(self, (forward, backward_input, backward_weight), latency, transfer)

    def to_svg(self, path: str | Path) -> None:
        """Draws its simulation at equal costs into an SVG file."""
        self.simulate().to_svg(path)

    def to_chrome_trace(self, path: str | Path) -> None:
        """Writes its simulation at equal costs for chrome://tracing and Perfetto, a time unit as a millisecond."""
        self.simulate().to_chrome_trace(path)

    def with_messages(self) -> Schedule:
        """The same with every message spelled out: receives before, sends after the actions they belong to."""
        rows = lowering.with_messages(self.actions, self.placement, self.edges)
        return replace(self, actions=tuple(tuple(row) for row in rows))

    # Texts. A line, or a row of cells, is a rank.

    def to_text(self) -> str:
        """A line for each rank: its actions with spaces between them."""
        return "\n".join(" ".join(str(each) for each in row) for row in self.actions) + "\n"

    @classmethod
    def from_text(cls, text: str, name: str = "custom") -> Schedule:
        """Reads what `to_text` wrote. Empty lines at the end do not count.

        Raises:
            UsageError: something in it is no action.
        """
        return cls.of(name, [[action(word) for word in line.split()] for line in text.rstrip().splitlines()])

    def to_csv(self, path: str | Path | None = None) -> str:
        """The CSV that torch.distributed.pipelining reads as `compute_only` (or, with messages in it, `compute_comms`).

        A row is a rank. A sound schedule without messages gets empty cells where a rank waits if every action takes one
        column, so that columns are moments.

        Args:
            path: where to write it, too.
        """
        lines = io.StringIO()
        csv.writer(lines).writerows(simulation.columns(self))
        if path is not None:
            Path(path).write_text(lines.getvalue(), encoding="utf-8")
        return lines.getvalue()

    @classmethod
    def from_csv(cls, source: str | Path, name: str = "custom") -> Schedule:
        """Reads such a CSV, torch's included; overlapped pairs are put one after the other.

        Args:
            source: a path, or the text itself where it is a str with a line break or a comma in it.

        Raises:
            UsageError: a cell is no action of a pipeline.
        """
        is_text = isinstance(source, str) and ("\n" in source or "," in source)
        text = str(source) if is_text else Path(source).read_text(encoding="utf-8")
        rows = csv.reader(io.StringIO(text))
        return cls.of(name, [[each for cell in row for each in actions_of_cell(cell)] for row in rows])

    def __str__(self) -> str:
        chunks = f", {self.chunks:g} chunks each" if self.chunks != 1 else ""
        return f"{self.name}: {self.stages} stages{chunks}, {self.microbatches} microbatches"


def _forward_first(row: Sequence[Action]) -> bool:
    computed = [each.kind for each in row if each.kind.computes]
    forwards = sum(1 for kind in computed if kind is Kind.FORWARD)
    return all(kind is Kind.FORWARD for kind in computed[:forwards])
