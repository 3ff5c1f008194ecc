"""How the tests of the contract suites are made."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ferrorpc.testing.contract_base import on_every_rank


class TwoRanks:
    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def world(self, size: int, fn: Callable[[Any], Any]) -> list[Any]:
        return [fn(f"group of rank {rank}") for rank in range(size)]

    @on_every_rank
    def test_it(self, group: Any, size: int, count: int = 3) -> None:
        """What it tests."""
        self.seen.append((group, size, count))


def test_a_test_of_every_rank_can_be_called_in_all_ways_that_its_signature_allows() -> None:
    """As by a subclass with parameters of its own."""
    suite = TwoRanks()
    suite.test_it(2, 7)
    suite.test_it(size=1, count=8)
    suite.test_it(1)
    first, second = "group of rank 0", "group of rank 1"
    assert suite.seen == [(first, 2, 7), (second, 2, 7), (first, 1, 8), (first, 1, 3)]
    assert list(inspect.signature(suite.test_it).parameters) == ["size", "count"]
    assert TwoRanks.test_it.__doc__ == "What it tests."
