"""`ferrorpc bench all_reduce`: the figures are there, and make sense; how large they are is nobody's test."""

import json
import subprocess
import sys

from tests.integration.launching import environment


def bench(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "ferrorpc.cli.main", "bench", "all_reduce", "--no-peers", *arguments],
        capture_output=True, text=True, timeout=100, env=environment(),
    )  # fmt: skip


def test_every_size_is_measured_on_every_process():
    result = bench("-n", "2", "--sizes", "4,64KiB", "--seconds", "0.05", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["processes"] == 2
    rows = found["lanes"]["grpc"]["sizes"]
    assert [row["bytes"] for row in rows] == [4, 65536]
    for row in rows:
        assert row["repetitions"] >= 5
        assert 0 < row["min_seconds"] <= row["median_seconds"] <= row["p90_seconds"]


def test_the_table_has_a_row_a_size():
    result = bench("-n", "1", "--sizes", "4,8", "--seconds", "0.01")
    assert result.returncode == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["all_reduce", "bytes", "4", "8"]


def test_a_size_that_is_none_is_refused():
    result = bench("--sizes", "big")
    assert result.returncode == 64
    assert "--sizes" in result.stderr
