"""Spans and durations of operations through OpenTelemetry's API, for a process that is told so (FERRORPC_OTEL=1).

Only the API is used: where they go is what the program, or `opentelemetry-instrument`, set up. Names are few and stable: they
can be grouped; what is peculiar to one call is in its attributes. Switched off (the default) it costs one comparison.

    span       "ferrorpc all_reduce"              rank, size, generation of the group, and the operation in full
    histogram  ferrorpc.operation.duration, s     by operation and whether it went well
    histogram  ferrorpc.step.duration, s          of training steps, by part: compute, exposed and hidden communication
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ferrorpc.errors import BackendUnavailableError

SECONDS: Final = "s"


class Telemetry:
    """What OpenTelemetry is told through. Raises BackendUnavailableError where its API is not installed."""

    def __init__(self) -> None:
        try:
            from opentelemetry import metrics, trace
        except ModuleNotFoundError:
            raise BackendUnavailableError(
                "FERRORPC_OTEL is set, but OpenTelemetry's API is not installed", hint="pip install 'ferrorpc[otel]'"
            ) from None
        meter = metrics.get_meter("ferrorpc")
        self._tracer = trace.get_tracer("ferrorpc")
        self._error = trace.Status(trace.StatusCode.ERROR)
        self._operations = meter.create_histogram("ferrorpc.operation.duration", SECONDS, "from an operation's call to its end")
        self._steps = meter.create_histogram("ferrorpc.step.duration", SECONDS, "parts of training steps")

    def begin(self, label: str, attributes: Mapping[str, Any]) -> Any:
        """The span of an operation that begins now, a child of the caller's."""
        name = f"ferrorpc {operation_of(label)}"
        return self._tracer.start_span(name, attributes={"ferrorpc.operation": label, **attributes})

    def end(self, span: Any, label: str, seconds: float, failure: str = "") -> None:
        """The operation is over; `failure` is the name of its error's class."""
        if failure:
            span.set_status(self._error)
            span.set_attribute("error.type", failure)
        span.end()
        self._operations.record(seconds, {"ferrorpc.operation": operation_of(label), "error.type": failure or "none"})

    def stepped(self, compute_seconds: float, exposed_seconds: float, hidden_seconds: float) -> None:
        """A training step is over."""
        for part, seconds in (("compute", compute_seconds), ("exposed", exposed_seconds), ("hidden", hidden_seconds)):
            self._steps.record(seconds, {"ferrorpc.part": part})


def operation_of(label: str) -> str:
    """ "all_reduce" of "all_reduce(float32[4], sum) #7"."""
    return label.partition("(")[0].partition(" ")[0]


_telemetry: Telemetry | None = None


def set_up_telemetry(config: Mapping[str, Any]) -> None:
    """On or off, as the setting `otel` says. Groups ask when they are made."""
    global _telemetry
    _telemetry = Telemetry() if config["otel"] else None


def telemetry() -> Telemetry | None:
    """What to tell; None where nobody asked for it."""
    return _telemetry
