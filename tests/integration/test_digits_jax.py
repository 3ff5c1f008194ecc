"""The JAX example, as a reader runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.integration.launching import needs

ROOT = Path(__file__).resolve().parents[2]
pytestmark = needs("jax", "optax", "sklearn")


def test_it_learns_and_holds_equal_weights() -> None:
    script = [str(ROOT / "examples" / "digits_jax.py"), "--epochs", "8"]
    command = [sys.executable, "-m", "ferrorpc", "run", "-n", "2", *script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert float(re.search(r"test accuracy ([0-9.]+)", result.stdout)[1]) >= 0.95
    assert "identical weights on 2 ranks" in result.stdout
