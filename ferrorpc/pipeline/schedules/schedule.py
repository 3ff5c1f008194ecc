"""A schedule: a table that is checked, simulated, drawn, and then run."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from ferrorpc.errors import UsageError
from ferrorpc.pipeline.actions import actions_of_cell
from ferrorpc.pipeline.schedules import simulation, validation
from ferrorpc.pipeline.schedules.simulation import Cost, PipelineTimeline
from ferrorpc.pipeline.schedules.table import Table
from ferrorpc.pipeline.schedules.validation import Finding
from ferrorpc.plans.timeline import SPANS_SHOWN_MOST


@dataclass(frozen=True)
class Schedule(Table):
    """What every rank does, action by action: checked, simulated and drawn before it is run."""

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

    def _repr_svg_(self) -> str | None:
        """What a notebook shows of a sound one: its simulation at equal costs."""
        if sum(map(len, self.actions)) > SPANS_SHOWN_MOST:
            return None
        try:
            return self.simulate()._repr_svg_()
        except UsageError:  # it is not sound
            return None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"

    def to_chrome_trace(self, path: str | Path) -> None:
        """Writes its simulation at equal costs for chrome://tracing and Perfetto, a time unit as a millisecond."""
        self.simulate().to_chrome_trace(path)

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
