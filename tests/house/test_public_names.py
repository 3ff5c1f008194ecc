"""The public face is an explicit list: what is in it stays, what is not is nobody's business."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import ferrorpc
from ferrorpc import errors
from tests.house.tree import syntax_of

FACE = {
    # groups
    "init_process_group",
    "ProcessGroup",
    "Work",
    "ReduceOp",
    "DType",
    "TensorSpec",
    # backends
    "Backend",
    "Capabilities",
    "GrpcBackend",
    "SimulatedBackend",
    # training
    "DistributedDataParallel",
    "GradientSynchronizer",
    "Mesh",
    "ZeroOptimizer",
    "Parameter",
    "Pipeline",
    "batch_norm",
    "batch_norm_gradient",
    # rooms that are public as they are
    "errors",
    "testing",
    "schedules",
    "hooks",
    "rules",
}
ERRORS = set(errors.__all__)


def test_the_face_is_this_list() -> None:
    assert set(ferrorpc.__all__) - {"__version__"} == FACE | ERRORS


@pytest.mark.parametrize("name", sorted(FACE | ERRORS))
def test_a_name_of_the_face_leads_somewhere_and_is_documented(name: str) -> None:
    value = getattr(ferrorpc, name)
    if not inspect.isclass(value) or value.__module__.startswith("ferrorpc"):
        assert inspect.getdoc(value)


def test_type_checkers_see_the_same_names_in_the_same_places() -> None:
    """The face is written twice, as a table for Python and as imports for type checkers."""
    block, _ = [node for node in syntax_of(Path(ferrorpc.__file__)).body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {name: module for name, module in seen.items() if module != "ferrorpc"} == ferrorpc._MODULE_OF
    assert {name for name, module in seen.items() if module == "ferrorpc"} == {
        *ferrorpc._SUBMODULES,
        *ferrorpc._OPTIONAL_SUBMODULES,
    }


def test_the_list_that_checkers_read_is_what_the_tables_offer() -> None:
    assert ferrorpc.__all__ == ["__version__", *ferrorpc._SUBMODULES, *ferrorpc._MODULE_OF]
    assert set(errors.__all__) == {"ErrorCode", *(cls.__name__ for cls in errors.type_of.values())}
    kit = ferrorpc.testing
    assert kit.__all__ == [name for name, module in kit._MODULE_OF.items() if module != "contract"]


def test_dir_shows_the_face() -> None:
    assert set(ferrorpc.__all__) <= set(dir(ferrorpc))


@pytest.mark.parametrize("name", ["errors", "hooks", "rules", "schedules", "testing"])
def test_a_room_that_is_public_can_be_imported_from(name: str) -> None:
    """In a process that has not touched it before; and it is one module, whichever way it is reached."""
    code = f"import ferrorpc.{name}; from ferrorpc.{name} import __all__, {getattr(ferrorpc, name).__all__[0]}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert importlib.import_module(f"ferrorpc.{name}") is getattr(ferrorpc, name)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ferrorpc.no_such_name


def test_the_testing_kit_can_be_listed_and_imported_without_pytest() -> None:
    code = "import sys; sys.modules['pytest'] = None; from ferrorpc.testing import *; run_world(1, print); "
    code += "import inspect, ferrorpc.testing; inspect.getmembers(ferrorpc.testing)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", [name for name in ferrorpc.__all__ if inspect.isroutine(getattr(ferrorpc, name))])
def test_hints_of_functions_can_be_read_at_run_time(name: str) -> None:
    assert typing.get_type_hints(getattr(ferrorpc, name))


@pytest.mark.parametrize("name", [name for name in ferrorpc.__all__ if inspect.isclass(getattr(ferrorpc, name))])
def test_hints_of_methods_can_be_read_at_run_time(name: str) -> None:
    """As documentation, dependency injection and notebooks do."""
    members = inspect.getmembers(getattr(ferrorpc, name), lambda member: inspect.isfunction(member) or inspect.ismethod(member))
    for method, function in members:
        if function.__module__.startswith("ferrorpc") and (not method.startswith("_") or method in ("__init__", "__call__")):
            typing.get_type_hints(function)
