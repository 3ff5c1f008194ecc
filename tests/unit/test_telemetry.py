"""What OpenTelemetry is told, as its own SDK receives it."""

import json
import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

import ferrorpc
from ferrorpc.errors import BackendUnavailableError, LimitExceededError
from ferrorpc.telemetry import Observers, OpenTelemetryObserver, set_up_telemetry, telemetry
from ferrorpc.testing import run_world
from ferrorpc.trace import operation_of

pytest.importorskip("opentelemetry.sdk")
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


@pytest.fixture(scope="module")
def sdk():
    """The program's part: it is set up once in a process."""
    spans, durations = InMemorySpanExporter(), InMemoryMetricReader()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider([durations]))
    return spans, durations


@pytest.fixture
def told(sdk, monkeypatch):
    """Spans and durations of one test; switched off after it."""
    monkeypatch.setattr("ferrorpc.telemetry._failed", set())
    spans, durations = sdk
    spans.clear()
    set_up_telemetry({"otel": True, "trace_dir": None})
    yield spans, durations
    set_up_telemetry({"otel": False, "trace_dir": None})


def counts(durations, name):
    """How many were recorded of a histogram, by its attributes' values."""
    return {values: point.count for values, point in points(durations, name).items()}


def sums(durations, name):
    """What was recorded of a histogram in all, by its attributes' values."""
    return {values: point.sum for values, point in points(durations, name).items()}


def points(durations, name):
    data = durations.get_metrics_data()
    scopes = data.resource_metrics[0].scope_metrics if data is not None and data.resource_metrics else []
    found = [metric for scope in scopes if scope.scope.name == "ferrorpc" for metric in scope.metrics if metric.name == name]
    return {tuple(point.attributes.values()): point for metric in found for point in metric.data.data_points}


def test_every_operation_is_a_span_with_its_rank_and_a_duration(told):
    spans, durations = told

    def work(group):
        group.all_reduce(np.ones(4, np.float32))
        group.broadcast(np.ones(2), root=0, async_op=True).wait()
        if group.rank == 0:
            group.send(np.ones(1), 1, async_op=True).wait()
        else:
            group.recv(0)

    before = counts(durations, "ferrorpc.operation.duration")
    run_world(2, work)
    seen = {(span.name, span.attributes["ferrorpc.rank"]) for span in spans.get_finished_spans()}
    pairs = {(f"ferrorpc {name}", rank) for name in ("all_reduce", "broadcast") for rank in (0, 1)}
    assert pairs | {("ferrorpc send", 0), ("ferrorpc recv", 1)} <= seen
    one = next(span for span in spans.get_finished_spans() if span.name == "ferrorpc all_reduce")
    assert one.attributes["ferrorpc.size"] == 2
    assert one.attributes["ferrorpc.generation"] == 1
    assert "float32" in one.attributes["ferrorpc.operation"]
    assert one.status.is_ok
    assert one.end_time >= one.start_time
    after = counts(durations, "ferrorpc.operation.duration")
    assert after["all_reduce", "none"] - before.get(("all_reduce", "none"), 0) == 2


def test_an_operation_is_a_child_of_the_span_it_is_called_in(told):
    spans, _ = told
    tracer = trace.get_tracer("program")

    def work(group):
        with tracer.start_as_current_span(f"step of rank {group.rank}"):
            group.all_reduce(np.ones(4))

    run_world(2, work)
    finished = spans.get_finished_spans()
    steps = {span.context.span_id for span in finished if span.name.startswith("step")}
    assert {span.parent.span_id for span in finished if span.name == "ferrorpc all_reduce"} == steps


def test_a_failed_operation_says_what_it_failed_with(told):
    spans, durations = told

    def work(group):
        with pytest.raises(ferrorpc.CollectiveMismatchError):
            group.all_reduce(np.ones(4 + group.rank))

    run_world(2, work)
    failed = [span for span in spans.get_finished_spans() if not span.status.is_ok]
    assert {span.attributes["error.type"] for span in failed} == {"CollectiveMismatchError"}
    assert counts(durations, "ferrorpc.operation.duration")["all_reduce", "CollectiveMismatchError"] >= 2


def test_an_operation_for_which_no_thread_was_to_be_had_is_a_failed_span(told, monkeypatch):
    spans, _ = told
    backend = ferrorpc.SimulatedBackend.create_group(2)[0]

    def refused(execution, convert):
        raise LimitExceededError("the system refuses a thread")

    monkeypatch.setattr(backend, "submit", refused)
    with pytest.raises(LimitExceededError):
        ferrorpc.ProcessGroup(backend).all_reduce(np.ones(3), async_op=True)
    (span,) = spans.get_finished_spans()
    assert span.attributes["error.type"] == "LimitExceededError"


def test_what_an_operation_failed_with_is_told_to_both_who_want_it(told, tmp_path):
    spans, _ = told
    set_up_telemetry({"otel": True, "trace_dir": str(tmp_path)})
    both = telemetry()
    both.end(both.begin("barrier() #1", {"ferrorpc.world_rank": 3}), "barrier() #1", 0.5, "PeerLostError")
    set_up_telemetry({"otel": True, "trace_dir": None})
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())[-1]["args"] == {"error": "PeerLostError"}
    assert spans.get_finished_spans()[-1].attributes["error.type"] == "PeerLostError"


