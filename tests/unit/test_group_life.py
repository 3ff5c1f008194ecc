"""The life of a group: open, broken once with one cause that every rank raises, closed; and the next generation."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ferrorpc import (
    BarrierTimeoutError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    FerroError,
    GroupAbortedError,
    GroupClosedError,
    LimitExceededError,
    PeerLostError,
    ProcessGroup,
    StoreTimeoutError,
    TensorMismatchError,
    UsageError,
)
from ferrorpc.backends.simulated import SimulatedBackend
from ferrorpc.testing import FaultPlan, run_world
from ferrorpc.types import DType
from ferrorpc.wire.frames import POINT_TO_POINT, Header, Key

SLOW = FaultPlan(delay_seconds=(0.0, 0.01))
X = np.ones(3, np.float32)

DISAGREEMENTS: dict[str, tuple[Callable[[ProcessGroup], Any], Callable[[ProcessGroup], Any], str, str]] = {
    "shapes": (lambda g: g.all_reduce(X), lambda g: g.all_reduce(np.ones(4, np.float32)), "float32[3]", "float32[4]"),
    "dtypes": (lambda g: g.all_reduce(X), lambda g: g.all_reduce(np.ones(3)), "float32[3]", "float64[3]"),
    "operators": (lambda g: g.all_reduce(X), lambda g: g.all_reduce(X, op="max"), "op=sum", "op=max"),
    "codecs": (lambda g: g.all_reduce(X), lambda g: g.all_reduce(X, wire="bf16"), "all_reduce", "wire=bf16"),
    "algorithms": (lambda g: g.all_reduce(X), lambda g: g.all_reduce(X, algorithm="ring"), "all_reduce", "algorithm=ring"),
    "roots": (lambda g: g.broadcast(X, root=0), lambda g: g.broadcast(X, root=1), "root=0", "root=1"),
    "operations": (lambda g: g.all_reduce(X), lambda g: g.all_gather(X), "all_reduce", "all_gather"),
    "operations between which no message flows": (
        lambda g: g.broadcast(X, root=0) if g.rank else g.reduce(X, root=0),
        lambda g: g.broadcast(X, root=0) if g.rank else g.reduce(X, root=0),
        "reduce(op=sum, float32[3], root=0)",
        "broadcast(root=0)",
    ),
    "subgroups": (lambda g: g.subgroup([0, 1]), lambda g: g.subgroup([1, 0]), "[0, 1]", "[1, 0]"),
    "a collective and a barrier": (lambda g: g.all_reduce(X), lambda g: g.barrier(), "all_reduce", "barrier"),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_disagree_all_learn_both_signatures_within_a_second(what: str, size: int) -> None:
    one, other, first, second = DISAGREEMENTS[what]

    def body(group: ProcessGroup) -> tuple[FerroError, float]:
        call = other if group.rank == 1 else one

        def disagree() -> None:
            call(group)
            group.barrier()

        with pytest.raises(CollectiveMismatchError) as raised:
            disagree()
        return raised.value, group.session.clock.now()

    outcomes = run_world(size, body, faults=SLOW)
    assert len({str(error) for error, _ in outcomes}) == 1, "one first cause for all"
    signatures = outcomes[0][0].signatures
    assert len(signatures) == 2
    assert any(first in text for text in signatures.values())
    assert any(second in text for text in signatures.values())
    assert max(seconds for _, seconds in outcomes) < 1.0


def test_the_first_deadline_names_who_is_missing_and_the_others_are_aborted_by_it() -> None:
    def body(group: ProcessGroup) -> Any:
        clock = group.session.clock
        if group.rank == 2:
            clock.parker().park(100.0)
            with pytest.raises(GroupAbortedError) as late:
                group.all_reduce(X)
            return late.value
        error = CollectiveTimeoutError if group.rank == 0 else GroupAbortedError
        with pytest.raises(error) as raised:
            group.all_reduce(X, timeout=5.0 if group.rank == 0 else 50.0)
        assert clock.now() < 6.0
        with pytest.raises(error):
            group.barrier()
        return raised.value

    first, second, third = run_world(3, body)
    assert first.waiting_on == [2]
    assert "rank 2" in str(first)
    assert second.rank == third.rank == 0
    assert isinstance(first, TimeoutError)


def test_a_wait_that_ends_before_its_operation_names_who_is_missing() -> None:
    def body(group: ProcessGroup) -> Any:
        if group.rank == 1:
            group.session.clock.parker().park(20.0)
        works = [group.all_reduce(X, async_op=True), group.barrier(async_op=True)]
        told = []
        if group.rank == 0:
            works.append(group.recv(1, async_op=True))
            for work in works:
                with pytest.raises(CollectiveTimeoutError, match=r"waits for rank 1.*; it still runs after 1 s") as caught:
                    work.wait(1.0)
                told.append(caught.value.waiting_on)
        else:
            group.send(X, 0)
        for work in works:
            work.wait()
        return told

    assert run_world(2, body) == [[[1], [1], [1]], []]


def test_a_barriers_deadline_names_every_missing_rank() -> None:
    def body(group: ProcessGroup) -> Any:
        if group.rank in (1, 3):
            group.session.clock.parker().park(20.0)
            return None
        with pytest.raises((BarrierTimeoutError, GroupAbortedError)) as raised:
            group.barrier(timeout=2.0 + group.rank)
        return raised.value

    outcomes = run_world(4, body)
    assert isinstance(outcomes[0], BarrierTimeoutError)
    assert outcomes[0].missing == [1, 3]
    assert isinstance(outcomes[2], GroupAbortedError)


def test_abort_ends_everything_in_flight_and_later_on_every_rank_and_in_subgroups() -> None:
    def body(group: ProcessGroup) -> tuple[int, str]:
        sub = group.subgroup([0, 1])
        pending = group.recv((group.rank + 1) % 3, async_op=True)
        if group.rank == 1:
            group.session.clock.parker().park(1.0)
            group.abort("the loss is NaN")
        for call in (pending.wait, group.barrier, lambda: group.all_reduce(X), *([sub.barrier] if sub else [])):
            with pytest.raises(GroupAbortedError) as raised:
                call()
        assert group.session.clock.now() < 2.0
        assert "broken" in repr(group)
        return raised.value.rank, raised.value.cause

    assert run_world(3, body) == [(1, "the loss is NaN")] * 3


def test_a_rank_that_has_closed_its_group_ends_nothing_for_the_others() -> None:
    def body(group: ProcessGroup) -> list[float]:
        others = group.subgroup([1, 2])
        if others is None:
            group.close()
            group.abort("too late")
            return [2.0]
        group.session.clock.parker().park(1.0)
        return others.all_reduce(np.ones(1)).tolist()

    assert run_world(3, body) == [[2.0]] * 3


def test_an_exception_can_be_the_cause_of_an_abort() -> None:
    def body(group: ProcessGroup) -> str:
        if group.rank == 0:
            group.abort(ZeroDivisionError("by zero"))
        with pytest.raises(GroupAbortedError) as raised:
            group.barrier()
        return raised.value.cause

    assert run_world(2, body) == ["ZeroDivisionError: by zero"] * 2


def test_any_exception_can_be_what_a_group_fails_with() -> None:
    def body(group: ProcessGroup) -> str:
        if group.rank == 0:
            found = group.fail(ZeroDivisionError("by zero"))
        else:
            with pytest.raises(GroupAbortedError) as raised:
                group.barrier()
            found = raised.value
        assert isinstance(found, GroupAbortedError)
        return found.cause

    assert run_world(2, body) == ["ZeroDivisionError: by zero"] * 2


def test_a_group_does_not_fail_with_what_is_no_exception() -> None:
    def body(group: ProcessGroup) -> float:
        with pytest.raises(UsageError, match="'by zero' is no exception"):
            group.fail("by zero")  # type: ignore[arg-type]
        return group.all_reduce(np.ones(())).item()

    assert run_world(2, body) == [2.0] * 2


def test_leaving_the_group_by_an_exception_tells_the_others_at_once() -> None:
    def body(group: ProcessGroup) -> Any:
        if group.rank == 1:
            with pytest.raises(ValueError, match="bad sample"), group:
                raise ValueError("bad sample 17")
            return None
        with pytest.raises(PeerLostError) as raised:
            group.all_reduce(X)
        return raised.value.rank, raised.value.reason, group.session.clock.now() < 0.5

    assert run_world(3, body) == [(1, "ValueError: bad sample 17", True), None, (1, "ValueError: bad sample 17", True)]


def test_an_exit_that_was_meant_is_no_failure() -> None:
    def body(group: ProcessGroup) -> int:
        if group.rank == 1:
            with pytest.raises(SystemExit), group:
                raise SystemExit(0)
            return 0
        group.session.clock.parker().park(1.0)
        group.send(X, 2) if group.rank == 0 else group.recv(0)
        return 1

    assert run_world(3, body) == [1, 0, 1]


def test_ranks_that_both_send_a_long_array_before_they_receive_are_told_what_to_do() -> None:
    """What goes well in MPI as long as messages are short."""

    def body(group: ProcessGroup) -> None:
        group.send(np.ones(6 << 20, np.uint8), 1 - group.rank)

    errors = run_world(2, body, timeout=2.0, return_exceptions=True)
    hints = [error.hint for error in errors if isinstance(error, CollectiveTimeoutError)]
    assert hints
    assert all("async_op=True" in hint for hint in hints)


def test_a_usage_error_sends_nothing_uses_no_number_up_and_leaves_the_group_open() -> None:
    def body(group: ProcessGroup) -> int:
        if group.rank == 0:
            for wrong in (
                lambda: group.all_reduce("text"),
                lambda: group.all_reduce(X, out=np.ones(4, np.float32)),
                lambda: group.all_reduce(X, op="median"),
                lambda: group.all_reduce(X, op=["sum"]),
                lambda: group.all_reduce(X, wire="zip"),
                lambda: group.all_reduce(X, wire=["bf16"]),
                lambda: group.all_reduce(X, algorithm="magic"),
                lambda: group.all_reduce(X, algorithm=["ring"]),
                lambda: group.all_reduce(X, timeout=-1),
                lambda: group.all_reduce(X, timeout="soon"),
                lambda: group.broadcast(None, root=0),
                lambda: group.scatter(None, root=0),
                lambda: group.broadcast(X, root=9),
                lambda: group.subgroup([]),
                lambda: group.subgroup([0, 0]),
                lambda: group.empty((2, -1)),
                lambda: group.empty((1 << 39, 1 << 30)),
                lambda: group.empty(2, (int, -1)),
                lambda: group.empty(2, "float8"),
                lambda: group.explain("sort", 10),
                lambda: group.explain("all_reduce", -4),
                lambda: group.explain("all_reduce", "4KiB"),
            ):
                with pytest.raises(UsageError):
                    wrong()
        return int(group.all_reduce(1))

    assert run_world(2, body) == [2, 2]


def test_an_out_that_does_not_fit_what_arrives_concerns_that_rank_alone() -> None:
    def body(group: ProcessGroup) -> int:
        if group.rank == 1:
            with pytest.raises(TensorMismatchError, match="float32"):
                group.broadcast(out=np.ones(2))
        else:
            group.broadcast(X if group.rank == 0 else None)
        return int(group.all_reduce(1))

    assert run_world(3, body) == [3, 3, 3]


@pytest.mark.parametrize("out", [lambda: [np.zeros(3), np.zeros(4)], lambda: np.zeros(7)], ids=["a list", "one array"])
def test_a_list_of_results_that_does_not_fit_concerns_that_rank_alone(out: Callable[[], Any]) -> None:
    def body(group: ProcessGroup) -> int:
        if group.rank == 0:
            with pytest.raises(TensorMismatchError, match=r"float64\[3\]"):
                group.all_gather(np.ones(3), out=out())
            with pytest.raises(TensorMismatchError, match=r"float64\[3\]"):
                group.all_gather(np.ones(3), out=out(), async_op=True).wait()
        else:
            group.all_gather(np.ones(3))
            group.all_gather(np.ones(3))
        return int(group.all_reduce(1))

    assert run_world(2, body) == [2, 2]


def test_a_message_for_which_there_is_no_memory_ends_the_generation_and_names_who_announced_how_much() -> None:
    def body(group: ProcessGroup) -> FerroError:
        if group.rank == 1:
            header = Header(0, "send", DType.FLOAT32, (1 << 38, 1 << 8), 1 << 48)
            group._backend.transport.send(0, Key(0, POINT_TO_POINT, 1), header, 0, np.zeros(1 << 20, np.uint8), lambda: None)
        with pytest.raises(FerroError) as raised:
            group.recv(1) if group.rank == 0 else group.barrier()
        return raised.value

    here, there = run_world(2, body)
    for error, whose in (here, ""), (there, "rank 0 ended the group: "):
        assert isinstance(error, LimitExceededError)
        assert error.message.startswith(f"{whose}recv(from rank 1, tag=0): this process has no memory")
        assert "256. TiB" in error.message


def test_a_cause_says_what_was_raised_and_nothing_that_the_rank_it_came_from_should_try() -> None:
    def body(group: ProcessGroup) -> FerroError:
        if group.rank == 1:
            group.abort(UsageError("a bad batch", hint="mend the data"))
        with pytest.raises(GroupAbortedError) as raised:
            group.barrier()
        assert "\n" not in repr(group)
        return raised.value

    for error in run_world(2, body):
        assert error.message.endswith("UsageError: a bad batch")
        assert str(error).count("try:") == 1
        assert "mend the data" not in str(error)


def test_timeouts_of_the_store_and_of_named_barriers_break_nothing() -> None:
    def body(group: ProcessGroup) -> int:
        if group.rank == 0:
            with pytest.raises(StoreTimeoutError):
                group.store.get("nobody/sets/this", timeout=1.0)
            with pytest.raises(BarrierTimeoutError) as raised:
                group.session.barrier("alone", timeout=1.0)
            assert raised.value.missing == [1]
        group.store.add("counter", 5)
        return int(group.all_reduce(1))

    assert run_world(2, body) == [2, 2]


def test_close_finishes_own_work_refuses_more_and_is_quick() -> None:
    def body(group: ProcessGroup) -> Any:
        clock = group.session.clock
        if group.rank == 0:
            work = group.broadcast(np.arange(3), root=0, async_op=True)
            never = group.recv(1, async_op=True)
            began = clock.now()
            group.close()
            assert clock.now() - began < 1.0
            assert work.wait().tolist() == [0, 1, 2]
            with pytest.raises(FerroError):
                never.wait()
            with pytest.raises(GroupClosedError):
                group.send(X, 1)
            assert "closed" in repr(group)
            return None
        clock.parker().park(0.3)
        return group.broadcast(root=0).tolist()

    assert run_world(2, body, faults=SLOW) == [None, [0, 1, 2]]


def test_what_close_abandons_has_its_error_when_close_returns() -> None:
    """A process may end then, and nobody would be told."""

    def body(group: ProcessGroup) -> None:
        if group.rank == 0:
            x = np.ones(6 << 20, np.uint8)
            works = [group.send(x, 1, async_op=True), group.recv(1, async_op=True), group.all_reduce(X, async_op=True)]
            group.close()
            assert [type(work.exception()) for work in works] == [GroupClosedError] * 3
        else:
            with pytest.raises(PeerLostError, match="rank 0 has left"):
                group.recv(0, tag=1)

    run_world(2, body)


def test_who_interrupts_a_close_has_left_the_job_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers of a notebook that goes on would take it for a member."""

    def interrupted(backend: SimulatedBackend) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    def body(group: ProcessGroup) -> bool:
        with pytest.raises(KeyboardInterrupt):
            group.close()
        return group.session.left

    monkeypatch.setattr(SimulatedBackend, "close", interrupted)
    assert run_world(1, body) == [True]


