"""A timeline: what each lane did and when, simulated or recorded, with its figures and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Final

from ferrorpc.errors import UsageError
from ferrorpc.plans import chrome_trace, png, svg
from ferrorpc.plans.drawing import Panel, Row
from ferrorpc.plans.span import Span

SPANS_SHOWN_MOST: Final = 4096
"""The largest timeline that a notebook draws by itself."""


class Timeline:
    """Spans on lanes.

    Args:
        lanes: their names.
        spans: those of one lane do not overlap.
        title, unit: for pictures; `unit` is that of time.
    """

    key = ""
    """The key to the words in boxes, for pictures."""

    def __init__(self, lanes: Sequence[str], spans: Sequence[Span], title: str = "", unit: str = "time units") -> None:
        self.lanes = tuple(lanes)
        self.spans = tuple(spans)
        self.title = title
        self.unit = unit

    @cached_property
    def start(self) -> float:
        """When the first span begins; 0 where there is none."""
        return min((span.start for span in self.spans), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """From the first span's begin to the last one's end, in time units."""
        return max((span.stop for span in self.spans), default=0.0) - self.start

    @cached_property
    def busy(self) -> list[float]:
        """Time units each lane works."""
        busy = [0.0] * len(self.lanes)
        for span in self.spans:
            busy[span.lane] += span.stop - span.start
        return busy

    @property
    def bubbles(self) -> list[float]:
        """Share of the makespan that each lane is idle, 0 to 1."""
        return [1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy]

    @property
    def bubble_fraction(self) -> float:
        """Share of all lanes' time that is idle, 0 to 1."""
        return sum(self.bubbles) / len(self.lanes) if self.lanes else 0.0

    def summary(self) -> str:
        """One line of figures, shown above pictures."""
        return f"makespan {self.makespan:.6g}, bubble {self.bubble_fraction:.1%}"

    def note(self, lane: int) -> str:
        """The note at the end of a lane in pictures."""
        return f"idle {self.bubbles[lane]:.0%}"

    def to_svg(self, path: str | Path, beside: Timeline | None = None) -> None:
        """Draws it into an SVG file, with `beside` below it on the same scale of time, in the same unit."""
        Path(path).write_text(svg.render(self._panels(beside)), encoding="utf-8")

    def to_png(self, path: str | Path, beside: Timeline | None = None) -> None:
        """Draws it into a PNG file, as `to_svg`.

        Raises:
            BackendUnavailableError: matplotlib is not installed.
        """
        png.render(self._panels(beside), Path(path))

    def to_chrome_trace(self, path: str | Path, unit_seconds: float | None = None) -> None:
        """Writes it for chrome://tracing and Perfetto: a process, a thread for each lane.

        Args:
            unit_seconds: how long a time unit of this timeline is shown to last; None: a second where its unit is seconds, as
                of what was recorded, otherwise a millisecond.
        """
        if unit_seconds is None:
            unit_seconds = 1.0 if self.unit == "seconds" else 1e-3
        text = chrome_trace.render(self.title or "timeline", self.lanes, self.spans, self.start, unit_seconds)
        Path(path).write_text(text, encoding="utf-8")

    def panel(self) -> Panel:
        """The panel for pictures."""
        spans: list[list[Span]] = [[] for _ in self.lanes]
        for span in sorted(self.spans, key=lambda span: span.start):
            spans[span.lane].append(replace(span, start=span.start - self.start, stop=span.stop - self.start))
        rows = tuple(Row(name, tuple(spans[lane]), self.note(lane)) for lane, name in enumerate(self.lanes))
        return Panel(self.title, self.summary(), rows, self.makespan, self.key, self.unit)

    def _panels(self, beside: Timeline | None) -> list[Panel]:
        if beside is None:
            return [self.panel()]
        if not isinstance(beside, Timeline):
            raise UsageError(f"beside={beside!r} is no timeline", hint="pass one, such as schedule.simulate() returns")
        return [self.panel(), replace(beside.panel(), unit=self.unit)]

    def _repr_svg_(self) -> str | None:
        """The picture for notebooks; None, so that they show the text, where it would be too large."""
        return svg.render(self._panels(None)) if len(self.spans) <= SPANS_SHOWN_MOST else None

    def __repr__(self) -> str:
        title = f" {self.title}:" if self.title else ""
        return f"<{type(self).__name__}{title} {len(self.lanes)} lanes, {self.summary()}>"
