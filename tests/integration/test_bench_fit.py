"""Measuring for a cost table: real processes, and every case gets a time."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.integration.launching import environment

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
