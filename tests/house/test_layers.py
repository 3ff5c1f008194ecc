"""Who may import whom: the drawing in docs/architecture.md, held true by import-linter and two rules it has no words for."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from tests.house.tree import COORDINATOR_MAY_IMPORT, GENERATED, PACKAGES, ROOT, module_of, name_of, package_files, syntax_of

DECIDES_ONLY = (
    "ferrorpc_coordinator.state",
    "ferrorpc.collectives.algorithms",
    "ferrorpc.ddp.bucket",
    "ferrorpc.plans.program",
    "ferrorpc.pipeline.schedules",
)
"""What decides and does no input or output. Those that exist must be in the contract."""


def contracts() -> list[dict[str, Any]]:
    """The contracts of pyproject.toml."""
    found: list[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return found


def exists(module: str) -> bool:
    """Whether this module of ours exists."""
    base = PACKAGES[1].parent if module.startswith("ferrorpc_coordinator") else ROOT
    path = base.joinpath(*module.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def test_the_contracts_are_kept() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_everything_that_decides_is_under_contract() -> None:
    pure = next(contract for contract in contracts() if contract["name"] == "what decides does no input or output")
    assert {module for module in DECIDES_ONLY if exists(module)} == set(pure["source_modules"])


def test_every_room_of_the_library_has_its_layer() -> None:
    layers = next(contract for contract in contracts() if contract["type"] == "layers")
    named = {module.strip(" ()") for layer in layers["layers"] for module in layer.split("|")}
    rooms = {f"ferrorpc.{path.stem}" for path in PACKAGES[0].iterdir() if path.suffix == ".py" and path.stem != "__init__"}
    rooms |= {f"ferrorpc.{path.parent.name}" for path in PACKAGES[0].glob("*/__init__.py")}
    assert rooms <= named


def test_the_contract_forbids_the_coordinator_all_other_rooms() -> None:
    contract = next(found for found in contracts() if found["name"] == "the coordinator never imports the training side")
    forbidden = {module.split(".")[1] for module in contract["forbidden_modules"]}
    assert not forbidden & COORDINATOR_MAY_IMPORT
    rooms = {path.parent.name for path in PACKAGES[0].glob("*/__init__.py")} | {path.stem for path in PACKAGES[0].glob("*.py")}
    parts_of_bootstrap = {room for room in rooms if room.startswith("bootstrap_")}
    assert rooms - COORDINATOR_MAY_IMPORT - forbidden - parts_of_bootstrap - {"__init__"} == set()


def ferrorpc_rooms(path: Path) -> set[str]:
    """The rooms of ferrorpc that a module imports."""
    found = set()
    for node in ast.walk(syntax_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} if node.module != "ferrorpc" else {f"ferrorpc.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in found if name.startswith("ferrorpc.")}


def test_the_coordinator_imports_only_what_it_may() -> None:
    wrong = {
        name_of(path): extra for path in PACKAGES[1].rglob("*.py") if (extra := ferrorpc_rooms(path) - COORDINATOR_MAY_IMPORT)
    }
    assert wrong == {}


def test_generated_code_is_only_imported_where_messages_meet_the_wire() -> None:
    """Protobuf messages stay at the edges: the wire, the lanes, the coordinator and its client."""
    allowed = (
        "ferrorpc.wire",
        "ferrorpc.transports",
        "ferrorpc.coordination",
        "ferrorpc.cli",
        "ferrorpc.backends",
        "ferrorpc_coordinator",
    )
    users = {module_of(path) for path in package_files() if "v1" in ferrorpc_rooms(path) and GENERATED not in path.parents}
    assert {module for module in users if not module.startswith(allowed)} == set()
