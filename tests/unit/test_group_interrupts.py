"""Ctrl-C, and memory that is full, at every point of an operation: the others learn of it, and a recv loses nothing."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import ferrorpc
from ferrorpc import FerroError, GroupAbortedError, LimitExceededError, ProcessGroup
from ferrorpc.backends.simulated import SimulatedBackend
from ferrorpc.collectives import driver, prepared
from ferrorpc.collectives.point_to_point import RecvExecution
from ferrorpc.ddp import synchroniser, zero
from ferrorpc.ddp.shards import Shard
from ferrorpc.guard import SystemClock
from ferrorpc.operations.dispatch import Dispatch
from ferrorpc.operations.results import Into, New, Result
from ferrorpc.testing import run_world
from ferrorpc.transports.inproc import InprocTransport
from ferrorpc.transports.mailbox import Mailbox
from tests.interrupts import InterruptAt
from tests.waiting import eventually

X = np.ones(3, np.float32)
LONG = np.ones(1 << 19, np.float32)
"""More than one chunk."""


class TimeLimit(BaseException):
    """As a test runner's signal handler raises it."""


def interrupt_the_first_wait(monkeypatch: pytest.MonkeyPatch, error: type[BaseException] = KeyboardInterrupt) -> None:
    """As Ctrl-C does, once."""

    def interrupted(*_: Any) -> None:
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(driver, "_wait", interrupted)


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeLimit])
def test_an_operation_that_is_interrupted_ends_the_generation_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """The others would wait for its part until their deadline."""

    def body(group: ProcessGroup) -> tuple[int, str]:
        half = group.subgroup([2, 1])
        group.store.set(f"made/{group.rank}", b"")
        if half is None or half.rank == 1:
            group.store.wait("interrupted")
        else:
            group.store.wait(["made/0", "made/1"])
            interrupt_the_first_wait(monkeypatch, error)
            with pytest.raises(error):
                half.all_reduce(X)
            group.store.set("interrupted", b"")
        with pytest.raises(GroupAbortedError) as broken:
            (half or group).all_reduce(X)
        return broken.value.rank, broken.value.cause

    for rank, cause in run_world(3, body, timeout=10.0):
        assert rank == 2
        assert re.fullmatch(error.__name__ + r" during all_reduce\(op=sum, float32\[3\]\).*", cause)


