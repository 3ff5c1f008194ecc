"""Blocking calls of NumPy arrays in shared memory take the fast path, with the results of the general path."""

from __future__ import annotations

import contextlib
import gc
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ferrorpc.errors import (
    CollectiveMismatchError,
    FerroError,
    GroupAbortedError,
    LimitExceededError,
    TensorMismatchError,
)
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.operations.fast_path import GENERAL_PATH, FastPath
from ferrorpc.testing import run_groups
from tests.integration.test_grpc_backend import GrpcWorld

Case = Callable[[ProcessGroup, dict[str, Any]], Any]
"""Calls an operation with these further arguments."""


def rows(group: ProcessGroup, dtype: str = "float32", width: int = 3) -> np.ndarray:
    """Distinct numbers on every rank: size rows."""
    first = 100 * (group.rank + 1)
    return np.arange(first, first + width * group.size).reshape(group.size, width).astype(dtype)


def line(group: ProcessGroup, count: int = 5, dtype: str = "float32") -> np.ndarray:
    return np.arange(group.rank, group.rank + count).astype(dtype)


def at_root(group: ProcessGroup, x: Any, root: int = 1) -> Any:
    return x if group.rank == root else None


def into(call: Callable[[np.ndarray], Any], out: Any) -> Any:
    """What an operation returns, whether that is `out`, and what is in it."""
    result = call(out)
    return result, result is out, out


