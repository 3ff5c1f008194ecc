"""The trace file of a process: what a viewer finds in it, however the process ended."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import ferrorpc
from ferrorpc.config import host_name
from ferrorpc.errors import ConfigError
from ferrorpc.telemetry import set_up_telemetry
from ferrorpc.testing import run_world
from ferrorpc.trace import TraceFile
from tests.waiting import eventually


@pytest.fixture
def traced(tmp_path):
    """What operations were told until now, as the file would be read."""
    set_up_telemetry({"otel": False, "trace_dir": str(tmp_path / "new" / "traces")})

    def events():
        set_up_telemetry({"otel": False, "trace_dir": None})
        (path,) = tmp_path.glob("new/traces/*.json")
        return json.loads(path.read_text())

    yield events
    set_up_telemetry({"otel": False, "trace_dir": None})


def test_every_operation_of_every_rank_begins_and_ends(traced) -> None:
    def work(group) -> None:
        works = [group.all_reduce(np.ones(4), async_op=True) for _ in range(3)]
        for each in works:
            each.wait()
        group.barrier()

    run_world(2, work)
    events = traced()
    for rank in (0, 1):
        own = [event for event in events if event["pid"] == rank and event["ph"] in "be"]
        begun = {event["id2"]["local"]: event for event in own if event["ph"] == "b"}
        ended = {event["id2"]["local"]: event for event in own if event["ph"] == "e"}
        assert begun.keys() == ended.keys()
        assert sorted(event["name"] for event in begun.values()) == ["all_reduce"] * 3 + ["barrier"]
        for number, event in begun.items():
            assert event["ts"] <= ended[number]["ts"]
            assert event["args"]["ferrorpc.size"] == 2
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"rank 0", "rank 1"}


def test_operations_of_a_subgroup_are_told_of_their_process(traced) -> None:
    """Whose rank in the subgroup is another one."""

    def work(group) -> None:
        group.subgroup([1, 0]).gather(np.full(2, group.rank))

    run_world(2, work)
    gathers = [event for event in traced() if event["ph"] == "b" and event["name"] == "gather"]
    assert {(event["pid"], event["args"]["ferrorpc.rank"]) for event in gathers} == {(0, 1), (1, 0)}


def test_a_failure_is_at_the_end_of_its_span(traced) -> None:
    def work(group) -> None:
        if group.rank == 0:
            with pytest.raises(TimeoutError):
                group.recv(1, timeout=0.01)
        group.barrier()

    run_world(2, work)
    ends = [event for event in traced() if event["ph"] == "e"]
    assert [event["args"] for event in ends if event["name"] == "recv"] == [{"error": "CollectiveTimeoutError"}]
    assert [event["args"] for event in ends if event["name"] == "barrier"] == [{}, {}]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
def test_an_operation_that_was_interrupted_has_not_succeeded(traced, monkeypatch, kind) -> None:
    def interrupted(_backend, _execution) -> None:
        raise kind

    def work(group) -> None:
        if group.rank == 0:
            with pytest.raises(kind):
                group.recv(1)

    monkeypatch.setattr(ferrorpc.SimulatedBackend, "run", interrupted)
    run_world(2, work)
    assert [event["args"] for event in traced() if event["ph"] == "e"] == [{"error": kind.__name__}]


def test_steps_are_counted(tmp_path) -> None:
    trace = TraceFile(str(tmp_path))
    trace.stepped(1.0, 0.25, 0.5)
    trace.close()
    trace.stepped(1.0, 1.0, 1.0)  # by a thread that is not told of its end
    trace.close()
    (event,) = json.loads(trace.path.read_text())
    assert event["pid"] == 0
    assert event["args"] == {"compute": 1.0, "exposed": 0.25, "hidden": 0.5}
    assert abs(event["ts"] / 1e6 - time.time()) < 600


def test_who_hangs_and_is_killed_leaves_what_was_done_a_second_before(tmp_path) -> None:
    trace = TraceFile(str(tmp_path))
    trace.begin("barrier() #1", {"ferrorpc.world_rank": 3})
    eventually(lambda: "barrier" in trace.path.read_text(), "the flush", 10.0)
    assert [event["ph"] for event in json.loads(trace.path.read_text() + "]")] == ["M", "b"]
    trace.close()


def test_a_full_disk_ends_the_trace_with_a_warning_and_no_operation(tmp_path, caplog) -> None:
    def on_a_full_disk() -> TraceFile:
        trace = TraceFile(str(tmp_path))
        trace._file.close()
        trace._file = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115  the trace closes it
        return trace

    trace = on_a_full_disk()
    for _ in range(2):
        trace.stepped(1.0, 0.0, 0.0)
        trace._flush()
    trace.close()
    (warning,) = caplog.messages
    assert f"{trace.path} ends here: No space left on device" in warning
    assert not trace.writes_to(str(tmp_path))
    last = on_a_full_disk()
    last.stepped(1.0, 0.0, 0.0)
    last._flush()
    last.close()
    assert len(caplog.messages) == 2


def test_a_forked_child_writes_nothing_into_its_parents_trace(tmp_path, monkeypatch) -> None:
    trace = TraceFile(str(tmp_path))
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        trace.stepped(1.0, 0.0, 0.0)
        trace.close()
        assert not trace.writes_to(str(tmp_path))
    assert trace.writes_to(str(tmp_path))
    trace.close()
    assert json.loads(trace.path.read_text()) == []


def test_a_trace_without_events_is_one_too(tmp_path) -> None:
    trace = TraceFile(str(tmp_path))
    trace.close()
    assert json.loads(trace.path.read_text()) == []


def test_a_place_that_cannot_be_written_to_is_named(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"FERRORPC_TRACE_DIR=.*file"):
        TraceFile(str(tmp_path / "file"))


PROGRAM = """
import os, sys, numpy as np, ferrorpc
group = ferrorpc.init_process_group()
ferrorpc.SimulatedBackend.create_group(1)
part = group.subgroup([0])
work = group.barrier(async_op=True)
work.wait()
if os.fork() == 0:
    sys.exit(0)
os.wait()
"""


def test_the_variable_is_enough_and_a_script_need_not_close(tmp_path: Path) -> None:
    told = os.environ | {"FERRORPC_TRACE_DIR": "traces"}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60, cwd=tmp_path, env=told)
    (path,) = tmp_path.glob("traces/*.json")
    events = json.loads(path.read_text())
    assert len({(event["ph"], str(event.get("id2"))) for event in events}) == len(events)


def test_no_trace_overwrites_that_of_another_process_of_its_name(tmp_path: Path) -> None:
    """Containers that share a host name, or one that has restarted, have the same process ids."""
    (tmp_path / f"{host_name()}-{os.getpid()}.json").write_text("of the one before")
    traces = [TraceFile(str(tmp_path)) for _ in range(2)]
    for trace in traces:
        trace.close()
    assert [trace.path.name for trace in traces] == [f"{host_name()}-{os.getpid()}-{number}.json" for number in (2, 3)]
    assert (tmp_path / f"{host_name()}-{os.getpid()}.json").read_text() == "of the one before"