def of_a_step(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    optimizer = ferrorpc.ZeroOptimizer({"w": X.copy()}, group, ferrorpc.rules.SGD(0.1))
    interrupt_at(monkeypatch, zero, "flatten", group.rank == 0)
    return lambda: optimizer.step({"w": X})


def of_gradients(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    sync = ferrorpc.GradientSynchronizer({"w": X}, group)
    interrupt_at(monkeypatch, synchroniser, "flatten", group.rank == 0)
    return lambda: sync({"w": X})


def of_a_subgroup(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    interrupt_at(monkeypatch, SimulatedBackend, "split", group.rank == 0)
    return lambda: group.subgroup([0, 1])


def of_a_subgroup_that_was_agreed_on(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    agree = group._run

    def struck(*given: Any, **named: Any) -> None:
        agree(*given, **named)
        if "note" in named:
            monkeypatch.undo()
            raise KeyboardInterrupt

    if group.rank == 0:
        monkeypatch.setattr(group, "_run", struck)
    return lambda: group.subgroup([0, 1])


def of_a_mesh(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    interrupt_at(monkeypatch, ProcessGroup, "subgroup", group.rank == 0)
    return lambda: ferrorpc.Mesh({"row": 1, "column": 2}, group)


def interrupt_at(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, is_struck: bool) -> None:
    """As Ctrl-C does in the thread that calls this, once."""
    plain, me = getattr(place, name), threading.get_ident()

    def struck(*given: Any, **named: Any) -> Any:
        if is_struck and threading.get_ident() == me:
            monkeypatch.undo()
            raise KeyboardInterrupt
        return plain(*given, **named)

    monkeypatch.setattr(place, name, struck)


@pytest.mark.parametrize("call", [of_a_step, of_gradients, of_a_subgroup, of_a_subgroup_that_was_agreed_on, of_a_mesh])
def test_the_others_learn_of_an_interrupt_outside_of_operations(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[ProcessGroup, pytest.MonkeyPatch], Callable[[], object]]
) -> None:
    """Where this rank has sent nothing, or has nothing that the others have made."""

    def body(group: ProcessGroup) -> str:
        run = call(group, monkeypatch)
        group.barrier()
        if group.rank == 0:
            with pytest.raises(KeyboardInterrupt):
                run()
        with pytest.raises(GroupAbortedError) as broken:
            [use() for use in (run, partial(group.recv, 0))]
        return broken.value.cause

    assert run_world(2, body, timeout=10.0) == ["KeyboardInterrupt"] * 2


def test_of_what_an_optimizer_had_begun_when_it_was_interrupted_nobody_hears_that_nobody_looked_at_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def body(group: ProcessGroup) -> None:
        optimizer = ferrorpc.ZeroOptimizer(
            {"v": LONG.copy(), "w": LONG.copy()}, group, ferrorpc.rules.SGD(0.1), bucket_cap_mb=1
        )
        optimizer.step({"v": LONG, "w": LONG})
        latch, clock = group._backend.latch, group.session.clock
        if group.rank == 0:
            interrupt_at(monkeypatch, Shard, "extract", is_struck=True)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step({"v": LONG, "w": LONG})
        while latch.cause is None:  # without a look at it
            clock.parker().park(clock.now() + 0.1)
        gc.collect()

    run_world(2, body, timeout=10.0)
    assert "nobody looked" not in caplog.text


def test_an_error_of_a_signal_handler_is_the_users_own_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python calls handlers wherever the main thread is."""

    class Alarm(Exception):
        pass

    def struck(*_: Any) -> None:
        monkeypatch.undo()
        raise Alarm("tick")

    def body(group: ProcessGroup) -> tuple[int, str, bool]:
        if group.rank == 1:
            monkeypatch.setattr(driver, "_wait", struck)
            with pytest.raises(Alarm):
                group.recv(0)
            group.store.set("struck", b"")
        else:
            group.store.wait("struck")
        with pytest.raises(GroupAbortedError) as broken:
            group.barrier()
        return broken.value.rank, broken.value.cause, broken.value.retryable

    assert run_world(2, body, timeout=10.0) == [(1, "Alarm: tick during recv(from rank 0, tag=0)", True)] * 2


CALLS = {
    "all_reduce": lambda group: group.all_reduce(X),
    "all_reduce, asynchronous": lambda group: group.all_reduce(X, async_op=True),
    "of a stream": lambda group: group.stream().all_reduce(X, 0),
    "send": lambda group: group.send(X, 1 - group.rank),
}


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeLimit, TimeoutError])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_interrupt_before_an_operation_waits_for_anything_ends_the_generation_too(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[ProcessGroup], Any], error: type[BaseException]
) -> None:
    """It has its number by then, which the others wait for."""

    def body(group: ProcessGroup) -> str:
        if group.rank == 0:
            noting(monkeypatch, error)
            with pytest.raises(error):
                call(group)
        with pytest.raises(GroupAbortedError) as broken:
            group.barrier()
        return broken.value.cause

    for cause in run_world(2, body, timeout=10.0):
        assert f"{error.__name__} during " in cause


def noting(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    """The next operation raises an error where it has begun, before its driver has it."""

    def interrupted(*_: Any) -> None:
        monkeypatch.undo()
        raise error

    for step in ("note", "begin", "submit"):
        monkeypatch.setattr(Dispatch, step, interrupted)


def finding_no_memory(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """The next use of an attribute raises MemoryError."""

    def full(*_: Any) -> None:
        monkeypatch.undo()
        raise MemoryError("8 TiB")

    monkeypatch.setattr(owner, name, full)


def test_a_collective_that_finds_no_memory_as_it_begins_can_be_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was sent: the group is open, and the rank in step with the others."""

    def body(group: ProcessGroup) -> None:
        if group.rank == 0:
            finding_no_memory(monkeypatch, prepared, "Workspace")
            with pytest.raises(MemoryError, match="8 TiB"):
                group.all_reduce(X)
            group.store.set("full", b"")
        else:
            group.store.wait("full")
        np.testing.assert_array_equal(group.all_reduce(X), 2 * X)
        group.barrier()

    run_world(2, body, timeout=10.0)


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (prepared, "Workspace", lambda group: group.stream().all_reduce(X, 0).wait()),
        (InprocTransport, "send", lambda group: group.send(LONG, 1 - group.rank, async_op=True).wait()),
    ],
    ids=["the arrays of a numbered operation", "a chunk of a send"],
)
def test_what_finds_no_memory_and_is_waited_for_ends_the_generation(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: Callable[[ProcessGroup], Any]
) -> None:
    def body(group: ProcessGroup) -> bool:
        if group.rank == 0:
            finding_no_memory(monkeypatch, owner, name)
            with pytest.raises(LimitExceededError, match="8 TiB"):
                call(group)
            group.store.set("full", b"")
        else:
            group.store.wait("full")
        with pytest.raises(FerroError, match="8 TiB"):
            group.barrier()
        return group.session.clock.now() < 5.0

    assert run_world(2, body, timeout=10.0) == [True, True]


def test_a_recv_that_is_interrupted_before_it_waits_takes_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: ProcessGroup) -> None:
        if group.rank == 0:
            noting(monkeypatch, KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt):
                group.recv(1)
            np.testing.assert_array_equal(group.recv(1), X)
        else:
            group.send(X, 0)
        group.barrier()

    run_world(2, body, timeout=10.0)


def test_a_recv_that_is_interrupted_may_be_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: ProcessGroup) -> None:
        if group.rank == 0:
            interrupt_the_first_wait(monkeypatch)
            with pytest.raises(KeyboardInterrupt):
                group.recv(1)
            group.store.set("interrupted", b"")
            np.testing.assert_array_equal(group.recv(1), X)
        else:
            group.store.wait("interrupted")
            group.send(X, 0)
        group.barrier()

    run_world(2, body)


