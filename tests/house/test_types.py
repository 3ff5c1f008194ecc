"""What the types of the face promise to users: their programs in tests/typing, and the examples, checked as theirs would be."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.house.tree import ROOT

EXAMPLES = ("digits_ddp", "digits_elastic", "digits_model", "digits_stream", "hello", "pipeline_digits")
"""Without those with torch and JAX, whose own functions are not all typed."""
PROGRAMS = [*sorted((ROOT / "tests" / "typing").glob("*.py")), *(ROOT / "examples" / f"{name}.py" for name in EXAMPLES)]
NEEDED = {"tensors": "torch"}
CONFIGURATION = """\
[mypy]
strict = True
follow_imports = silent
[mypy-torch.*,matplotlib.*,PIL.*,_pytest.*,pytest.*]
follow_imports = skip
[mypy-matplotlib.*,sklearn.*,cupy.*,tqdm.*]
ignore_missing_imports = True
[mypy-torch,torch._C,torch._tensor,torch.nn,torch.nn.modules.*,torch.nn.parameter,torch.optim,torch.optim.optimizer,torch.types]
follow_imports = silent
"""
"""Of torch only the modules whose types the face names: reading all of it takes twice as long as the rest together."""


@pytest.mark.timeout(400)
def test_users_programs_are_typed_precisely(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="the type checker is in the dev group")
    programs = [str(path) for path in PROGRAMS if path.stem not in NEEDED or find_spec(NEEDED[path.stem])]
    config = tmp_path / "mypy.ini"
    config.write_text(CONFIGURATION)
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", os.devnull, *programs]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
