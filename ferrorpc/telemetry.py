"""Who is told of operations: OpenTelemetry, through its API (FERRORPC_OTEL=1), and a trace file (FERRORPC_TRACE_DIR).

Of OpenTelemetry only the API is used: where they go is what the program, or `opentelemetry-instrument`, set up. Names are few
and stable: they can be grouped; what is peculiar to one call is in its attributes. Switched off (the default) it costs one
comparison.

    span       "ferrorpc all_reduce"              rank in group and world, size, generation, the call in full
    histogram  ferrorpc.operation.duration, s     by operation and whether it went well
    histogram  ferrorpc.step.duration, s          of training steps, by part: compute, exposed and hidden communication
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

from ferrorpc.errors import BackendUnavailableError
from ferrorpc.trace import TraceFile

SECONDS: Final = "s"


class Observer(Protocol):
    """What is told of operations and training steps."""

    def begin(self, label: str, attributes: Mapping[str, Any]) -> Any:
        """An operation begins; what is returned is its span."""

    def end(self, span: Any, label: str, seconds: float, failure: str = "") -> None:
        """It is over; `failure` is the name of its error's class."""

    def stepped(self, compute_seconds: float, exposed_seconds: float, hidden_seconds: float) -> None:
        """A training step is over."""


class Both:
    """Two who are told the same."""

    def __init__(self, first: Observer, second: Observer) -> None:
        self._observers = first, second

    def begin(self, label: str, attributes: Mapping[str, Any]) -> list[Any]:
        """The span of each."""
        return [observer.begin(label, attributes) for observer in self._observers]

    def end(self, span: list[Any], label: str, seconds: float, failure: str = "") -> None:
        """As for one."""
        for observer, own in zip(self._observers, span, strict=True):
            observer.end(own, label, seconds, failure)

    def stepped(self, compute_seconds: float, exposed_seconds: float, hidden_seconds: float) -> None:
        """As for one."""
        for observer in self._observers:
            observer.stepped(compute_seconds, exposed_seconds, hidden_seconds)


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


_telemetry: Observer | None = None
_trace: TraceFile | None = None


def set_up_telemetry(config: Mapping[str, Any]) -> None:
    """On or off, as the settings `otel` and `trace_dir` say. Groups ask when they are made.

    Raises:
        BackendUnavailableError: OpenTelemetry's API is not installed.
        ConfigError: no trace can be written there.
    """
    global _telemetry, _trace
    told = Telemetry() if config["otel"] else None
    directory = config["trace_dir"]
    if _trace is not None and not _trace.goes_to(directory):
        _trace.close()
        _trace = None
    if directory is not None and _trace is None:
        _trace = TraceFile(directory)
    _telemetry = Both(told, _trace) if told is not None and _trace is not None else told or _trace


def telemetry() -> Observer | None:
    """What to tell; None where nobody asked for it."""
    return _telemetry
