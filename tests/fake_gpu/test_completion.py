"""The completion watcher: it polls seldom, queries few events, and lingers for later operations."""

from __future__ import annotations

from typing import Any

import pytest

from ferrorpc.backends.device.communicator import State
from ferrorpc.backends.device.completion import IDLE_SECONDS, LINGER_SECONDS, LONG_SECONDS, NOTIFY_SECONDS, CompletionWatcher
from ferrorpc.backends.device.in_flight import InFlightExecution, first_cause
from ferrorpc.errors import CollectiveTimeoutError, FerroError, GroupAbortedError, NcclError
from ferrorpc.guard import Guard, Latch
from ferrorpc.testing import ManualClock


class EndEvent:
    """An event that a test lets the GPU reach."""

    def __init__(self) -> None:
        self.passed = False
        self.asked = 0

    @property
    def done(self) -> bool:
        self.asked += 1
        return self.passed


class Operation(InFlightExecution):
    """An operation in its stream."""

    polling = None

    def __init__(self, clock: ManualClock, name: str = "", seconds: float = 10.0) -> None:
        self.guard = Guard(clock, Latch(), seconds)
        self.end_event: Any = EndEvent()
        self.name = name

    @property
    def label(self) -> str:
        return self.name

    def advance(self) -> bool:
        return self.try_complete()

    def try_complete(self) -> bool:
        if self.end_reached or self.end_event.done:
            self.release()
        return self.released

    def release(self) -> None:
        self.released = True

    def waiting_on(self) -> list[int]:
        return [1]

    def probe(self) -> None:
        raise AssertionError("nobody was to be asked")

    def explain(self) -> str:
        return f"{self.name} waits"

    def timeout_error(self) -> FerroError:
        return CollectiveTimeoutError([1], self.name)

    def finish(self) -> None:
        self.release()


def watcher_of(operations: list[Operation]) -> CompletionWatcher:
    watcher = CompletionWatcher(operations[0], None)  # type: ignore[arg-type]
    assert all(watcher.join(operation) for operation in operations[1:])
    return watcher


@pytest.mark.parametrize("past", [0, 1, 69, 100])
def test_a_look_at_many_asks_the_gpu_a_few_questions(past: int) -> None:
    clock = ManualClock()
    operations = [Operation(clock) for _ in range(100)]
    watcher = watcher_of(operations)
    for operation in operations[:past]:
        operation.end_event.passed = True
    assert not watcher.advance()
    assert [operation.released for operation in operations] == [True] * past + [False] * (100 - past)
    assert sum(operation.end_event.asked for operation in operations) <= 8
    assert watcher.position == past


def test_who_waits_is_notified_in_order_and_an_error_reaches_all_that_are_left() -> None:
    clock = ManualClock()
    operations = [Operation(clock, name) for name in "abc"]
    on_complete: list[Any] = []
    for operation in operations:
        operation.on_complete = lambda error, name=operation.name: on_complete.append((name, error))
    watcher = watcher_of(operations)
    operations[0].end_event.passed = True
    watcher.advance()
    assert on_complete == [("a", None)]
    cause = GroupAbortedError(1, "over")
    assert watcher.fail(cause)
    assert [(name, type(error)) for name, error in on_complete[1:]] == [("b", GroupAbortedError), ("c", GroupAbortedError)]


def test_it_lasts_a_while_longer_so_that_what_follows_wakes_nobody() -> None:
    clock = ManualClock()
    first, second, late = (Operation(clock, name) for name in ("first", "second", "late"))
    first.end_event.passed = second.end_event.passed = True
    watcher = watcher_of([first])
    assert not watcher.advance()
    assert first.released
    assert (watcher.waiting_on(), watcher.label) == ([], "nothing in flight")
    watcher.probe()  # a timer may be due when nothing is left
    assert watcher.explain() == watcher.label
    clock.advance(LINGER_SECONDS / 2)
    assert watcher.join(second)
    assert watcher.guard is second.guard
    assert not watcher.advance()
    clock.advance(LINGER_SECONDS / 2)
    assert not watcher.advance(), "since the second one was complete"
    clock.advance(LINGER_SECONDS / 2)
    assert watcher.advance()
    assert not watcher.join(late)


def test_after_a_long_wait_the_next_operation_gets_timers_of_its_own() -> None:
    """Those of a watcher come the later, the longer it has waited: its next deadline would be noticed late."""
    clock = ManualClock()
    first = Operation(clock)
    watcher = watcher_of([first])
    clock.advance(2 * LONG_SECONDS)
    first.end_event.passed = True
    assert watcher.advance()
    assert not watcher.join(Operation(clock, seconds=1e-3))


def test_nothing_in_flight_has_no_deadline_and_fails_in_silence() -> None:
    clock = ManualClock()
    operation = Operation(clock, seconds=1e-3)
    operation.end_event.passed = True
    watcher = watcher_of([operation])
    assert not watcher.advance()
    assert watcher.guard.deadline > clock.now() + 1
    assert watcher.fail(GroupAbortedError(1, "over")), "or it would be logged as an error that nobody looked at"


def test_completed_operations_fail_in_silence_although_nobody_is_notified() -> None:
    clock = ManualClock()
    operations = [Operation(clock) for _ in range(2)]
    watcher = watcher_of(operations)
    operations[0].has_completed = operations[1].has_completed = True
    assert watcher.fail(GroupAbortedError(1, "over")), "it lost nothing"
    watcher = watcher_of(operations)
    operations[1].has_completed = False
    assert not watcher.fail(GroupAbortedError(1, "over")), "the second one was lost, and nobody else will say so"


def test_an_earlier_deadline_is_not_put_behind_later_ones() -> None:
    clock = ManualClock()
    watcher = watcher_of([Operation(clock, seconds=10)])
    assert not watcher.join(Operation(clock, seconds=1))


def test_it_is_looked_at_more_often_while_somebody_waits() -> None:
    clock = ManualClock()
    operations = [Operation(clock) for _ in range(3)]
    watcher = watcher_of(operations)
    assert watcher.nap_seconds == IDLE_SECONDS
    operations[1].is_awaited = True
    assert watcher.nap_seconds == NOTIFY_SECONDS
    for operation in operations[:2]:
        operation.end_event.passed = True
    assert not watcher.advance()
    assert watcher.nap_seconds == IDLE_SECONDS


def test_what_has_ended_otherwise_says_nothing_of_those_before_it() -> None:
    clock = ManualClock()
    operations = [Operation(clock) for _ in range(3)]
    watcher = watcher_of(operations)
    operations[1].release()
    assert not watcher.advance()
    assert not operations[0].released
    assert watcher.position == 0


def test_of_what_is_in_a_stream_of_its_own_the_others_tell_nothing() -> None:
    clock = ManualClock()
    operations = [Operation(clock) for _ in range(3)]
    operations[0].in_launch_order = False
    operations[1].end_event.passed = operations[2].end_event.passed = True
    watcher = watcher_of(operations)
    assert not watcher.advance()
    assert not operations[0].released
    operations[0].end_event.passed = True
    watcher.advance()
    assert all(operation.released for operation in operations)


def test_an_operation_released_because_the_generation_ended_has_not_completed() -> None:
    """Another thread lets go of it while this one is on_complete by NCCL that its communicator is gone."""

    class Gone(Operation):
        @first_cause
        def try_complete(self) -> bool:
            self.guard.latch.trip(GroupAbortedError(1, "enough"))
            self.release()
            raise NcclError("the communicator is gone", status=State.INVALID_USAGE)

    with pytest.raises(GroupAbortedError, match="enough"):
        Gone(ManualClock()).try_complete()
