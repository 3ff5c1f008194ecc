"""What watches over operations that a GPU is still busy with: it asks seldom and little, and outlasts them by a while."""

from __future__ import annotations

from typing import Any

import pytest

from ferrorpc.backends.nccl.airborne import Airborne, first_cause
from ferrorpc.backends.nccl.api import State
from ferrorpc.backends.nccl.flight import IDLE_SECONDS, LINGER_SECONDS, TELLING_SECONDS, Flight
from ferrorpc.errors import CollectiveTimeoutError, FerroError, GroupAbortedError, NcclError
from ferrorpc.guard import Guard, Latch
from ferrorpc.testing import ManualClock


class Mark:
    """A mark that a test lets the GPU come past."""

    def __init__(self) -> None:
        self.passed = False
        self.asked = 0

    @property
    def done(self) -> bool:
        self.asked += 1
        return self.passed


class Plane(Airborne):
    """An operation in its stream."""

    polling = None

    def __init__(self, clock: ManualClock, name: str = "", seconds: float = 10.0) -> None:
        self.guard = Guard(clock, Latch(), seconds)
        self.mark: Any = Mark()
        self.name = name

    @property
    def label(self) -> str:
        return self.name

    def advance(self) -> bool:
        return self.land()

    def land(self) -> bool:
        if self.is_past or self.mark.done:
            self.release()
        return self.over

    def release(self) -> None:
        self.over = True

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


def flight_of(planes: list[Plane]) -> Flight:
    flight = Flight(planes[0], None)  # type: ignore[arg-type]
    assert all(flight.join(plane) for plane in planes[1:])
    return flight


@pytest.mark.parametrize("past", [0, 1, 69, 100])
def test_a_look_at_many_asks_the_gpu_a_few_questions(past: int) -> None:
    clock = ManualClock()
    planes = [Plane(clock) for _ in range(100)]
    flight = flight_of(planes)
    for plane in planes[:past]:
        plane.mark.passed = True
    assert not flight.advance()
    assert [plane.over for plane in planes] == [True] * past + [False] * (100 - past)
    assert sum(plane.mark.asked for plane in planes) <= 8
    assert flight.position == past


def test_who_waits_is_told_in_turn_and_an_error_reaches_all_that_are_left() -> None:
    clock = ManualClock()
    planes = [Plane(clock, name) for name in "abc"]
    told: list[Any] = []
    for plane in planes:
        plane.told = lambda error, name=plane.name: told.append((name, error))
    flight = flight_of(planes)
    planes[0].mark.passed = True
    flight.advance()
    assert told == [("a", None)]
    cause = GroupAbortedError(1, "over")
    assert flight.fail(cause)
    assert [(name, type(error)) for name, error in told[1:]] == [("b", GroupAbortedError), ("c", GroupAbortedError)]


def test_it_lasts_a_while_longer_so_that_what_follows_wakes_nobody() -> None:
    clock = ManualClock()
    first, second, late = (Plane(clock, name) for name in ("first", "second", "late"))
    first.mark.passed = second.mark.passed = True
    flight = flight_of([first])
    assert not flight.advance()
    assert first.over
    assert (flight.waiting_on(), flight.label) == ([], "nothing in flight")
    flight.probe()  # a timer may be due when nothing is left
    assert flight.explain() == flight.label
    clock.advance(LINGER_SECONDS / 2)
    assert flight.join(second)
    assert flight.guard is second.guard
    assert not flight.advance()
    clock.advance(LINGER_SECONDS / 2)
    assert not flight.advance(), "since the second one landed"
    clock.advance(LINGER_SECONDS / 2)
    assert flight.advance()
    assert not flight.join(late)


def test_nothing_in_flight_has_no_deadline_and_fails_in_silence() -> None:
    clock = ManualClock()
    plane = Plane(clock, seconds=1e-3)
    plane.mark.passed = True
    flight = flight_of([plane])
    assert not flight.advance()
    assert flight.guard.deadline > clock.now() + 1
    assert flight.fail(GroupAbortedError(1, "over")), "or it would be logged as an error that nobody looked at"


def test_what_has_landed_fails_in_silence_although_nobody_wants_to_know() -> None:
    clock = ManualClock()
    planes = [Plane(clock) for _ in range(2)]
    flight = flight_of(planes)
    planes[0].has_landed = planes[1].has_landed = True
    assert flight.fail(GroupAbortedError(1, "over")), "it lost nothing"
    flight = flight_of(planes)
    planes[1].has_landed = False
    assert not flight.fail(GroupAbortedError(1, "over")), "the second one was lost, and nobody else will say so"


def test_an_earlier_deadline_is_not_put_behind_later_ones() -> None:
    clock = ManualClock()
    flight = flight_of([Plane(clock, seconds=10)])
    assert not flight.join(Plane(clock, seconds=1))


def test_it_is_looked_at_more_often_where_somebody_may_wait() -> None:
    clock = ManualClock()
    silent, telling, another = (Plane(clock) for _ in range(3))
    telling.told = another.told = lambda error: None
    flight = flight_of([silent])
    woken: list[int] = []
    flight.wake = lambda: woken.append(1)
    assert flight.nap_seconds == IDLE_SECONDS
    assert flight.join(telling)
    assert (flight.nap_seconds, len(woken)) == (TELLING_SECONDS, 1)
    assert flight.join(another)
    assert len(woken) == 1


def test_what_has_ended_otherwise_says_nothing_of_those_before_it() -> None:
    clock = ManualClock()
    planes = [Plane(clock) for _ in range(3)]
    flight = flight_of(planes)
    planes[1].release()
    assert not flight.advance()
    assert not planes[0].over
    assert flight.position == 0


def test_of_what_is_in_a_stream_of_its_own_the_others_tell_nothing() -> None:
    clock = ManualClock()
    planes = [Plane(clock) for _ in range(3)]
    planes[0].in_turn = False
    planes[1].mark.passed = planes[2].mark.passed = True
    flight = flight_of(planes)
    assert not flight.advance()
    assert not planes[0].over
    planes[0].mark.passed = True
    flight.advance()
    assert all(plane.over for plane in planes)


def test_what_was_let_go_of_because_the_generation_ended_has_not_landed() -> None:
    """Another thread lets go of it while this one is told by NCCL that its communicator is gone."""

    class Gone(Plane):
        @first_cause
        def land(self) -> bool:
            self.guard.latch.trip(GroupAbortedError(1, "enough"))
            self.release()
            raise NcclError("the communicator is gone", status=State.INVALID_USAGE)

    with pytest.raises(GroupAbortedError, match="enough"):
        Gone(ManualClock()).land()