CASES: dict[str, Case] = {
    "all_reduce": lambda g, k: g.all_reduce(line(g), **k),
    "all_reduce mean into": lambda g, k: into(lambda out: g.all_reduce(line(g), "mean", out=out, **k), np.zeros(5, np.float32)),
    "all_reduce in place": lambda g, k: into(lambda out: g.all_reduce(out, out=out, **k), line(g)),
    "all_reduce of bools": lambda g, k: g.all_reduce(line(g) > 1, "bor", **k),
    "all_reduce mean of integers": lambda g, k: g.all_reduce(line(g, dtype="int32"), "mean", **k),
    "all_reduce no operator": lambda g, k: g.all_reduce(line(g), "plus", **k),
    "all_reduce None": lambda g, k: g.all_reduce(line(g), None, **k),
    "all_reduce of objects": lambda g, k: g.all_reduce(np.array([None]), **k),
    "all_reduce of other byte order": lambda g, k: g.all_reduce(line(g).astype(">f4"), **k),
    "all_reduce strided": lambda g, k: g.all_reduce(line(g)[::2], **k),
    "all_reduce single": lambda g, k: g.all_reduce(np.array(g.rank + 1.0), **k),
    "all_reduce number": lambda g, k: g.all_reduce(g.rank + 1, **k),
    "reduce": lambda g, k: g.reduce(line(g), 1, **k),
    "reduce max into": lambda g, k: into(lambda out: g.reduce(line(g), 1, "max", out=out, **k), np.zeros(5, np.float32)),
    "reduce in place": lambda g, k: into(lambda out: g.reduce(out, 1, out=out, **k), line(g)),
    "reduce of a grid": lambda g, k: g.reduce(rows(g), 1, **k),
    "reduce of a single": lambda g, k: g.reduce(np.array(g.rank + 1.0), 1, **k),
    "reduce into objects": lambda g, k: g.reduce(line(g), 1, out=np.array([None] * 5), **k),
    "reduce to no rank": lambda g, k: g.reduce(line(g), 9, **k),
    "reduce to a float": lambda g, k: g.reduce(line(g), 1.0, **k),
    "reduce to numpy's 1": lambda g, k: g.reduce(line(g), np.int64(1), **k),
    "broadcast": lambda g, k: g.broadcast(at_root(g, rows(g)), 1, **k),
    "broadcast of everyone's": lambda g, k: g.broadcast(rows(g), 1, **k),
    "broadcast in place": lambda g, k: into(lambda out: g.broadcast(out, 1, out=out, **k), rows(g)),
    "broadcast into": lambda g, k: into(
        lambda out: g.broadcast(at_root(g, rows(g)), 1, out=out, **k), np.zeros((g.size, 3), "f4")
    ),
    "broadcast of bfloat16": lambda g, k: g.broadcast(at_root(g, line(g).astype(ml_dtypes.bfloat16)), 1, **k),
    "broadcast of bfloat16 into its bits": lambda g, k: g.broadcast(
        at_root(g, line(g).astype(ml_dtypes.bfloat16)), 1, out=None if g.rank == 1 else np.zeros(5, np.uint16), **k
    ),
    "broadcast into another shape": lambda g, k: into(
        lambda out: g.broadcast(at_root(g, line(g)), 1, out=out, **k), np.zeros(5 if g.rank == 1 else 6, np.float32)
    ),
    "broadcast into another dtype": lambda g, k: into(
        lambda out: g.broadcast(at_root(g, line(g)), 1, out=out, **k), np.zeros(5, np.float32 if g.rank == 1 else np.float64)
    ),
    "broadcast of nothing": lambda g, k: g.broadcast(None, 1, **k) if g.rank == 1 else None,
    "broadcast of no elements": lambda g, k: g.broadcast(at_root(g, np.zeros((0, 3))), 1, **k),
    "broadcast of a single": lambda g, k: g.broadcast(at_root(g, np.array(7, np.int8)), 1, **k),
    "broadcast into what is read-only": lambda g, k: into(
        lambda out: g.broadcast(at_root(g, line(g)), 1, out=out, **k), read_only(line(g))
    ),
    "gather": lambda g, k: g.gather(line(g, 2 + g.rank), 1, **k),
    "gather into": lambda g, k: into(lambda out: g.gather(rows(g)[0], 1, out=out, **k), np.zeros(3 * g.size, np.float32)),
    "gather into a list": lambda g, k: g.gather(line(g), 1, out=[np.zeros(5, np.float32) for _ in range(g.size)], **k),
    "gather into objects": lambda g, k: g.gather(line(g), 1, out=np.array([None] * 5 * g.size), **k),
    "gather of out": lambda g, k: into(lambda out: g.gather(out, 1, out=out, **k), line(g)),
    "gather of nothing into itself": lambda g, k: into(lambda out: g.gather(out, 1, out=out, **k), line(g, 0)),
    "scatter": lambda g, k: g.scatter(at_root(g, list(rows(g))), 1, **k),
    "scatter of one array": lambda g, k: g.scatter(at_root(g, rows(g).reshape(-1)), 1, **k),
    "scatter of uneven": lambda g, k: g.scatter(at_root(g, [line(g, 1 + to) for to in range(g.size)]), 1, **k),
    "scatter into": lambda g, k: into(
        lambda out: g.scatter(at_root(g, list(rows(g))), 1, out=out, **k), np.zeros(3, np.float32)
    ),
    "scatter of everyone's": lambda g, k: g.scatter(list(rows(g)), 1, **k),
    "scatter of too few": lambda g, k: g.scatter([line(g)], 1, **k) if g.rank == 1 else None,
    "scatter of two dtypes": lambda g, k: (
        g.scatter([line(g), *[line(g, dtype="float64")] * (g.size - 1)], 1, **k) if g.rank == 1 else None
    ),
    "all_gather": lambda g, k: g.all_gather(line(g), **k),
    "all_gather of uneven": lambda g, k: g.all_gather(line(g, 1 + g.rank), **k),
    "all_gather of singles": lambda g, k: g.all_gather(np.array(g.rank), **k),
    "all_gather into one": lambda g, k: into(lambda out: g.all_gather(line(g), out=out, **k), np.zeros(5 * g.size, np.float32)),
    "all_gather into rows": lambda g, k: into(
        lambda out: g.all_gather(line(g), out=out, **k), np.zeros((g.size, 5), np.float32)
    ),
    "all_gather into many": lambda g, k: g.all_gather(line(g), out=[np.zeros(5, np.float32) for _ in range(g.size)], **k),
    "all_gather into another dtype": lambda g, k: g.all_gather(line(g), out=np.zeros(5 * g.size), **k),
    "all_gather into objects": lambda g, k: g.all_gather(line(g), out=np.array([None] * 5 * g.size), **k),
    "all_gather into a single": lambda g, k: g.all_gather(line(g), out=np.zeros((), np.float32), **k),
    "all_gather of a part of out": lambda g, k: into(
        lambda out: g.all_gather(out[5 * g.rank : 5 * g.rank + 5], out=out, **k), np.arange(5 * g.size) + 1000.0 * g.rank
    ),
    "all_gather of out": lambda g, k: into(lambda out: g.all_gather(out, out=out, **k), line(g)),
    "all_gather of nothing into itself": lambda g, k: into(lambda out: g.all_gather(out, out=out, **k), line(g, 0)),
    "all_to_all": lambda g, k: g.all_to_all(list(rows(g)), **k),
    "all_to_all of a tuple": lambda g, k: g.all_to_all(tuple(rows(g)), **k),
    "all_to_all of one": lambda g, k: g.all_to_all(rows(g, "complex64"), **k),
    "all_to_all of uneven": lambda g, k: g.all_to_all([line(g, to + g.rank) for to in range(g.size)], **k),
    "all_to_all of strided": lambda g, k: g.all_to_all([line(g, 6)[::2] for _ in range(g.size)], **k),
    "all_to_all into": lambda g, k: into(lambda out: g.all_to_all(rows(g), out=out, **k), np.zeros((g.size, 3), np.float32)),
    "all_to_all in place": lambda g, k: into(lambda out: g.all_to_all(out, out=out, **k), rows(g)),
    "all_to_all of nothing in place": lambda g, k: into(lambda out: g.all_to_all(out, out=out, **k), rows(g, width=0)),
    "all_to_all of parts of out": lambda g, k: into(lambda out: g.all_to_all(list(out)[::-1], out=out, **k), rows(g)),
    "reduce_scatter": lambda g, k: g.reduce_scatter(rows(g), **k),
    "reduce_scatter of a list": lambda g, k: g.reduce_scatter(list(rows(g)), "min", **k),
    "reduce_scatter of halves": lambda g, k: g.reduce_scatter(rows(g, "float16"), "mean", **k),
    "reduce_scatter of grids": lambda g, k: g.reduce_scatter([rows(g)] * g.size, "max", **k),
    "reduce_scatter of singles": lambda g, k: g.reduce_scatter([np.array(g.rank + 1.0)] * g.size, **k),
    "reduce_scatter in place": lambda g, k: into(lambda out: g.reduce_scatter(out, out=out, **k), rows(g)),
    "reduce_scatter into": lambda g, k: into(
        lambda out: g.reduce_scatter(list(rows(g)), out=out, **k), np.zeros(3, np.float32)
    ),
    "reduce_scatter into a part": lambda g, k: in_a_part(g, k),
    "reduce_scatter of too many": lambda g, k: g.reduce_scatter([line(g)] * (g.size + 1), **k),
    "reduce_scatter of a single": lambda g, k: g.reduce_scatter(np.array(3.0), **k),
}


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def in_a_part(group: ProcessGroup, options: dict[str, Any]) -> Any:
    """Its result overwrites a part that other ranks' results are made of."""
    parts = rows(group)
    return group.reduce_scatter(list(parts), out=parts[1 - group.rank % 2], **options), parts


