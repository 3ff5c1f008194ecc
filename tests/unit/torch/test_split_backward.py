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


FIRST_BACKWARD = """
import sys
import torch
import ferrorpc.torch
stage = ferrorpc.torch.Stage(torch.nn.Linear(2, 2))
with torch.inference_mode(), torch.device("meta"):
    ferrorpc.torch.Stage(torch.nn.Linear(2, 2))
y, context = stage.forward(torch.ones(1, 2))
before = set(sys.modules)
stage.backward(context, torch.ones(1, 2))
print(*sorted(set(sys.modules) - before))
"""


def test_the_first_backward_pass_imports_nothing_any_more() -> None:
    """What took seconds there was spent by one rank of a pipeline after the other, while all others waited."""
    done = subprocess.run([sys.executable, "-c", FIRST_BACKWARD], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == []
