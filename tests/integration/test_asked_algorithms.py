"""FERRORPC_ALGORITHM on real processes that share memory: what it asks for runs as messages, and nothing is left out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launching import environment

SCRIPT = """
import json, sys
import numpy as np
import ferrorpc

with ferrorpc.init_process_group() as group:
    if group.rank == 1:
        for number in range(20):
            group.store.add("count", 1)
    group.barrier()
    after = group.store.add("count", 0)
    total = float(group.all_reduce(np.full(3, group.rank + 1.0)).sum())
    if group.rank == 0:
        open(sys.argv[1], "w").write(json.dumps([after, total, group.explain("all_reduce", 1 << 20)]))
"""


@pytest.mark.parametrize("asked", [pytest.param("", marks=pytest.mark.shared_memory), "barrier=dissemination,all_reduce=ring"])
def test_barriers_hold_and_sums_are_right_whatever_is_asked_for(tmp_path: Path, asked: str) -> None:
    script, out = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "ferrorpc", "run", "--standalone", "-n", "2", str(script), str(out)]
    variables = {**environment(), "FERRORPC_ALGORITHM": asked}
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, env=variables, check=False)
    assert result.returncode == 0, result.stderr
    after, total, explained = json.loads(out.read_text())
    assert after == 20, "rank 0 passed a barrier that rank 1 had not entered"
    assert total == 9.0
    if asked:
        assert "ring, each slice round the ring (asked for by the setting algorithm)" in explained
    else:
        assert "in shared memory, which all of them have; two_shot, above 128 KiB" in explained
        assert "as messages it would be:" in explained
