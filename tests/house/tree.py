"""The files the house rules look at: what is written by hand, parsed once."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (ROOT / "ferrorpc", ROOT / "services" / "ferrorpc_coordinator")
GENERATED = ROOT / "ferrorpc" / "v1"
COORDINATOR_MAY_IMPORT = {
    *("wire", "v1", "guard", "logs", "config", "types", "versions"),
    *("errors", "exit_codes", "generation_errors", "tracebacks"),
}
"""Modules and packages of ferrorpc that the coordinator imports."""


def package_files() -> list[Path]:
    """Every hand-written module of the packages that are shipped."""
    found = (path for package in PACKAGES for path in package.rglob("*.py"))
    return sorted(path for path in found if GENERATED not in path.parents)


def all_files() -> list[Path]:
    """Every hand-written Python file of the repository."""
    others = (path for name in ("tests", "examples", "benchmarks", "scripts") for path in (ROOT / name).rglob("*.py"))
    return package_files() + sorted(others)


def name_of(path: Path) -> str:
    """The path as a reader of the repository knows it."""
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    """The import name of a module of the packages."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    parts = parts[1:] if parts[0] == "services" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def syntax_of(path: Path) -> ast.Module:
    """Its syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