def told(value: Any) -> Any:
    """What can be compared: kinds, dtypes, shapes, bytes, who owns the memory."""
    if isinstance(value, np.ndarray):
        return type(value), value.dtype.str, value.shape, value.tobytes(), value.flags.writeable
    if isinstance(value, list | tuple):
        return type(value), [told(each) for each in value]
    return value


def outcome(case: Case, group: ProcessGroup, options: dict[str, Any]) -> Any:
    try:
        result = case(group, options)
    except FerroError as error:
        return type(error), re.sub(r" #\d+", " #N", str(error))
    owned = [each.flags.owndata for each in (result if isinstance(result, list) else [result]) if isinstance(each, np.ndarray)]
    return told(result), owned


@pytest.fixture(params=[2, 3])
def world(request: pytest.FixtureRequest) -> Iterator[list[ProcessGroup]]:
    with GrpcWorld(request.param, transport="shared_memory") as world:
        yield [ProcessGroup(backend, timeout=30.0) for backend in world.backends]


@pytest.mark.parametrize("name", CASES)
def test_what_comes_of_a_call_is_what_comes_of_it_in_the_general_way(world: list[ProcessGroup], name: str) -> None:
    check_against_the_general_path(world, CASES[name])


def check_against_the_general_path(world: list[ProcessGroup], case: Case) -> None:
    def both(group: ProcessGroup) -> None:
        fast_path, group._fast_path = group._fast_path, None
        general = outcome(case, group, {})
        group._fast_path = fast_path
        for timeout in (None, 30.0) * 3:  # what is remembered of the first must hold for the others, on every channel
            assert outcome(case, group, {"timeout": timeout}) == general

    run_groups(world, both)


def test_an_error_of_out_names_the_operation_with_its_number(world: list[ProcessGroup]) -> None:
    def body(group: ProcessGroup) -> None:
        group.barrier()
        whole, parts = np.zeros(5 * group.size), [np.zeros(5) for _ in range(group.size)]
        for number, out, name in ((2, whole, "the part of out for it"), (3, parts, "out")):
            message = rf"^all_gather\(float32\) #{number} gave float32\[5\], but {name} is float64\[5\]"
            with pytest.raises(TensorMismatchError, match=message):
                group.all_gather(line(group), out=out)

    run_groups(world, body)