def test_a_work_whose_group_broke_raises_the_first_cause_and_wait_repeats_it() -> None:
    def body(group: ProcessGroup) -> None:
        for work in [group.all_reduce(X, async_op=True) for _ in range(3)]:
            work.wait()
        if group.rank == 1:
            group.session.clock.parker().park(1.0)
            raise OSError("disk full")
        later = group.all_reduce(X, async_op=True)
        for _ in range(2):
            with pytest.raises(PeerLostError, match="disk full"):
                later.wait()
        assert isinstance(later.exception(), PeerLostError)

    outcomes = run_world(3, body, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), OSError, type(None)]


def shown_by_a_wait(group: ProcessGroup) -> None:
    works = [group.all_reduce(X, async_op=True) for _ in range(4)]
    with pytest.raises(PeerLostError):
        works[0].wait()


def shown_by_a_blocking_call(group: ProcessGroup) -> None:
    works = [group.all_reduce(X, async_op=True) for _ in range(4)]
    with pytest.raises(PeerLostError):
        group.all_reduce(X)
    assert works


def shown_by_a_refusal(group: ProcessGroup) -> None:
    work = group.all_reduce(X, async_op=True)
    while not work.done():
        group.session.clock.parker().park(group.session.clock.now() + 0.01)
    with pytest.raises(PeerLostError):
        group.all_reduce(X)


@pytest.mark.parametrize("shown", [shown_by_a_wait, shown_by_a_blocking_call, shown_by_a_refusal])
def test_what_a_caller_was_told_once_is_not_logged_for_every_other_operation(
    shown: Callable[[ProcessGroup], None], caplog: pytest.LogCaptureFixture
) -> None:
    def body(group: ProcessGroup) -> None:
        if group.rank == 1:
            group.session.clock.parker().park(1.0)
            raise OSError("disk full")
        shown(group)

    gc.collect()  # what other tests never looked at is not logged below
    with caplog.at_level(logging.ERROR, "ferrorpc.work"):
        outcomes = run_world(2, body, return_exceptions=True)
        gc.collect()
    assert [type(outcome) for outcome in outcomes] == [type(None), OSError]
    assert [record.getMessage() for record in caplog.records] == []
