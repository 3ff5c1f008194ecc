"""`ferrorpc bench all_reduce`: the figures are there, and make sense; how large they are is nobody's test."""

import json
import subprocess
import sys

from tests.integration.launching import environment


def bench(*arguments, cwd=None):
    command = [sys.executable, "-P", "-m", "ferrorpc", "bench", "all_reduce", "--rounds", "2", "--seconds", "0.01"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=100, env=environment(), cwd=cwd)


def test_every_size_is_measured_on_every_process_without_a_module_of_the_users_directory(tmp_path):
    (tmp_path / "random.py").write_text("raise SystemExit('the user has a file of this name')")
    result = bench("-n", "2", "--no-peers", "--transports", "grpc", "--sizes", "4,64KiB", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["machine"]["cpus"] > 0
    assert [(row["case"]["ranks"], row["case"]["size_bytes"]) for row in found["rows"]] == [(2, 4), (2, 65536)]
    for row in found["rows"]:
        figures = row["results"]["grpc"]
        assert figures["blocks"] >= 6
        assert 0 < figures["min_seconds"] <= figures["median_seconds"] <= figures["p90_seconds"]
        assert figures["cpu_seconds"] > 0


def test_the_table_has_a_line_for_each_system_and_says_why_one_was_not_measured():
    result = bench("-n", "2", "--sizes", "1KiB", "--transports", "grpc")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[1].split()[:6] == ["all_reduce", "1", "KiB", "float32,", "2", "ranks"]
    for name in ("grpc", "gloo", "mpich"):
        figures = [line for line in lines if f" {name} " in line and " of " in line]
        assert figures or any(line.startswith(f"not measured: {name}: ") for line in lines)


def test_a_size_that_is_none_is_refused():
    result = bench("--sizes", "big")
    assert result.returncode == 64
    assert "--sizes" in result.stderr
