"""Reports operations and training steps to OpenTelemetry (FERRORPC_OTEL=1) and to a trace file (FERRORPC_TRACE_DIR).

Of OpenTelemetry only the API is used: the program, or `opentelemetry-instrument`, sets up the exporter. Names of spans are few
and stable, so that they can be grouped; the details of a call are attributes. If it is off (the default), it costs one
comparison for each operation.

    span       "ferrorpc all_reduce"              rank in group and world, size, generation, the call in full
    histogram  ferrorpc.operation.duration, s     by operation and class of error
    histogram  ferrorpc.step.duration, s          of training steps, by part: compute, exposed and hidden communication
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from ferrorpc.errors import BackendUnavailableError
from ferrorpc.logs import tell
from ferrorpc.trace import TraceFile, operation_of

_log = logging.getLogger("ferrorpc.telemetry")

_SECONDS: Final = [float(f"{digits}e{exponent}") for exponent in range(-6, 3) for digits in (1, 2.5, 5)]
"""Bounds of the histograms' buckets, from a microsecond to minutes. Those of OpenTelemetry begin at 5, for milliseconds."""


class Observer(Protocol):
    """Receives operations and training steps."""

    def begin(self, label: str, attributes: Mapping[str, Any]) -> Any:
        """An operation begins. Returns its span."""

    def end(self, span: Any, label: str, seconds: float, failure: str) -> None:
        """The operation has ended; `failure` is the name of its error's class."""

    def stepped(self, compute_seconds: float, exposed_seconds: float, hidden_seconds: float) -> None:
        """A training step has ended."""


_failed: set[type[Observer]] = set()
"""Kinds of observers that have raised something in this process."""


class Observers:
    """Passes everything to all of several observers. What one of them raises is logged its first time in a process, and never
    an operation's error: the ranks would no longer agree on which operation is next."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def begin(self, label: str, attributes: Mapping[str, Any]) -> list[Any]:
        """Returns the span of each, None of one that failed."""
        return [self._told(observer, observer.begin, label, attributes) for observer in self._observers]

    def end(self, span: list[Any], label: str, seconds: float, failure: str) -> None:
        """As `Observer`."""
        for observer, own in zip(self._observers, span, strict=True):
            if own is not None:
                self._told(observer, observer.end, own, label, seconds, failure)

    def stepped(self, compute_seconds: float, exposed_seconds: float, hidden_seconds: float) -> None:
        """As `Observer`."""
        for observer in self._observers:
            self._told(observer, observer.stepped, compute_seconds, exposed_seconds, hidden_seconds)

    def _told(self, observer: Observer, call: Callable[..., Any], *what: Any) -> Any:
        try:
            return call(*what)
        except Exception:  # noqa: BLE001  span processors and exporters are the program's, and may raise anything
            if type(observer) not in _failed:
                _failed.add(type(observer))
                text = "telemetry failed, and its later errors are not logged; operations go on without it"
                tell(_log, logging.ERROR, text, traceback_too=True)
            return None


class OpenTelemetryObserver:
    """Reports to OpenTelemetry. Raises BackendUnavailableError if its API is not installed."""

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
        self._operations = meter.create_histogram(
            "ferrorpc.operation.duration",
            "s",
            "from an operation's call to its end",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._steps = meter.create_histogram(
            "ferrorpc.step.duration", "s", "parts of training steps", explicit_bucket_boundaries_advisory=_SECONDS
        )

    def begin(self, label: str, attributes: Mapping[str, Any]) -> Any:
        """Starts the span of an operation, as a child of the caller's span."""
        name = f"ferrorpc {operation_of(label)}"
        return self._tracer.start_span(name, attributes={"ferrorpc.operation": label, **attributes})

    def end(self, span: Any, label: str, seconds: float, failure: str) -> None:
        """The operation has ended; `failure` is the name of its error's class."""
        if failure:
            span.set_status(self._error)
            span.set_attribute("error.type", failure)
        span.end()
        self._operations.record(seconds, {"ferrorpc.operation": operation_of(label), "error.type": failure or "none"})

    def stepped(self, compute_seconds: float, exposed_seconds: float, hidden_seconds: float) -> None:
        """A training step has ended."""
        for part, seconds in (("compute", compute_seconds), ("exposed", exposed_seconds), ("hidden", hidden_seconds)):
            self._steps.record(seconds, {"ferrorpc.part": part})


_telemetry: Observer | None = None
_trace: TraceFile | None = None


def set_up_telemetry(config: Mapping[str, Any]) -> None:
    """Switches it on or off, as the settings `otel` and `trace_dir` say. This applies to groups that are made later.

    Raises:
        BackendUnavailableError: OpenTelemetry's API is not installed.
        ConfigError: no trace file can be written in `trace_dir`.
    """
    global _telemetry, _trace
    otel = OpenTelemetryObserver() if config["otel"] else None
    directory = config["trace_dir"]
    if _trace is not None and not _trace.writes_to(directory):
        _trace.close()
        _trace = None
    if directory is not None and _trace is None:
        _trace = TraceFile(directory)
    observers = [each for each in (otel, _trace) if each is not None]
    _telemetry = Observers(*observers) if observers else None


def telemetry() -> Observer | None:
    """The current observer; None if none is switched on."""
    return _telemetry