@pytest.mark.parametrize("place", ["_take", "grant"])
def test_a_message_of_which_a_part_was_taken_when_recv_was_interrupted_comes_whole_to_the_next(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Wherever the interrupt strikes: before the grant, or between two chunks."""
    long = np.arange(6 << 17, dtype=np.float64)  # more than is sent without a grant
    owner = InprocTransport if place == "grant" else RecvExecution
    whole, calls = getattr(owner, place), list[int]()

    def interrupted(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == (2 if place == "_take" else 1):
            raise KeyboardInterrupt
        return whole(*arguments)

    def body(group: ProcessGroup) -> None:
        if group.rank == 0:
            group.store.wait("sent")
            group.session.clock.parker().park(1.0)
            with pytest.raises(KeyboardInterrupt):
                group.recv(1)
            np.testing.assert_array_equal(group.recv(1), long)
        else:
            sending = group.send(long, 0, async_op=True)
            group.store.set("sent", b"")
            sending.wait()
        group.barrier()

    monkeypatch.setattr(owner, place, interrupted)
    run_world(2, body, timeout=10.0)


def failing_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: type[BaseException], *, after: bool) -> None:
    """The next call of a method raises an error, before or after it has done its work."""
    whole = getattr(owner, name)

    def failing(*arguments: Any) -> Any:
        monkeypatch.undo()
        if after:
            whole(*arguments)
        raise error

    monkeypatch.setattr(owner, name, failing)


MAILBOX_STEPS = [("post", True), ("take", False), ("take", True)]
RECEIVE = {
    "new": (New, lambda group, like: group.recv(0)),
    "out": (Into, lambda group, like: group.recv(0, out=np.zeros_like(like))),
    "expected": (New, lambda group, like: group.expect(0).take()),
}


@pytest.mark.parametrize(("result", "receive"), RECEIVE.values(), ids=RECEIVE)
@pytest.mark.parametrize(
    ("owner", "name", "after", "x"),
    [
        (RecvExecution, "advance", True, LONG),
        (RecvExecution, "leave", True, LONG),
        *[(Mailbox, name, after, x) for name, after in MAILBOX_STEPS for x in (X, LONG)],
        *[(None, "give", after, x) for after in (False, True) for x in (X, LONG)],
    ],
)
def test_a_message_is_not_lost_where_its_recv_was_interrupted_before_it_returned(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    after: bool,
    x: np.ndarray,
    result: type[Result],
    receive: Callable[[ProcessGroup, np.ndarray], Any],
) -> None:
    """Messages stay in their order, too."""

    def body(group: ProcessGroup) -> None:
        if group.rank == 0:
            for number in range(3):
                group.send(x * number, 1)
        group.barrier()
        if group.rank == 1:
            failing_once(monkeypatch, owner or result, name, KeyboardInterrupt, after=after)
            with pytest.raises(KeyboardInterrupt):
                receive(group, x)
            for number in range(3):
                np.testing.assert_array_equal(group.recv(0), x * number)
        group.barrier()

    run_world(2, body, timeout=10.0)


def test_a_message_that_cannot_be_made_into_an_array_stays_for_the_next_recv(monkeypatch: pytest.MonkeyPatch) -> None:
    long = np.arange(6 << 17, dtype=np.float64)  # more than is sent without a grant

    def body(group: ProcessGroup) -> None:
        if group.rank == 0:
            group.send(long, 1)
        else:
            failing_once(monkeypatch, New, "give", MemoryError, after=False)
            with pytest.raises(MemoryError):
                group.recv(0)
            np.testing.assert_array_equal(group.recv(0), long)

    run_world(2, body, timeout=10.0)


def test_an_interrupt_as_the_progress_thread_starts_leaves_one_thread() -> None:
    """Two would take from each other what they look at."""

    class Struck(SystemClock):
        def __init__(self) -> None:
            self.threads = list[threading.Thread]()

        def start(self, body: Callable[[], None], name: str) -> None:
            thread = threading.Thread(target=body, name=name, daemon=True)
            self.threads.append(thread)
            thread.start()
            if len(self.threads) == 1:
                raise KeyboardInterrupt

    clock = Struck()
    with pytest.raises(KeyboardInterrupt):
        ProcessGroup(SimulatedBackend.create_group(2, clock=clock)[0], 5.0).recv(1, async_op=True)
    mine, other = (ProcessGroup(each, 5.0) for each in SimulatedBackend.create_group(2, clock=clock))
    work = mine.recv(1, async_op=True)
    other.send(X, 0)
    np.testing.assert_array_equal(work.wait(), X)
    eventually(lambda: sum(thread.is_alive() for thread in clock.threads) == 1, "the end of the second thread", 5.0)


def is_ours(file: str) -> bool:
    return f"{os.sep}ferrorpc{os.sep}" in file


def expected_and_forgotten(group: ProcessGroup) -> None:
    expected = group.expect(1)
    try:
        expected.forget()
    except KeyboardInterrupt:  # it may have struck before the first line of `forget`
        expected.forget()
        raise


IN_VAIN: dict[str, Callable[[ProcessGroup], Any]] = {
    "that times out": lambda group: group.recv(1, timeout=0.0),
    "asynchronous": lambda group: group.recv(1, async_op=True),
    "expected and forgotten": expected_and_forgotten,
}


@pytest.mark.parametrize("receive", IN_VAIN.values(), ids=IN_VAIN)
def test_wherever_a_recv_is_interrupted_the_next_ones_get_all_messages_or_an_error(
    receive: Callable[[ProcessGroup], Any],
) -> None:
    """Never the second message in place of the first."""
    broken = in_all = 0
    for place in itertools.count(1):
        mine, other = (ProcessGroup(each, 5.0) for each in SimulatedBackend.create_group(2, timeout=5.0))
        strike, before, taken = InterruptAt(place, is_ours), sys.getprofile(), []
        try:
            sys.setprofile(strike)
            work = receive(mine)
        except (KeyboardInterrupt, FerroError):
            work = None
        finally:
            sys.setprofile(before)
        for number in range(3):
            with contextlib.suppress(GroupAbortedError):
                other.send(np.array([number]), 0)
        try:
            taken += [] if work is None else [work.wait()[0]]
            taken += [mine.recv(1)[0] for _ in range(3 - len(taken))]
        except GroupAbortedError as error:
            assert "KeyboardInterrupt" in error.cause  # noqa: PT017  the rest is for all
            broken += 1
        assert taken == list(range(len(taken))), place
        assert taken or mine._backend.latch.cause is not None, place
        mine.close()
        other.close()
        if strike.left > 0:
            break
        in_all += 1
    assert in_all > 40
    assert broken < in_all
