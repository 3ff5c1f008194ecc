"""What is shipped: the library, the coordinator, their types and protos, the examples; and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.house.tree import PACKAGES, ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from this tree."""
    pytest.importorskip("hatchling", reason="the build backend is in the dev group")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=100)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    """Paths inside it."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_every_module_of_both_packages(names: set[str]) -> None:
    modules = {path.relative_to(package.parent).as_posix() for package in PACKAGES for path in package.rglob("*.py")}
    assert modules - names == set()


def test_the_wheel_holds_types_protos_examples_and_the_page(names: set[str]) -> None:
    protos = {path.relative_to(ROOT / "protos").as_posix() for path in (ROOT / "protos").rglob("*.proto")}
    stubs = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ferrorpc" / "v1").glob("*.pyi")}
    examples = {f"ferrorpc/cli/_examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}
    static = ROOT / "services" / "ferrorpc_coordinator" / "web" / "static"
    page = {f"ferrorpc_coordinator/web/static/{path.name}" for path in static.iterdir()}
    assert page
    assert ({"ferrorpc/py.typed"} | protos | stubs | examples | page) - names == set()


def test_the_wheel_holds_nothing_else(names: set[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ferrorpc", "ferrorpc_coordinator"}
    assert {name for name in names if "__pycache__" in name or "/tests/" in name} == set()


def test_what_the_packages_read_of_their_own_is_read_in_a_zip_too(wheel: Path) -> None:
    pytest.importorskip("starlette", reason="the page is in the extra ui")
    code = f"""
import sys
from unittest.mock import Mock
sys.path.insert(0, {str(wheel)!r})
from ferrorpc.collectives.tuning import packaged_table
from ferrorpc.kernels.cuda.program import source
from ferrorpc_coordinator.web.page import Page
packaged_table(), source(), Page(Mock(), Mock()).application(loopback=True)
print(sys.modules[Page.__module__].__file__.startswith(sys.path[0]))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (found.stdout, found.stderr) == ("True\n", "")
