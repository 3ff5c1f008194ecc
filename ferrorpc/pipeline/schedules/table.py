"""The table of a schedule: every rank's actions in order, and what can be derived from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from ferrorpc.pipeline.actions import Action, Kind, action
from ferrorpc.pipeline.schedules import lowering
from ferrorpc.pipeline.schedules.edges import Edge, Edges


@dataclass(frozen=True)
class Table:
    """Every rank's actions.

    A pipeline of `stages` ranks holds a model that is cut into `virtual_stages` pieces, numbered from the input on. The pieces
    of one rank are its chunks. An action has the number of its piece (`Action.stage`) and of its microbatch.

    Attributes:
        name: what it is called.
        actions: of each rank, in order. Sends and receives are implied, unless they are among them.
        pairs: the edges between the pieces, as (from, to); None for a chain.
    """

    name: str
    actions: tuple[tuple[Action, ...], ...] = field(repr=False)
    pairs: tuple[Edge, ...] | None = None

    @classmethod
    def of(cls, name: str, rows: Iterable[Iterable[Action]]) -> Self:
        """The table with these actions, a row for each rank."""
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
        """How many microbatches there are."""
        return 1 + max((each.microbatch for row in self.actions for each in row), default=-1)

    @property
    def chunks(self) -> float:
        """Pieces of the model for each rank, on average."""
        return self.virtual_stages / self.stages if self.actions else 0.0

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank of each piece; -1 for a piece that no rank has."""
        ranks = {each.stage: rank for rank, row in enumerate(self.actions) for each in row}
        return tuple(ranks.get(stage, -1) for stage in range(self.virtual_stages))

    def pieces(self, rank: int) -> tuple[int, ...]:
        """The pieces of the model that a rank holds, in ascending order."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    @cached_property
    def edges(self) -> Edges:
        """Which piece's output goes to which."""
        return Edges(self.virtual_stages, self.pairs)

    def with_edges(self, pairs: Iterable[Edge]) -> Self:
        """The same order for a model that is not a chain.

        Args:
            pairs: all edges, as (from piece, to piece), from earlier to later ones. An order that is sound for a chain is
                sound for any such edges.

        Raises:
            UsageError: the edges do not connect all pieces of the model.
        """
        return replace(self, pairs=Edges(self.virtual_stages, pairs).pairs)

    @cached_property
    def is_split(self) -> bool:
        """Whether any backward is split into two actions."""
        return any(each.kind is Kind.BACKWARD_INPUT for row in self.actions for each in row)

    @cached_property
    def is_forward_first(self) -> bool:
        """Whether every rank does all its forwards before its first backward."""
        return all(_forward_first(row) for row in self.actions)

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """The most activations that each rank holds at once, in whole-rank microbatches."""
        return tuple(peak_of(row) / max(len(self.pieces(rank)), 1) for rank, row in enumerate(self.actions))

    def with_messages(self) -> Self:
        """The same with explicit messages: a receive before, and a send after, each action that needs one."""
        rows = lowering.with_messages(self.actions, self.placement, self.edges)
        return replace(self, actions=tuple(tuple(row) for row in rows))

    def to_text(self) -> str:
        """A line for each rank: its actions with spaces between them."""
        return "\n".join(" ".join(str(each) for each in row) for row in self.actions) + "\n"

    @classmethod
    def from_text(cls, text: str, name: str = "custom") -> Self:
        """Parses what `to_text` wrote. Empty lines at the end are ignored.

        Raises:
            UsageError: a word is not an action.
        """
        return cls.of(name, [[action(word) for word in line.split()] for line in text.rstrip().splitlines()])

    def __str__(self) -> str:
        chunks = f", {self.chunks:g} chunks each" if self.chunks != 1 else ""
        return f"{self.name}: {self.stages} stages{chunks}, {self.microbatches} microbatches"


def _forward_first(row: Sequence[Action]) -> bool:
    computed = [each.kind for each in row if each.kind.computes]
    return Kind.FORWARD not in computed[computed.count(Kind.FORWARD) :]


def peak_of(row: Sequence[Action]) -> int:
    """The most activations that a rank with these actions holds at once, counted in pieces."""
    live = highest = 0
    for each in row:
        if each.kind is Kind.FORWARD:
            live += 1
            highest = max(highest, live)
        elif each.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            live -= 1
    return highest
