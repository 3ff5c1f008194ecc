"""The example with a hand-written backward pass, as a reader runs it, and what its hooks cost."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.integration.launching import needs

ROOT = Path(__file__).resolve().parents[2]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
pytestmark = needs("sklearn", "tqdm", "matplotlib")


def test_it_learns_holds_equal_weights_and_draws_its_loss(tmp_path: Path) -> None:
    picture = tmp_path / "loss.png"
    script = [str(ROOT / "examples" / "digits_stream.py"), "--epochs", "12", "--out", str(picture)]
    command = [sys.executable, "-m", "ferrorpc", "run", "-n", "3", *script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert float(re.search(r"test accuracy ([0-9.]+)", result.stdout)[1]) >= 0.95
    assert "identical weights on 3 ranks" in result.stdout
    assert picture.read_bytes().startswith(PNG_SIGNATURE)


def test_hooks_keep_the_accuracy_with_the_bytes_they_promise() -> None:
    from benchmarks import ddp_hooks

    plain, *others = (ddp_hooks.measure(hook, seeds=1, epochs=8, ranks=2) for hook in ("none", "int8", "powersgd"))
    assert plain.accuracy > 94
    for outcome in others:
        assert plain.accuracy - outcome.accuracy <= ddp_hooks.POINTS_MUST, outcome
        assert outcome.sent_bytes <= ddp_hooks.BYTES_MUST[outcome.hook] * plain.sent_bytes, outcome
