"""A stream tells shared memory how many operations it may have under way, and when it is over."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.execution import Prepared
from ferrorpc.guard import Latch
from ferrorpc.operations.dispatch import Dispatch
from ferrorpc.operations.stream import Stream


class Arena:
    """Notes what it is told of streams."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def open_stream(self, stream: int, channels: int) -> None:
        self.told.append(("opened", stream, channels))

    def let_go(self, stream: int) -> None:
        self.told.append(("over", stream))


class Asked(Exception):
    """What a stream wanted to be prepared."""


class Asking(Dispatch):
    def prepared(self, operation: Operation, *fields: Any, unordered: bool = False, **more: Any) -> Prepared:
        raise Asked(Call(operation, *fields, unordered=unordered, **more))


@pytest.fixture
def arena() -> Arena:
    return Arena()


@pytest.fixture
def dispatch(arena: Arena) -> Dispatch:
    capabilities = SimpleNamespace(device_arrays=False)
    backend: Any = SimpleNamespace(
        group_id=0, session=None, latch=Latch(), arena=arena, capabilities=capabilities, open_stream=lambda stream: None
    )
    return Asking(backend, 20.0)


def test_it_says_how_many_operations_it_has_under_way_and_when_it_starts_no_more(dispatch: Dispatch, arena: Arena) -> None:
    first, second = Stream(dispatch, 8), Stream(dispatch, None)
    assert arena.told == [("opened", 1, 8)]
    del first
    gc.collect()
    assert arena.told[1:] == [("over", 1)]
    del second
    gc.collect()
    assert arena.told[2:] == [("over", 2)]


def test_what_may_start_in_any_order_is_not_what_was_prepared_for_a_fixed_one(dispatch: Dispatch) -> None:
    asked = []
    for channels in (4, None):
        with pytest.raises(Asked) as raised:
            Stream(dispatch, channels).all_reduce(np.ones(3), 0)
        asked.append(raised.value.args)
    assert [call.unordered for (call,) in asked] == [False, True]
