"""The documents are true where a test can tell: links lead somewhere, targets exist."""

from __future__ import annotations

import builtins
import re
import threading
from pathlib import Path

import pytest

from ferrorpc import errors
from ferrorpc.config import SETTINGS
from tests.house.tree import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    missing = [target for target in targets if "://" not in target and not (path.parent / target).exists()]
    assert missing == []


def without_code(path: Path) -> str:
    """This document without its blocks of code."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """What a link to a heading of this document may say after its #."""
    headings = re.findall(r"^#+ (.*)$", without_code(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_to_headings_lead_to_one(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", path.read_text())
    lost = [f"{target}#{anchor}" for target, anchor in links if anchor not in anchors(path.parent / target if target else path)]
    assert lost == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_make_targets_that_are_mentioned_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    mentioned = set(re.findall(r"(?:^|`)make ([a-z]+)", path.read_text(), re.MULTILINE))
    assert mentioned <= targets


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_errors_and_variables_that_are_mentioned_exist(path: Path) -> None:
    text = path.read_text()
    homes = (errors, builtins, threading)
    mentioned = set(re.findall(r"\b[A-Z]\w+Error\b", text))
    assert [name for name in mentioned if not any(hasattr(home, name) for home in homes)] == []
    variables = {setting.variable for setting in SETTINGS} | {"FERRORPC_IMAGE", "FERRORPC_GPU_IMAGE"}  # Compose's own
    assert set(re.findall(r"\bFERRORPC_[A-Z_]*[A-Z]\b", text)) <= variables


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_row_is_in_a_table_and_has_as_many_cells_as_its_head(path: Path) -> None:
    for table in re.findall(r"(?:^ *\|.*\n)+", without_code(path), re.MULTILINE):
        head, *rows = table.splitlines()
        assert re.fullmatch(r"[ |:-]+", "".join(rows[:1])), f"a row outside of a table: {head}"
        cells = [len(re.findall(r"(?<!\\)\|", row)) for row in (head, *rows)]
        assert [row for row, count in zip(rows, cells[1:], strict=True) if count != cells[0]] == []


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    pages = {path.name for path in folder.glob("[0-9]*.md")}
    assert set(re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", (folder / "README.md").read_text())) == pages
