"""One error vocabulary: each number of the proto enum is one class, and each class comes back from the wire as itself."""

from __future__ import annotations

import ast
import inspect

import pytest

from ferrorpc import errors
from ferrorpc.errors import ErrorCode, FerroError, type_of
from ferrorpc.v1 import error_pb2
from ferrorpc.wire import error_detail
from tests.house.tree import ROOT, name_of, package_files, syntax_of

PREFIX = "ERROR_CODE_"


def classes() -> dict[str, type[FerroError]]:
    """Every error class of the module, by name."""
    found = inspect.getmembers(errors, lambda value: inspect.isclass(value) and issubclass(value, FerroError))
    return dict(found)


def test_the_proto_enum_and_the_codes_are_one_list() -> None:
    proto = {name.removeprefix(PREFIX): number for name, number in error_pb2.ErrorCode.items() if number}
    assert proto == {code.name: code.value for code in ErrorCode}


def test_codes_and_classes_are_one_to_one() -> None:
    assert set(type_of) == set(ErrorCode)
    assert sorted(cls.__name__ for cls in type_of.values()) == sorted(classes())
    assert all(type_of[cls.code] is cls for cls in classes().values())


@pytest.mark.parametrize("cls", classes().values(), ids=classes())
def test_a_class_is_called_as_its_code_and_says_what_to_try(cls: type[FerroError]) -> None:
    if cls is not FerroError:
        assert cls.__name__.removesuffix("Error").lower() == cls.code.name.replace("_", "").lower()
        assert cls.default_hint != FerroError.default_hint
    assert cls.default_hint == cls.default_hint.strip().rstrip(".")
    assert inspect.getdoc(cls)


def test_every_wrong_call_of_the_library_is_told_what_to_do_in_its_place() -> None:
    """The class's own hint, to see the docstring, tells a user little."""
    library = (path for path in package_files() if (ROOT / "ferrorpc") in path.parents)
    calls = ((path, node) for path in library for node in ast.walk(syntax_of(path)) if isinstance(node, ast.Call))
    without = [
        f"{name_of(path)}:{call.lineno}"
        for path, call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id == "UsageError"
        and "hint" not in {each.arg for each in call.keywords}
    ]
    assert without == []


FIELDS = {
    "rank": 3,
    "reason": "exit code 1",
    "cause": "nan",
    "missing": [1, 2],
    "waiting_on": [2],
    "signatures": {0: "all_reduce(op=sum, float32[3])", 1: "barrier()"},
    "retry_after_seconds": 0.5,
    "durable": True,
    "names": ["a-0", "a-1"],
}
"""Every type of fact the wire knows."""


@pytest.mark.parametrize("code", list(ErrorCode), ids=lambda code: code.name)
def test_an_error_crosses_the_wire_unchanged(code: ErrorCode) -> None:
    sent = FerroError.restore(code, "rank 3 said so", "look at its log", True, FIELDS)
    detail = error_pb2.ErrorDetail.FromString(error_detail.detail_of(sent).SerializeToString())
    received = error_detail.restore(detail)
    assert type(received) is type(sent)
    assert str(received) == str(sent)
    assert (received.retryable, received.fields) == (True, FIELDS)
