"""The torch example, as a reader runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launching import needs

ROOT = Path(__file__).resolve().parents[2]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
torch = pytest.importorskip("torch")
pytestmark = needs("matplotlib")


def test_it_learns_holds_equal_weights_and_draws_its_loss(tmp_path: Path) -> None:
    picture = tmp_path / "loss.png"
    script = [str(ROOT / "examples" / "characters_torch.py"), "--steps", "24", "--out", str(picture)]
    command = [sys.executable, "-m", "ferrorpc", "run", "-n", "2", *script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    # It begins at ln 128 = 4.85. Where it ends depends on the text, which is that of each Python's own library.
    assert float(re.search(r"test loss ([0-9.]+) nats", result.stdout)[1]) < 3.2
    assert "identical weights on 2 ranks" in result.stdout
    assert picture.read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do() -> None:
    script = [sys.executable, str(ROOT / "examples" / "characters_torch.py"), "--device", "gpu"]
    result = subprocess.run(script, capture_output=True, text=True, timeout=100, check=False)
    assert (result.returncode, result.stderr) == (1, "--device gpu needs a GPU that torch can use; try: --device cpu\n")
