"""`import ferrorpc` comes before gRPC's own import, or says that it did not."""

import subprocess
import sys

import pytest


def output_of(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", code], env=variables, capture_output=True, text=True, timeout=60, check=True
    )


def test_grpcs_fork_support_is_off_before_grpc_is_imported() -> None:
    found = output_of("import os, ferrorpc; print(os.environ['GRPC_ENABLE_FORK_SUPPORT'])")
    assert (found.stdout, found.stderr) == ("0\n", "")


def test_whoever_imports_grpc_first_is_warned_once_and_told_what_to_do() -> None:
    code = "import sys; sys.modules['grpc'] = sys\nimport ferrorpc\nimport ferrorpc.errors"
    found = output_of(code)
    assert found.stderr.count("RuntimeWarning") == 1
    assert "import ferrorpc first, or set GRPC_ENABLE_FORK_SUPPORT=0" in found.stderr
    assert output_of(code, GRPC_ENABLE_FORK_SUPPORT="0").stderr == ""


def test_the_version_is_the_distributions() -> None:
    found = output_of("import ferrorpc, importlib.metadata as m; print(ferrorpc.__version__ == m.version('ferrorpc'))")
    assert found.stdout == "True\n"


def test_without_torch_its_side_is_an_import_error_that_names_the_extra() -> None:
    code = "import sys; sys.modules['torch'] = None\ntry: import ferrorpc.torch\nexcept ImportError as error: print(error)"
    assert output_of(code).stdout.endswith("try: pip install 'ferrorpc[torch]'\n")


def test_without_torch_its_side_is_no_attribute_and_who_asks_for_it_is_told_the_extra() -> None:
    code = """
import sys
sys.modules["torch"] = None
import ferrorpc
print(hasattr(ferrorpc, "torch"))
try: ferrorpc.torch
except AttributeError as error: print(error)
try: from ferrorpc import torch
except ImportError as error: print(error)
"""
    told = "ferrorpc.torch needs PyTorch, which is not installed\ntry: pip install 'ferrorpc[torch]'\n"
    assert output_of(code).stdout == f"False\n{told}{told}"


def test_the_side_of_torch_needs_no_import_of_its_own() -> None:
    pytest.importorskip("torch")
    code = "import sys, ferrorpc; print('torch' in sys.modules, ferrorpc.torch.Stage.__module__)"
    assert output_of(code).stdout == "False ferrorpc.torch.stage\n"
