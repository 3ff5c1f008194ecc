"""The pipelined transformer, as a reader runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.integration.launching import needs

ROOT = Path(__file__).resolve().parents[2]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
pytestmark = needs("torch", "matplotlib")


def test_it_learns_holds_equal_replicas_and_draws_its_last_step(tmp_path: Path) -> None:
    picture = tmp_path / "pipeline.png"
    script = [str(ROOT / "examples" / "pipeline_characters.py"), "--steps", "5", "--schedule", "zbv", "--out", str(picture)]
    command = [sys.executable, "-m", "ferrorpc", "run", "-n", "4", *script, "--replicas", "2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    first, last = (float(loss) for loss in re.search(r"loss (\S+) at first, (\S+) at last", result.stdout).groups())
    assert last < first
    assert float(re.search(r"test loss ([0-9.]+) nats", result.stdout)[1]) < first - 0.5
    assert "replicas with identical weights: 2" in result.stdout
    assert picture.read_bytes().startswith(PNG_SIGNATURE)
