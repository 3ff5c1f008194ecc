"""`make test` in a fresh clone: no file of tests fails for want of what `make setup` does not install."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.house.tree import ROOT

IMPORT = """
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in {"torch", "cupy", "nccl", "jax", "optax", "mpi4py", "pyarrow"}:
            return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
for path in sorted(Path("tests").rglob("test_*.py")):
    try:
        import_module(".".join(path.with_suffix("").parts))
    except pytest.skip.Exception:
        pass  # it says itself what it needs
"""


@pytest.mark.timeout(300)
def test_every_file_of_tests_can_be_imported_where_optional_libraries_are_missing() -> None:
    """Importing them takes a third of the time in which pytest collects them."""
    found = subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert found.returncode == 0, found.stderr
