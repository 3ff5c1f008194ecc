"""docs/reference.md is what the docstrings of the public face say, and leaves nothing of it out."""

from __future__ import annotations

import re
import subprocess
import sys
from enum import Enum
from importlib import import_module

import pytest

import ferrorpc
from tests.house.tree import ROOT

PAGE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
ROOMS = ("hooks", "rules", "schedules", "testing")
UNNAMED = {
    name
    for section in PAGE.split("\n## ")
    if "`" not in section.partition("\n")[0]
    for name in re.findall(r"\n### (\w+)", section)
} - {*ferrorpc.__all__}
"""Classes that `ferrorpc` makes without naming them."""
SUITES = ("BackendContract", "BasicBackendContract")
"""Of the testing kit, which lists them nowhere because they need pytest."""


def test_the_page_is_fresh() -> None:
    pytest.importorskip("griffe")
    result = subprocess.run(
        [sys.executable, "scripts/reference.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, f"run `make reference`\n{result.stdout}{result.stderr}"


@pytest.mark.parametrize("name", sorted({*ferrorpc.__all__} - {"__version__", "errors", *ROOMS}))
def test_a_name_of_the_face_is_on_the_page(name: str) -> None:
    assert re.search(rf"^### {name}$|^ *- \*\*{name}\*\*", PAGE, re.MULTILINE)


@pytest.mark.parametrize("name", [*(name for room in ROOMS for name in getattr(ferrorpc, room).__all__), *SUITES])
def test_a_name_of_a_room_is_on_the_page(name: str) -> None:
    assert re.search(rf"^### {name}$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("name", sorted(UNNAMED))
def test_a_class_without_a_name_of_the_face_is_shown_with_its_import(name: str) -> None:
    found = re.search(rf"^### {name}\n\n`from ([\w.]+) import {name}`$", PAGE, re.MULTILINE)
    assert found
    assert hasattr(import_module(found[1]), name)


@pytest.mark.parametrize("members", [ferrorpc.ErrorCode, ferrorpc.DType, ferrorpc.ReduceOp])
def test_members_of_enumerations_are_on_the_page(members: type[Enum]) -> None:
    values = {each.name: f'"{each.value}"' if isinstance(each.value, str) else each.value for each in members}
    assert ", ".join(f"`{name} = {value}`" for name, value in values.items()) in PAGE.splitlines()


def test_the_version_is_on_the_page() -> None:
    assert "ferrorpc.__version__" in PAGE


def test_nothing_private_is_on_the_page() -> None:
    assert not re.findall(r"^\*\*`_(?!_call__|_getitem__)\w+", PAGE, re.MULTILINE)


@pytest.mark.parametrize(
    "line",
    [
        '- returns: name -> array: "slot0/a/b" is the first state array of the rule for the weights "a/b", in their shape. '
        "Arrays without elements are left out.",
        "- `rank, size`: of this group.",
        "`TensorSpec(dtype, shape)`",
        "`StepTimes(compute_seconds, exposed_seconds, hidden_seconds)`",
        "**`by_rank() -> list[StepTimes]`**",
        "### batch_norm",
        "### batch_norm_gradient",
    ],
)
def test_what_is_hard_to_read_from_docstrings_is_whole(line: str) -> None:
    assert line in PAGE.splitlines()
