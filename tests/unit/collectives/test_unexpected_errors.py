"""Whose an error is that ends an operation: the user's, or one of this library."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ferrorpc.collectives.driver import unexpected
from ferrorpc.errors import ErrorCode, FerroError, GroupAbortedError
from ferrorpc.guard import Latch


def told(call: Callable[[], object], *, of_the_library: bool = False) -> FerroError:
    """What the others hear where a function raises, which stands for the last in user code; or for this library's own."""
    try:
        call()
    except Exception as error:
        trace = error.__traceback__
        assert trace is not None
        assert trace.tb_next is not None
        below = trace.tb_next.tb_next if of_the_library else trace
        return unexpected("recv", error.with_traceback(below))
    raise AssertionError("it has not failed")


def within_ferrorpc() -> object:
    nothing: Any = None
    return Latch.check(nothing)


@pytest.mark.parametrize("call", [lambda: json.loads("{"), lambda: np.zeros(2).reshape(3), lambda: {}["key"]])
def test_an_error_is_the_users_also_where_a_library_raised_it_that_they_called(call: Callable[[], object]) -> None:
    error = told(call)
    assert isinstance(error, GroupAbortedError)
    assert error.cause.endswith(" during recv")
    assert error.hint.startswith(f"see {__file__}:")


@pytest.mark.parametrize(
    ("call", "of_the_library"), [(within_ferrorpc, False), (lambda: json.loads("{"), True)], ids=["here", "in what it calls"]
)
def test_an_error_in_this_library_is_a_bug_of_it_whoever_called(call: Callable[[], object], of_the_library: bool) -> None:
    error = told(call, of_the_library=of_the_library)
    assert error.code == ErrorCode.INTERNAL
    assert error.hint == FerroError.default_hint