class Failing(SimpleSpanProcessor):
    """Fails on rank 0, where `place` of a span is."""

    def __init__(self, place):
        super().__init__(InMemorySpanExporter())
        self.place = place

    def fail(self, place, span):
        if place == self.place and span.attributes["ferrorpc.rank"] == 0:
            raise RuntimeError("the exporter is gone")

    def on_start(self, span, parent_context=None):
        self.fail("start", span)

    def on_end(self, span):
        self.fail("end", span)


@pytest.mark.parametrize("place", ["start", "end"])
@pytest.mark.parametrize("async_op", [False, True])
def test_telemetry_that_fails_on_one_rank_disturbs_no_operation(told, monkeypatch, caplog, place, async_op):
    monkeypatch.setattr(trace.get_tracer_provider()._active_span_processor, "_span_processors", (Failing(place),))

    def work(group):
        for _ in range(3):
            found = group.all_reduce(np.ones(2), async_op=async_op)
            assert (found.wait() if async_op else found).tolist() == [2.0, 2.0]
        with pytest.raises(ferrorpc.CollectiveMismatchError):
            group.all_reduce(np.ones(4 + group.rank))

    run_world(2, work)
    (logged,) = [line for line in caplog.records if line.name.startswith("ferrorpc")]
    assert logged.message.startswith("telemetry failed")
    assert "the exporter is gone" in logged.exc_text


def test_what_an_observer_raises_is_logged_once_in_a_process_and_for_each_kind_of_observer(monkeypatch, caplog):
    class Other(OpenTelemetryObserver):
        pass

    monkeypatch.setattr("ferrorpc.telemetry._failed", set(), raising=False)
    monkeypatch.setattr(OpenTelemetryObserver, "stepped", lambda *_: 1 / 0)
    for _ in range(3):
        Observers(OpenTelemetryObserver(), Other()).stepped(1.0, 0.25, 0.5)
    assert [line.exc_info[0] for line in caplog.records] == [ZeroDivisionError] * 2


def test_training_steps_are_told_by_part(told):
    _, durations = told

    def work(group):
        sync = ferrorpc.GradientSynchronizer({"w": np.zeros(8, np.float32)}, group)
        for _ in range(2):
            with sync.step() as step:
                step.ready("w", np.ones(8, np.float32))

    run_world(2, work)
    assert set(counts(durations, "ferrorpc.step.duration")) == {("compute",), ("exposed",), ("hidden",)}


@pytest.mark.parametrize("name", ["ferrorpc.operation.duration", "ferrorpc.step.duration"])
def test_buckets_tell_microseconds_from_milliseconds_and_seconds(told, name):
    _, durations = told
    telemetry().end(telemetry().begin("barrier() #1", {}), "barrier() #1", 0.5, "")
    telemetry().stepped(1.0, 0.25, 0.5)
    bounds = next(iter(points(durations, name).values())).explicit_bounds
    assert (bounds[0], bounds[-1]) == (1e-6, 500.0)
    assert all(low < high < 3 * low for low, high in pairwise(bounds))


def test_each_part_of_a_step_is_told_as_itself_and_to_both_who_want_it(told, tmp_path):
    _, durations = told
    set_up_telemetry({"otel": True, "trace_dir": str(tmp_path)})
    before = sums(durations, "ferrorpc.step.duration")
    telemetry().stepped(1.0, 0.25, 0.5)
    after = sums(durations, "ferrorpc.step.duration")
    parts = {"compute": 1.0, "exposed": 0.25, "hidden": 0.5}
    assert {part: after[part,] - before.get((part,), 0.0) for part in parts} == pytest.approx(parts)
    set_up_telemetry({"otel": True, "trace_dir": None})
    (path,) = tmp_path.iterdir()
    assert [event["args"] for event in json.loads(path.read_text())] == [parts]


def test_nothing_is_told_unless_it_is_switched_on(sdk):
    spans, _ = sdk
    spans.clear()
    run_world(2, lambda group: group.all_reduce(1.0))
    assert telemetry() is None
    assert spans.get_finished_spans() == ()


def test_without_the_package_the_setting_is_an_error_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(BackendUnavailableError, match="ferrorpc\\[otel\\]"):
        OpenTelemetryObserver()


def test_importing_ferrorpc_does_not_load_it():
    code = "import ferrorpc, sys; ferrorpc.init_process_group().close(); sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("all_reduce(op=sum, float32[4]) #7", "all_reduce"),
        ("barrier() #1", "barrier"),
        ("send(int8[1] to rank 1, tag=0)", "send"),
    ],
)
def test_names_are_few(label, name):
    assert operation_of(label) == name


def test_ranks_that_share_memory_take_no_short_cut_past_it(tmp_path):
    code = """
import numpy as np, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
import ferrorpc
kept, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(kept))
trace.set_tracer_provider(provider)
with ferrorpc.init_process_group() as group:
    for _ in range(3):
        group.all_reduce(np.ones(4))
    group.barrier()
print("spans", *sorted(span.name for span in kept.get_finished_spans()))
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    command = [sys.executable, "-m", "ferrorpc", "run", "-n", "2", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | {"FERRORPC_OTEL": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr
    spans = "spans ferrorpc all_reduce ferrorpc all_reduce ferrorpc all_reduce ferrorpc barrier"
    assert [line.partition(": ")[2] for line in done.stdout.splitlines()] == [spans] * 2
