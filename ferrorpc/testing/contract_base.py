"""What the parts of the contract suite have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ferrorpc.group import ProcessGroup

Array = np.ndarray[Any, Any]

on_every_size = pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
on_some_sizes = pytest.mark.parametrize("size", [2, 4])


class Contract(ABC):
    """A suite of tests that run in worlds."""

    @abstractmethod
    def world(self, size: int, fn: Callable[[ProcessGroup], Any]) -> list[Any]:
        """Runs fn(group) on every rank of a new world of `size`; the results in rank order. Raises what a rank raises."""
