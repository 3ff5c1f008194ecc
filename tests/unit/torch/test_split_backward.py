"""Split backward passes in several threads at once; their gradients are tested with the stages that make them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.unit.torch.first_edges import PROCESSES


def test_threads_that_begin_at_once_do_not_wait_for_each_other_in_pytorch() -> None:
    """One held the interpreter and waited for the other, which waited for the interpreter."""
    command = [sys.executable, "-W", "error", "-m", "tests.unit.torch.first_edges"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True, cwd=Path(__file__).parents[3])
    assert int(done.stdout) == PROCESSES, done.stderr