def test_the_short_way_is_taken(world: list[ProcessGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    """What has every operation: contiguous NumPy arrays, with `out` and without."""
    names = ("all_reduce", "reduce", "broadcast", "gather", "scatter", "all_gather", "all_to_all", "reduce_scatter")
    taken = calls_taken(monkeypatch, *names)
    usual = ["all_reduce", "all_reduce mean into", "all_reduce in place", "reduce", "reduce in place", "broadcast"]
    usual += [
        "broadcast in place",
        "broadcast into",
        "gather",
        "gather into",
        "scatter",
        "scatter of one array",
        "scatter into",
        "all_gather",
    ]
    usual += ["all_gather into one", "all_to_all", "all_to_all of one", "all_to_all into"]
    usual += ["reduce_scatter", "reduce_scatter of a list", "reduce_scatter into"]
    run_groups(world, lambda group: [CASES[name](group, {}) for name in usual])
    assert sorted(taken) == sorted(name.split()[0] for name in usual for _ in world)


def test_what_the_general_path_has_read_runs_in_the_short_way(
    world: list[ProcessGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = calls_taken(monkeypatch, "run")
    read = ["all_reduce strided", "all_reduce number", "gather into a list", "all_gather into many", "all_to_all of a tuple"]
    run_groups(world, lambda group: [CASES[name](group, {}) for name in read])
    assert len(taken) == len(read) * len(world)


def calls_taken(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Gets the name of each call of these methods of the fast path that does not end in the general one."""
    taken: list[str] = []
    for name in names:
        way = getattr(FastPath, name)

        def seen(self: FastPath, *args: Any, way: Any = way, name: str = name) -> Any:
            result = way(self, *args)
            if result is not GENERAL_PATH:
                taken.append(name)
            return result

        monkeypatch.setattr(FastPath, name, seen)
    return taken


def test_a_call_that_fails_keeps_no_arrays_until_the_next_garbage_collection(world: list[ProcessGroup]) -> None:
    """They may be large, and a program that forms its group again makes new ones."""

    def body(group: ProcessGroup) -> bool:
        x = np.ones(4 + group.rank, np.float32)
        kept = weakref.ref(x)
        with contextlib.suppress(CollectiveMismatchError):
            group.all_reduce(x)
        del x
        return kept() is None

    gc.disable()
    try:
        assert all(run_groups(world, body))
    finally:
        gc.enable()


def test_a_call_that_fails_as_its_group_ends_keeps_no_arrays_either(world: list[ProcessGroup]) -> None:
    """On Python 3.12.1 and 3.13.0 an iterator that was closed before its first step would keep them."""

    def fail(steps: object) -> bool:
        world[0].abort("over")
        raise RuntimeError("a step fails")

    x = np.ones(4, np.float32)
    kept = weakref.ref(x)
    path: Any = world[0]._fast_path
    path._spin = fail
    gc.disable()
    try:
        with pytest.raises(GroupAbortedError, match="over"):
            world[0].all_reduce(x)
        del x
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
def test_no_operation_returns_on_a_rank_that_has_found_what_ends_the_generation(transport):
    with GrpcWorld(2, transport=transport) as world:
        for backend in world.backends:  # the coordinator's word comes after a moment
            tell = backend.latch._report
            backend.latch._report = lambda cause, of, tell=tell: SYSTEM_CLOCK.call_at(
                SYSTEM_CLOCK.now() + 0.2, lambda: tell(cause, of)
            )

        def body(group):
            work = group.all_reduce(np.ones(3 + group.rank, np.float32), async_op=True)
            for call in (work.wait, lambda: group.all_reduce(np.ones(4, np.float32)), group.barrier):
                with pytest.raises(CollectiveMismatchError):
                    call()

        run_groups([ProcessGroup(backend, timeout=60.0) for backend in world.backends], body)


def test_what_a_signal_handler_raises_right_after_an_operation_got_its_number_ends_the_generation(monkeypatch):
    """The other ranks wait for that number, and would do so until their timeout."""
    with GrpcWorld(2, transport="shared_memory") as world:

        def body(group):
            x = np.ones(4, np.float32)
            group.all_reduce(x)
            if group.rank == 0:

                def struck(text):
                    raise TimeoutError

                with monkeypatch.context() as patch:
                    patch.setattr(group.session.activity, "note", struck)
                    with pytest.raises(TimeoutError):
                        group.all_reduce(x)
            with pytest.raises(GroupAbortedError, match=r"rank 0 ended the group: TimeoutError.* during all_reduce"):
                group.all_reduce(x)

        run_groups([ProcessGroup(backend, timeout=60.0) for backend in world.backends], body)


def test_a_numbered_operation_that_finds_no_shared_memory_ends_the_generation():
    """The other ranks wait for this rank's operation of that number."""
    with GrpcWorld(2, transport="shared_memory") as world:

        def body(group):
            stream = group.stream(channels=4)
            group.barrier()
            if group.rank == 0:
                group._backend.arena.bank = full
            with pytest.raises(LimitExceededError, match="no shared memory is left"):
                stream.all_reduce(np.ones(4, np.float32), 0).wait()

        def full(stream):
            raise LimitExceededError("no shared memory is left")

        run_groups([ProcessGroup(backend, timeout=60.0) for backend in world.backends], body)
