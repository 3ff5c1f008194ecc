"""What the types of the face promise to users: their programs in tests/typing, checked as theirs would be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import ROOT

PROGRAMS = sorted((ROOT / "tests" / "typing").glob("*.py"))
NEEDED = {"tensors": "torch"}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_users_program_is_typed_precisely(program: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="the type checker is in the dev group")
    if program.stem in NEEDED:
        pytest.importorskip(NEEDED[program.stem])
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nstrict = True\nfollow_imports = silent\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(tmp_path), str(program)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
