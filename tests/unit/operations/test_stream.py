"""A stream tells shared memory how many operations it may have under way, and when it is over."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ferrorpc import ProcessGroup, UsageError
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.execution import Prepared
from ferrorpc.guard import SYSTEM_CLOCK, Latch
from ferrorpc.operations.dispatch import Dispatch
from ferrorpc.operations.stream import Stream
from ferrorpc.testing import run_world


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
        clock=SYSTEM_CLOCK,
        group_id=0,
        session=None,
        latch=Latch(),
        arena=arena,
        capabilities=capabilities,
        open_stream=lambda stream: None,
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


WRONG: dict[str, tuple[Callable[[ProcessGroup], Any], str]] = {
    "a negative number": (lambda group: group.stream().all_reduce(np.ones(3), -1), "number=-1"),
    "a fraction": (lambda group: group.stream().all_gather(np.ones(3), 1.5), "number=1.5"),  # type: ignore[arg-type]
    "a number that no word holds": (lambda group: group.stream().all_reduce(np.ones(3), 1 << 60), "number=1152921504606846976"),
    "a root that there is not": (lambda group: group.stream().broadcast(np.ones(3), 0, root=2), "root is 2"),
    "no channels": (lambda group: group.stream(0), "channels=0"),
    "half a channel": (lambda group: group.stream(1.5), "channels=1.5"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_refused_and_the_group_stays_open(call: Callable[[ProcessGroup], Any], message: str) -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(UsageError, match=message):
            call(group)
        group.barrier()

    run_world(2, body)
