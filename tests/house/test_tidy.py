"""Taste, as far as it can be counted: short files, short functions, nothing left over, nothing that only one machine has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.house.tree import ROOT, all_files, name_of, package_files, syntax_of

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
LINE_LENGTH_MAX = 128
FACES = (
    "ferrorpc/__init__.py",
    "ferrorpc/testing/__init__.py",
    "ferrorpc/torch/__init__.py",
    "ferrorpc/ddp/hooks/__init__.py",
    "ferrorpc/pipeline/schedules/__init__.py",
)
LEFTOVER = re.compile(
    r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK", "Not" + "ImplementedError")) + r")\b"
)
HOME_PATH = re.compile(r"(?<![\w.])/(home|root|Users|work)/")
PRAGMA = re.compile(r"  # (type: ignore|noqa|pragma|fmt).*$")
"""Not counted: it is there for tools, and cannot be broken."""
TEXTS = ("*.py", "*.md", "*.proto", "*.toml", "*.yml", "*.yaml", "Makefile", "Dockerfile")


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_files_are_short() -> None:
    """One noun per file."""
    found = {name_of(path): len(lines_of(path)) for path in all_files()}
    assert len(found) > 100
    assert {name: count for name, count in found.items() if count > FILE_LINES_MAX} == {}


def test_lines_are_short() -> None:
    found = [
        f"{name_of(path)}:{number}"
        for path in all_files()
        for number, line in enumerate(lines_of(path), 1)
        if len(line) > LINE_LENGTH_MAX and len(PRAGMA.sub("", line)) > LINE_LENGTH_MAX
    ]
    assert found == []


def functions(path: Path) -> list[tuple[str, int]]:
    """Name and length in lines of every function, decorators not counted."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (node.name, (node.end_lineno or 0) - node.lineno + 1) for node in ast.walk(syntax_of(path)) if isinstance(node, kinds)
    ]


def test_functions_are_short() -> None:
    found = [(name_of(path), name, count) for path in all_files() for name, count in functions(path)]
    assert len(found) > 1000
    assert [each for each in found if each[2] > FUNCTION_LINES_MAX] == []


def test_nothing_is_left_over() -> None:
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in all_files()
        for number, line in enumerate(lines_of(path), 1)
        if LEFTOVER.search(line)
    ]
    assert found == []


def repository_texts() -> list[Path]:
    """Texts of the repository proper; not what tools put beside them."""
    folders = ("ferrorpc", "services", "tests", "examples", "benchmarks", "scripts", "docs", "deploy", "protos")
    nested = (path for folder in folders for pattern in TEXTS for path in (ROOT / folder).rglob(pattern))
    top = (path for pattern in TEXTS for path in ROOT.glob(pattern))
    return sorted({*nested, *top})


def test_no_path_of_one_machine_is_written_down() -> None:
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in repository_texts()
        for number, line in enumerate(lines_of(path), 1)
        if HOME_PATH.search(line)
    ]
    assert found == []


def test_packages_say_nothing_and_modules_say_what_they_are() -> None:
    """`__init__` files are empty except the faces; every other module opens with a docstring."""
    silent = [path for path in package_files() if path.name == "__init__.py" and name_of(path) not in FACES]
    assert [name_of(path) for path in silent if path.read_text(encoding="utf-8").strip()] == []
    others = [path for path in package_files() if path not in silent]
    assert [name_of(path) for path in others if not ast.get_docstring(syntax_of(path))] == []


def public_without_docstring(path: Path) -> list[str]:
    """Public module-level functions and classes, and public methods of such classes that override nothing, undocumented."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    top = [node for node in syntax_of(path).body if isinstance(node, kinds) and not node.name.startswith("_")]
    said = {node.name for node in top if ast.get_docstring(node)}  # once for all overloads of a name
    return [f"{name_of(path)}: {node.name}" for node in top if node.name not in said]


def test_everything_public_is_documented() -> None:
    assert [name for path in package_files() for name in public_without_docstring(path)] == []
