"""The pipeline example, as a reader runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("sklearn")
pytest.importorskip("tqdm")


@pytest.mark.parametrize(("processes", "schedule"), [(2, "zbv"), (3, "1f1b")])
def test_it_learns_and_draws_its_last_step(tmp_path: Path, processes: int, schedule: str) -> None:
    picture = tmp_path / "pipeline.svg"
    script = [str(ROOT / "examples" / "pipeline_digits.py"), "--schedule", schedule, "--epochs", "4", "--out", str(picture)]
    command = [sys.executable, "-m", "ferrorpc.cli.main", "run", "-n", str(processes), *script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    first, last = (float(loss) for loss in re.search(r"loss (\S+) at first, (\S+) at last", result.stdout).groups())
    assert last < first / 3
    text = picture.read_text()
    assert "recorded" in text
    assert "simulated" in text
