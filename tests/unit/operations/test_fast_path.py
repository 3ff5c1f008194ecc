"""The fast path takes only cached calls, and hands failures to the general path, which breaks the generation."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

from ferrorpc import ProcessGroup, SimulatedBackend
from ferrorpc.collectives.arena.prepared import ArenaPrepared
from ferrorpc.collectives.arena.select import prepare
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.execution import Execution
from ferrorpc.errors import CollectiveMismatchError, FerroError, GroupClosedError, PeerLostError, UsageError
from ferrorpc.guard import SYSTEM_CLOCK, Guard, Latch
from ferrorpc.operations.dispatch import PREPARED_CALLS
from ferrorpc.operations.fast_path import GENERAL_PATH, FastPath
from ferrorpc.types import DType, ReduceOp, TensorSpec
from tests.unit.collectives.shared_world import SharedWorld


class General:
    """Stands for the general path of rank 0: keeps what it is handed, and does not drive it."""

    def __init__(self, world: SharedWorld) -> None:
        self.arena = world.arenas[0]
        self.notes: list[str] = []
        session = SimpleNamespace(activity=SimpleNamespace(note=self.notes.append))
        self.backend = SimpleNamespace(latch=Latch(), session=session, group_id=0)
        self.telemetry = None
        self.timeout = 20.0
        self.refuses = False
        self.handed: list[Execution] = []
        self.alive: WeakSet[ArenaPrepared] = WeakSet()
        self._numbers = itertools.count(1)

    def check_open(self) -> None:
        self.backend.latch.check()
        raise GroupClosedError("the group was closed")

    def next_number(self) -> int:
        return next(self._numbers)

    def struck(self, label: str, error: BaseException) -> None:
        """Not by a signal handler."""

    def guard(self, seconds: float) -> Guard:
        return Guard(SYSTEM_CLOCK, self.backend.latch, seconds)

    def prepared(self, *fields: Any) -> ArenaPrepared:
        found = prepare(self.arena, Call(*fields))
        assert found is not None
        self.alive.add(found)
        return found

    def run(self, execution: Execution) -> None:
        self.handed.append(execution)


def call_of(count: int) -> Call:
    return Call(Operation.ALL_REDUCE, (TensorSpec(DType.FLOAT64, (count,)),), ReduceOp.SUM)


@pytest.fixture
def world() -> Iterator[SharedWorld]:
    with SharedWorld(2) as world:
        yield world


def test_a_failure_is_handed_to_the_general_path(world: SharedWorld) -> None:
    general = General(world)
    fast = FastPath(general, general.arena)  # type: ignore[arg-type]
    world.begin(1, call_of(5), [np.ones(5)], number=1).advance()
    assert fast.all_reduce(np.ones(4), "sum", None, None) is not GENERAL_PATH
    assert general.notes == [call_of(4).signature], "what this rank was last seen in"
    (execution,) = general.handed
    with pytest.raises(CollectiveMismatchError):
        execution.advance()


def test_a_timeout_of_its_own_limits_a_call_that_has_to_wait(world: SharedWorld) -> None:
    general = General(world)
    fast = FastPath(general, general.arena)  # type: ignore[arg-type]
    fast.all_reduce(np.ones(4), "sum", None, 5)
    fast.barrier(2.5)
    fast.barrier(None)
    assert [execution.guard.seconds for execution in general.handed] == [5.0, 2.5, general.timeout]


@pytest.mark.parametrize("timeout", [-1.0, "soon", float("nan"), True])
def test_a_timeout_that_is_none_is_refused_before_anything_begins(world: SharedWorld, timeout: Any) -> None:
    general = General(world)
    fast = FastPath(general, general.arena)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no number of seconds"):
        fast.all_reduce(np.ones(4), "sum", None, timeout)
    assert general.next_number() == 1


def test_nothing_begins_once_the_group_is_closed_or_its_generation_over(world: SharedWorld) -> None:
    general = General(world)
    fast = FastPath(general, general.arena)  # type: ignore[arg-type]
    general.refuses = True
    with pytest.raises(GroupClosedError):
        fast.all_reduce(np.ones(4), "sum", None, None)
    general.refuses = False
    general.backend.latch.trip(PeerLostError(1, "gone"))
    for begin in (lambda: fast.all_reduce(np.ones(4), "sum", None, None), lambda: fast.barrier(None)):
        with pytest.raises(PeerLostError):
            begin()
    assert general.handed == []


@pytest.mark.parametrize("meanwhile", [False, True], ids=["before", "meanwhile"])
def test_nothing_returns_once_this_rank_has_found_what_ends_its_generation(world: SharedWorld, meanwhile: bool) -> None:
    general, spun = General(world), list[bool]()
    found = general.backend.latch.ended_here
    fast = FastPath(general, general.arena)  # type: ignore[arg-type]

    def spin(steps: object) -> bool:
        spun.append(True)
        found.append(PeerLostError(1, "gone"))
        return True

    fast._spin = spin
    if not meanwhile:
        found.append(PeerLostError(1, "gone"))
    with pytest.raises(GroupClosedError):  # what stands for the general path's answer
        fast.all_reduce(np.ones(4), "sum", None, None)
    assert (bool(spun), general.handed) == (meanwhile, [])


@pytest.mark.parametrize(
    "out",
    [np.zeros(4, np.float32), np.zeros(5), np.zeros(8)[::2], [0.0] * 4, np.zeros(4).astype(">f8")],
    ids=["dtype", "shape", "strided", "list", "byte order"],
)
def test_an_out_that_needs_more_than_writing_is_left_to_the_general_path(world: SharedWorld, out: Any) -> None:
    general = General(world)
    assert FastPath(general, general.arena).all_reduce(np.ones(4), "sum", out, None) is GENERAL_PATH  # type: ignore[arg-type]
    assert general.handed == []


@pytest.mark.parametrize("out", [np.zeros(4, np.float32), np.zeros(5), np.zeros(8)[::2]], ids=["dtype", "shape", "strided"])
def test_what_only_this_rank_would_refuse_begins_in_the_general_path(world: SharedWorld, out: np.ndarray) -> None:
    general, x = General(world), np.ones(4)
    fast = FastPath(general, general.arena)  # type: ignore[arg-type]
    assert fast.reduce(x, 0, "sum", out, None) is GENERAL_PATH
    assert fast.broadcast(x, 0, out, None) is GENERAL_PATH
    assert fast.scatter([x, np.ones(3)], 0, out, None) is GENERAL_PATH
    assert fast.reduce_scatter([x, np.ones(3)], "sum", out, None) is GENERAL_PATH
    assert general.handed == []
    assert general.next_number() == 1


def test_an_out_that_overlaps_in_part_is_left_to_the_general_path(world: SharedWorld) -> None:
    general, memory = General(world), np.ones(5)
    fast = FastPath(general, general.arena)  # type: ignore[arg-type]
    assert fast.all_reduce(memory[:4], "sum", memory[1:], None) is GENERAL_PATH
    x = memory[:4]
    assert fast.all_reduce(x, "sum", x, None) is x


def test_a_program_of_ever_other_shapes_does_not_keep_what_was_prepared_for_each(world: SharedWorld) -> None:
    general = General(world)
    fast = FastPath(general, general.arena)  # type: ignore[arg-type]
    fast._run = lambda *_: None  # type: ignore[method-assign]
    for count in range(2 * PREPARED_CALLS):
        fast.all_reduce(np.ones(count), "sum", None, None)
    assert len(general.alive) <= PREPARED_CALLS + 1
    assert fast.all_reduce(np.ones(2 * PREPARED_CALLS), "sum", None, None) is not GENERAL_PATH, (
        "later shapes are as fast as the first"
    )


@pytest.mark.parametrize("root", [None, True, -1, 2, 0.0, "0", np.array([0, 1])])
def test_a_root_that_is_none_is_for_the_general_path_to_refuse(world: SharedWorld, root: Any) -> None:
    general = General(world)
    fast = FastPath(general, general.arena)  # type: ignore[arg-type]
    x = np.ones(2)
    assert fast.reduce(x, root, "sum", None, None) is GENERAL_PATH
    assert fast.gather(x, root, None, None) is GENERAL_PATH
    assert fast.broadcast(x if root is True else None, root, None, None) is GENERAL_PATH
    assert fast.scatter(None, root, None, None) is GENERAL_PATH
    assert not general.notes


@pytest.mark.parametrize("root", [0, 1])
def test_it_takes_every_rank_for_a_root(world: SharedWorld, root: int) -> None:
    general = General(world)
    x = np.ones(2)
    assert FastPath(general, general.arena).reduce(x, root, "sum", x, None) is (x if root == 0 else None)  # type: ignore[arg-type]
    assert len(general.handed) == 1, "the other rank has not begun"


ONE = np.ones(1)
CALLS = {
    "all_reduce": ((ONE,), {"wire": "bf16", "algorithm": "ring"}),
    "reduce": ((ONE,), {"wire": "bf16", "algorithm": "ring"}),
    "reduce_scatter": (([ONE],), {"wire": "bf16", "algorithm": "ring"}),
    "broadcast": ((ONE,), {"algorithm": "ring"}),
    "gather": ((ONE,), {}),
    "scatter": (([ONE],), {}),
    "all_gather": ((ONE,), {"algorithm": "ring"}),
    "all_to_all": (([ONE],), {"algorithm": "ring"}),
    "barrier": ((), {"algorithm": "ring"}),
}
"""Of each operation: its arguments, and the options it has besides timeout and async_op."""


@pytest.mark.parametrize("name", CALLS)
def test_a_call_with_an_option_is_for_the_general_path(name: str) -> None:
    """The fast path would ignore it. Only a timeout it takes."""
    group = ProcessGroup(SimulatedBackend.create_group(1)[0], timeout=5.0)
    asked: list[tuple[Any, ...]] = []

    def ask(*given: Any) -> Any:
        asked.append(given)
        return name == "barrier" or GENERAL_PATH

    group._fast_path = SimpleNamespace(**{name: ask})  # type: ignore[assignment]
    arguments, options = CALLS[name]
    getattr(group, name)(*arguments, timeout=5.0)
    assert [given[-1] for given in asked] == [5.0]
    for option, value in {"async_op": True, **options}.items():
        with contextlib.suppress(FerroError):  # a group of one has no algorithms
            getattr(group, name)(*arguments, **{option: value})
        assert len(asked) == 1, option
