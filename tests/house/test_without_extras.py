"""`make test` in a fresh clone: no file of tests fails for want of what `make setup` does not install."""

from __future__ import annotations

import subprocess
import sys

from tests.house.tree import ROOT

COLLECT = """
import sys
from importlib.machinery import PathFinder

import pytest

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in {"torch", "cupy", "nccl", "jax", "optax", "mpi4py", "pyarrow"}:
            return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
sys.exit(pytest.main(["--collect-only", "--quiet", "-p", "no:cacheprovider", "tests"]))
"""


def test_every_file_of_tests_can_be_read_where_optional_libraries_are_missing() -> None:
    found = subprocess.run([sys.executable, "-c", COLLECT], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 0, "\n".join(line for line in found.stdout.splitlines() if line.startswith(("ERROR", "E  ")))
