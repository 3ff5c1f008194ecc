"""The pipeline example, as a reader runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launching import needs

ROOT = Path(__file__).resolve().parents[2]
pytestmark = needs("sklearn", "tqdm", "matplotlib")


@pytest.mark.parametrize(("processes", "schedule", "name"), [(2, "zbv", "pipeline.svg"), (3, "1f1b", "pipeline.png")])
def test_it_learns_and_draws_its_last_step(tmp_path: Path, processes: int, schedule: str, name: str) -> None:
    picture = tmp_path / name
    script = [str(ROOT / "examples" / "pipeline_digits.py"), "--schedule", schedule, "--epochs", "4", "--out", str(picture)]
    command = [sys.executable, "-m", "ferrorpc", "run", "-n", str(processes), *script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    first, last = (float(loss) for loss in re.search(r"loss (\S+) at first, (\S+) at last", result.stdout).groups())
    assert last < first / 3
    if name.endswith(".png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    else:
        assert {"recorded", "simulated"} <= set(re.findall(r"\w+", picture.read_text()))
