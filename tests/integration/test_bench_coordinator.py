"""The load generator at a small size: that it measures what it says, not how fast it is."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from ferrorpc.cli.bench import barrier, load_generator, rendezvous, torch_baseline
from ferrorpc.errors import CoordinatorUnavailableError
from tests.integration.launching import children_of, wait_until_gone
from tests.waiting import eventually


def test_rendezvous_reports_connecting_joining_and_the_journal_apart():
    results = rendezvous.run(members=5, repetitions=2, peers=False)
    assert (results["members"], results["repetitions"]) == (5, 2)
    for label in ("in_memory", "journal"):
        for part in ("connect", "rendezvous"):
            measured = results[label][part]
            assert 0 < measured["best_ms"] <= measured["median_ms"] <= measured["worst_ms"]
    assert "c10d" not in results
    text = rendezvous.describe(results)
    assert "5 members" in text
    assert "in memory" in text


def test_sessions_that_cannot_connect_are_an_error_of_ferrorpc(monkeypatch):
    monkeypatch.setattr(load_generator, "CONNECT_SECONDS", 0.2)

    async def connect():
        async with load_generator.sessions("127.0.0.1:1", "job", 3):
            pytest.fail("nobody is there")

    with pytest.raises(CoordinatorUnavailableError, match=r"3 sessions did not connect to 127\.0\.0\.1:1 within 0\.2 s"):
        asyncio.run(connect())


def test_barrier_reports_worlds_and_bare_sessions():
    results = barrier.run(ranks=3, sessions=7, repetitions=2, peers=False)
    for label in ("in_memory", "journal"):
        for kind in ("world", "crowd"):
            assert results[label][kind]["connect_ms"] > 0
            assert results[label][kind]["barrier"]["median_ms"] > 0
    assert "7 sessions" in barrier.describe(results)


@pytest.mark.parametrize("name", ["rendezvous", "barrier"])
def test_each_prints_json(name):
    small = ["--members", "3"] if name == "rendezvous" else ["--ranks", "2", "--sessions", "3"]
    command = [sys.executable, "-m", "ferrorpc", "bench", name, "--json", "--no-peers", "--repetitions", "1", *small]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["benchmark"] == name


def test_its_coordinator_ends_with_it_and_imports_nothing_from_the_users_directory(tmp_path):
    (tmp_path / "random.py").write_text("raise SystemExit('the user has a file of this name')")
    code = """
import time
from ferrorpc.cli.bench.load_generator import coordinator_process
with coordinator_process(durable=False) as address:
    print(address, flush=True)
    time.sleep(60)
"""
    command, environment = [sys.executable, "-P", "-c", code], {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as process:
        try:
            assert process.stdout.readline().startswith("127.0.0.1:")
            (coordinator,) = children_of(process.pid)
            assert os.getpgid(coordinator) == coordinator, "Ctrl-C would strike it too, perhaps in its imports"
        finally:
            process.kill()
    assert wait_until_gone([coordinator]) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_measurement_that_is_stopped_leaves_nothing_behind(tmp_path, number):
    small = ["--no-peers", "--ranks", "2", "--sessions", "3", "--repetitions", "1000"]
    command = [sys.executable, "-P", "-m", "ferrorpc", "bench", "barrier", *small]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        eventually(lambda: list(tmp_path.glob("ferrorpc-bench-*/journal.sqlite")), seconds=90)
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_what_fails_has_no_time(monkeypatch):
    printed = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    with pytest.raises(ZeroDivisionError):
        torch_baseline._all_at_once([lambda: None, lambda: 1 // 0])
    assert printed == []


def test_torch_is_measured_beside_it_or_the_reason_is_given():
    result = torch_baseline.measure("barrier", 3, limit_seconds=60)
    assert ("skipped" in result) != ("median_ms" in result)
    assert "skipped" in result or torch_baseline.describe(result).endswith(f"({torch_baseline.BARRIERS} times)")
