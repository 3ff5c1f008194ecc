"""Exit reports: the launcher's side with a fake process, and the process with a fake coordinator."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from ferrorpc.cli import client
from ferrorpc.cli.launcher import exit_reporter
from ferrorpc.cli.launcher.child_processes import ChildProcesses
from ferrorpc.cli.launcher.exit_reporter import ExitReporter, serve
from ferrorpc.cli.launcher.launch import launch
from ferrorpc.cli.launcher.output import Console
from ferrorpc.cli.run import make_plan
from ferrorpc.errors import ConfigError, CoordinatorUnavailableError


@pytest.fixture
def reporter():
    """A child whose standard input the test reads."""
    reader, writer = os.pipe()
    with open(writer, "wb", buffering=0) as stdin:
        yield SimpleNamespace(reader=reader, stdin=stdin, returncode=None, poll=lambda: None)


@pytest.fixture
def said():
    return []


@pytest.fixture
def reports(reporter, said):
    children = SimpleNamespace(start=lambda *arguments, **options: reporter, discard=lambda child: None)
    found = ExitReporter(children, "127.0.0.1:29700", "j", {}, said.append)
    found.start()
    return found


def test_each_report_is_a_line_and_counts_until_it_is_answered(reporter, reports):
    reports.send("box-0", "launch0", 1, "ValueError: two\nlines")
    reports.send("box-1", "launch1", -9, "")
    reports.send("box-2", "launch2", 0, "")
    lines = os.read(reporter.reader, 4096).decode().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"name": "box-0", "launch": "launch0", "returncode": 1, "reason": "ValueError: two\nlines"},
        {"name": "box-1", "launch": "launch1", "returncode": -9, "reason": ""},
        {"name": "box-2", "launch": "launch2", "returncode": 0, "reason": ""},
    ]
    assert reports.unanswered == 3
    assert not reports.ready
    reports.on_output(b"ready\n")
    assert reports.ready
    assert reports.unanswered == 3
    reports.on_output(b"ok\nok\nfai")
    assert reports.unanswered == 1
    reports.on_output(b"led: nobody there\n")
    assert reports.unanswered == 0
    os.close(reporter.reader)


def test_a_report_is_made_again_where_the_coordinator_was_killed_with_it(monkeypatch, capfd):
    """As by what ended the process that is reported. One that is started again gives whom it does not hear of ten seconds."""
    sent = []

    def call(method, request, config, *, wait_for_ready):
        sent.append(request.request.exit.name)
        if len(sent) == 1:
            raise CoordinatorUnavailableError("the connection broke")

    monkeypatch.setattr(client, "call", call)
    monkeypatch.setattr(exit_reporter, "RETRY_PAUSE_SECONDS", 0.0)
    line = {"name": "box-0", "launch": "launch0", "returncode": -9, "reason": ""}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(line) + "\n"))
    serve("127.0.0.1:1", "j")
    assert (sent, capfd.readouterr().out) == (["box-0", "box-0"], "ready\nok\n")


def test_the_reporter_answers_each_line_whatever_becomes_of_the_one_before(monkeypatch, capfd):
    monkeypatch.setattr(exit_reporter, "RETRY_SECONDS", 0.0)
    sent = []

    def call(method, request, config, *, wait_for_ready):
        assert wait_for_ready, "a coordinator that is being started again is waited for"
        sent.append(request.request.exit)
        if len(sent) == 1:
            raise CoordinatorUnavailableError("nobody there")

    lines = [{"name": f"box-{number}", "launch": f"launch{number}", "returncode": number, "reason": ""} for number in range(2)]
    monkeypatch.setattr(client, "call", call)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(line) + "\n" for line in lines)))
    serve("127.0.0.1:1", "j")
    assert capfd.readouterr().out == "ready\nfailed: nobody there\nok\n"
    assert [(one.name, one.instance_id, one.returncode) for one in sent] == [("box-0", "launch0", 0), ("box-1", "launch1", 1)]


def test_signals_that_every_process_of_a_job_gets_do_not_end_the_reporter():
    command = [sys.executable, "-P", "-m", "ferrorpc.cli.launcher.exit_reporter", "127.0.0.1:1", "j"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reporter:
        assert reporter.stdout.readline() == b"ready\n"
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            reporter.send_signal(number)
        reporter.stdin.close()
        assert reporter.wait(60) == 0


def test_what_keeps_exits_from_being_reported_is_said_once_until_one_is_reported(reporter, reports, said):
    reports.on_output(b"ready\nfailed: no token file\nfailed: no to")
    reports.on_output(b"ken file\n")
    after = "the coordinator notices lost workers by itself, which takes some seconds"
    assert said == [f"exits of workers are not reported: no token file; {after}"]
    reports.on_output(b"ok\n")
    reports.on_output(b"")
    assert said[1:] == [f"exits of workers are not reported: the process that does so has ended; {after}"]
    os.close(reporter.reader)


def test_a_reporter_that_is_started_anew_has_to_get_ready_again(reporter, reports):
    reports.on_output(b"ready\no")
    assert (reports.ready, reports.runs) == (True, True)
    reports.start()
    assert not reports.ready
    reports.send("box-0", "launch0", 1, "")
    reports.on_output(b"ready\nok\n")
    assert (reports.ready, reports.unanswered) == (True, 0)
    os.close(reporter.reader)


def test_a_reporter_that_is_gone_owes_no_answer(reporter, reports):
    reports.send("box-0", "launch0", 1, "")
    reports.on_output(b"")
    assert reports.unanswered == 0
    reports.send("box-1", "launch1", 1, "")
    os.close(reporter.reader)
    reports.send("box-2", "launch2", 1, "")
    assert reports.unanswered == 0


def test_reports_that_nobody_reads_do_not_stop_the_launcher(reporter, reports):
    """A reporter takes up to a minute for each while no coordinator answers, and a pipe holds 64 KiB."""
    for number in range(1000):
        reports.send(f"box-{number}", "launch00", 1, "\N{NO ENTRY}" * 300)
    assert 0 < reports.unanswered < 1000
    os.set_blocking(reporter.reader, False)
    found = b""
    while part := read_some(reporter.reader):
        found += part
    assert [json.loads(line)["name"] for line in found.splitlines()] == [f"box-{n}" for n in range(reports.unanswered)]
    reports.send("box-1000", "launch00", 1, "")
    assert json.loads(read_some(reporter.reader))["name"] == "box-1000", "there is room again"
    os.close(reporter.reader)


def read_some(descriptor):
    try:
        return os.read(descriptor, 1 << 20)
    except BlockingIOError:
        return b""


def test_a_job_whose_reporter_cannot_be_started_runs_to_its_end_and_says_so_once(monkeypatch, tmp_path):
    """As where descriptors or processes run out between the start of the workers and the first exit."""
    start = ChildProcesses.start

    def start_all_but_the_reporter(self, command, *arguments, **options):
        if "ferrorpc.cli.launcher.exit_reporter" in command:
            raise ConfigError("beside 3 processes no other can be started: Too many open files", hint="ask for fewer")
        return start(self, command, *arguments, **options)

    monkeypatch.setattr(ChildProcesses, "start", start_all_but_the_reporter)
    plan = make_plan(target=("true",), no_python=True, processes="3", coordinator="127.0.0.1:1")
    with (tmp_path / "err").open("w+b") as err:
        assert launch(plan, Console(err, err, {}), dict(os.environ)) == 0
        err.seek(0)
        (line,) = err.read().decode().splitlines()
    assert line.startswith("ferrorpc: exits of workers are not reported: beside 3 processes no other can be started")
