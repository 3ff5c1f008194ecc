"""Schedule: a table of actions that can be validated, simulated, drawn, read and written."""

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
    """Every rank's actions in order. A schedule is a value: validated, simulated and drawn before it is run."""

    def validate(self, *, credits: int | None = None, peak: float | None = None) -> list[Finding]:
        """What is wrong with it. An empty list means that it is sound: it runs to the end and computes every gradient.

        Args:
            credits: how many messages may be in flight from one rank to another before a send blocks; None for any number,
                which is how `Pipeline` sends.
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
        """When every action runs, at these costs, in time units of the caller's choice.

        Args:
            forward, backward_input, backward_weight: the cost for one microbatch. A number, or a list with a number for each
                rank, is the cost of a whole rank, and is split evenly over its chunks; a list with a number for each piece of
                the model is not split. A whole backward costs the sum of its two parts.
            latency: of a message between two ranks.
            transfer: how long a message occupies the link between the two ranks, where messages queue.

        Raises:
            UsageError: the schedule is not sound (the message says why), or a list has another length.
        """
        return simulation.simulate(self, (forward, backward_input, backward_weight), latency, transfer)

    def to_svg(self, path: str | Path) -> None:
        """Draws its simulation at equal costs as an SVG file."""
        self.simulate().to_svg(path)

    def _repr_svg_(self) -> str | None:
        """What a notebook shows: the simulation at equal costs, if the schedule is sound and not too long."""
        if sum(map(len, self.actions)) > SPANS_SHOWN_MOST:
            return None
        try:
            return self.simulate()._repr_svg_()
        except UsageError:  # not sound
            return None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"

    def to_chrome_trace(self, path: str | Path) -> None:
        """Writes its simulation at equal costs for chrome://tracing and Perfetto; a time unit is shown as a millisecond."""
        self.simulate().to_chrome_trace(path)

    def to_csv(self, path: str | Path | None = None) -> str:
        """The CSV that torch.distributed.pipelining reads as `compute_only` (or `compute_comms` if messages are explicit).

        A row is a rank. In a sound schedule without explicit messages every action takes one column, and cells are empty where
        a rank waits, so that columns are moments.

        Args:
            path: a file to write the text to.
        """
        lines = io.StringIO()
        csv.writer(lines).writerows(simulation.columns(self))
        if path is not None:
            Path(path).write_text(lines.getvalue(), encoding="utf-8")
        return lines.getvalue()

    @classmethod
    def from_csv(cls, source: str | Path, name: str = "custom") -> Schedule:
        """Reads such a CSV, also one that torch wrote. Actions that overlap in torch's are put one after the other.
        Empty lines at the end are ignored.

        Args:
            source: a path; or the text itself, if it is a str with a line break or a comma in it.

        Raises:
            UsageError: it is no CSV in UTF-8, or a cell is not an action.
            OSError: the file cannot be read.
        """
        is_text = isinstance(source, str) and ("\n" in source or "," in source)
        try:
            text = str(source) if is_text else Path(source).read_text(encoding="utf-8")
            cells = csv.reader(io.StringIO(text.removeprefix("\ufeff")))  # a mark that spreadsheets write
            rows = [[each for cell in row for each in actions_of_cell(cell)] for row in cells]
        except UsageError as error:
            raise UsageError(f"{'' if is_text else f'{source}: '}{error.message}", hint=error.hint) from None
        except (UnicodeDecodeError, csv.Error) as error:
            what = "the text" if is_text else source
            raise UsageError(f"{what} is no CSV in UTF-8: {error}", hint="give what to_csv() wrote") from None
        while rows and not rows[-1]:
            rows.pop()
        return cls.of(name, rows)
