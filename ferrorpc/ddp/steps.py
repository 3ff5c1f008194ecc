"""Measures where the time of training steps goes on this rank: computation, exposed and hidden communication.

A step lasts from the end of the one before to the end of its own wait for the means. Computation is what comes before the wait.
Communication is exposed during the wait, and hidden while any bucket is in flight before it. Cost: two clock readings for each
bucket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from ferrorpc.coordination.activity import Activity
from ferrorpc.errors import BackendUnavailableError
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import Clock
from ferrorpc.plans.span import Span
from ferrorpc.plans.timeline import Timeline
from ferrorpc.telemetry import telemetry

STEPS_KEPT: Final = 256
_PARTS: Final = ("computing", "communicating exposed", "hidden")


class StepTimes(NamedTuple):
    """Seconds of one step, or means of several."""

    compute_seconds: float
    exposed_seconds: float
    hidden_seconds: float


@dataclass(frozen=True, slots=True)
class Step:
    """One step on one rank. Times are the group's clock's.

    Attributes:
        began: the end of the step before; of the first step, when its reduction began.
        wait_began: when only the wait for the means was left.
        buckets: (bucket, start of its reduction, end of its reduction) for each.
    """

    number: int
    began: float
    wait_began: float
    ended: float
    buckets: tuple[tuple[int, float, float], ...]

    @property
    def times(self) -> StepTimes:
        """Its seconds by kind."""
        hidden, until = 0.0, self.began
        for _, started, ended in sorted(self.buckets, key=lambda bucket: bucket[1]):
            first, last = max(started, until), min(ended, self.wait_began)
            if first < last:
                hidden, until = hidden + last - first, last
        return StepTimes(self.wait_began - self.began, self.ended - self.wait_began, hidden)


class Steps:
    """This rank's last STEPS_KEPT steps. They are reported to the coordinator, for `ferrorpc status` to show slow ranks."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._telemetry = telemetry()
        self._kept: deque[Step] = deque(maxlen=STEPS_KEPT)
        """Loops take a copy: a thread that watches the training may look on while steps are added."""
        self._activity: Activity | None = None
        with suppress(BackendUnavailableError):  # raised if there is no coordinator
            self._activity = group.session.activity

    @property
    def last_end(self) -> float | None:
        """When the last step ended; None before that."""
        return self._kept[-1].ended if self._kept else None

    def waiting(self, clock: Clock) -> AbstractContextManager[None]:
        """A context for the wait for the means. The coordinator is told that this rank waits."""
        return nullcontext() if self._activity is None else self._activity.waiting(clock, in_training=True)

    def add(self, step: Step) -> None:
        """Adds a finished step."""
        self._kept.append(step)
        times = step.times
        if self._activity is not None:
            self._activity.stepped(*times)
        if self._telemetry is not None and step.number:  # of the very first one the beginning is unknown
            self._telemetry.stepped(*times)

    def __repr__(self) -> str:
        where, mean = f"rank {self._group.rank} of {self._group.size}", self.mean()
        if not any(step.number for step in list(self._kept)):
            return f"<Steps of {where}: {len(self)} kept, none after the first>"
        shown = (f"{seconds * 1000:.3g} ms {what}" for what, seconds in zip(_PARTS, mean, strict=True))
        return f"<Steps of {where}: {len(self)} kept, {', '.join(shown)} each>"

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Step:
        return self._kept[index]

    def mean(self) -> StepTimes:
        """The mean of the steps kept, without the very first one, whose beginning is unknown; zeros if there is none."""
        times = [step.times for step in list(self._kept) if step.number]
        if not times:
            return StepTimes(0.0, 0.0, 0.0)
        return StepTimes(*(sum(parts) / len(times) for parts in zip(*times, strict=True)))

    def by_rank(self) -> list[StepTimes]:
        """Every rank's `mean`, in rank order. The others wait for the rank that computes longest. Collective."""
        return [StepTimes(*map(float, each)) for each in self._group.all_gather(np.array(self.mean()))]

    def timeline(self) -> Timeline:
        """What this rank did: one lane for its own thread and one for each bucket, in seconds since the first step kept."""
        rank, kept = self._group.rank, list(self._kept)
        buckets = sorted({bucket for step in kept for bucket, _, _ in step.buckets})
        lanes = [f"rank {rank}", *(f"bucket {bucket} of rank {rank}" for bucket in buckets)]
        start = kept[0].began if kept else 0.0
        spans = [span for step in kept for span in _spans(step, start, buckets)]
        return Timeline(lanes, spans, f"rank {rank}: training steps", "seconds")

    def to_chrome_trace(self, path: str | Path) -> None:
        """Writes the timeline as a Chrome trace: JSON for chrome://tracing and ui.perfetto.dev."""
        self.timeline().to_chrome_trace(path)


def _spans(step: Step, start: float, buckets: Sequence[int]) -> list[Span]:
    own = [
        Span(f"compute {step.number}", 0, step.began - start, step.wait_began - start, "compute"),
        Span(f"wait {step.number}", 0, step.wait_began - start, step.ended - start, "exposed"),
    ]
    reductions = [
        Span(f"mean {step.number}", 1 + buckets.index(bucket), started - start, ended - start, "communication")
        for bucket, started, ended in step.buckets
    ]
    return own + reductions
