"""What the parts of the contract suite have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ferrorpc.group import ProcessGroup
from ferrorpc.testing.reference import check_near, check_same, operators
from ferrorpc.types import DType, ReduceOp

Array = np.ndarray[Any, Any]

on_every_size = pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
on_some_sizes = pytest.mark.parametrize("size", [2, 4])


class Contract(ABC):
    """A suite of tests that run in worlds.

    A backend that adds in an order of its own says so in `in_rank_order`: then its sums must be right within rounding, and
    those of integers exact. One that lacks operators says so in `operators`.
    """

    in_rank_order = True

    @abstractmethod
    def world(self, size: int, fn: Callable[[ProcessGroup], Any]) -> list[Any]:
        """Runs fn(group) on every rank of a new world of `size`; the results in rank order. Raises what a rank raises."""

    def operators(self, dtype: DType) -> list[ReduceOp]:
        """What can be tried with a dtype, of what means something for it."""
        return operators(dtype)

    def check_sum(self, found: Any, expected: Array, what: str = "") -> None:
        """Whether a reduction gave the left fold in rank order: bit for bit where that is promised."""
        (check_same if self.in_rank_order or expected.dtype.kind in "biu" else check_near)(found, expected, what)
