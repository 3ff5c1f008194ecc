"""The base class of all parts of the contract suite."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Final

import numpy as np
import pytest

from ferrorpc.group import ProcessGroup
from ferrorpc.testing.reference import check_near, check_same, operators
from ferrorpc.types import DType, ReduceOp

Array = np.ndarray[Any, Any]
FLOAT: Final = DType.FLOAT32
FIVE_MEGABYTES: Final = 5_000_000 // DType.FLOAT32.itemsize
"""So many elements of FLOAT."""

on_every_size = pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
on_some_sizes = pytest.mark.parametrize("size", [2, 4])


def on_every_rank(body: Callable[..., None]) -> Callable[..., None]:
    """Makes a test of what every rank of a world does: body(self, group, size), and what else the test is parametrised with."""

    signature = inspect.signature(body)
    signature = signature.replace(parameters=[each for name, each in signature.parameters.items() if name != "group"])

    def test(*given: Any, **named: Any) -> None:
        asked = signature.bind(*given, **named).arguments
        asked["self"].world(asked["size"], lambda group: body(group=group, **asked))

    update_wrapper(test, body)
    test.__signature__ = signature  # type: ignore[attr-defined]  # what pytest provides
    return test


def check(truth: object, what: str) -> None:
    """Raises AssertionError unless something is true, also where Python runs without assertions."""
    if not truth:
        raise AssertionError(what)


class Contract(ABC):
    """Tests that run in worlds of several ranks.

    Attributes:
        in_rank_order: whether the backend adds in rank order. If not, sums must be right within rounding, and those of integers
            exact.
    """

    in_rank_order = True

    @abstractmethod
    def world(self, size: int, fn: Callable[[ProcessGroup], Any]) -> list[Any]:
        """Runs fn(group) on every rank of a new world of `size` ranks. Returns the results in rank order; raises as they do."""

    def operators(self, dtype: DType) -> list[ReduceOp]:
        """The operators to test with a dtype. To be overridden for a backend that lacks some."""
        return operators(dtype)

    def check_sum(self, found: Any, expected: Array, what: str = "") -> None:
        """Raises AssertionError unless a reduction gave the left fold in rank order, bit for bit where that is promised."""
        (check_same if self.in_rank_order or expected.dtype.kind in "biu" else check_near)(found, expected, what)
