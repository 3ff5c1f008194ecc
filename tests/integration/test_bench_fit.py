"""Measuring for a cost table: real processes, and every case gets a time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

from tests.integration.launching import children_of, environment
from tests.waiting import eventually

CASES = (
    "all_gather:ring:64",
    "all_gather:direct:64",
    "reduce_scatter:direct:64",
    "all_reduce:two_shot:64",
    "send:round_trip:64",
)


def test_every_case_is_timed_on_real_processes(tmp_path):
    out = tmp_path / "times.json"
    worker = ["-m", "ferrorpc.cli.bench.fit_worker", str(out), "0.01", *CASES]
    command = [sys.executable, "-m", "ferrorpc", "run", "--standalone", "-n", "2", *worker]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment(), check=False)
    assert result.returncode == 0, result.stderr
    times = json.loads(out.read_text())
    assert len(times) == len(CASES)
    assert all(each > 0 for each in times)


def test_who_stops_a_measurement_is_told_no_fault_of_the_configuration(tmp_path):
    command = [sys.executable, "-m", "ferrorpc", "bench", "--fit", str(tmp_path / "costs.json")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment(), text=True) as process:
        eventually(lambda: children_of(process.pid), seconds=30)
        time.sleep(1.0)
        process.terminate()
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "could not be measured" not in said
