"""Waiting for a change, with parkers that end each wait at once."""

from __future__ import annotations

import pytest

from ferrorpc.coordination.condition import Condition


class Clock:
    """A second passes with each park; it counts who is woken."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.woken = 0

    def now(self) -> float:
        return self.seconds

    def parker(self) -> Parker:
        return Parker(self)


class Parker:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def park(self, until: float) -> None:
        self.clock.seconds += 1.0

    def unpark(self) -> None:
        self.clock.woken += 1


@pytest.fixture
def condition():
    return Condition(Clock())


def test_what_is_looked_for_is_found_or_the_time_is_up(condition):
    assert condition.wait_for(lambda: "there", until=0.0) == "there", "also where no time is left"
    assert condition.wait_for(lambda: "there" if condition.clock.now() >= 3.0 else None, until=9.0) == "there"
    assert condition.wait_for(lambda: None, until=5.0) is None
    assert condition.clock.now() == 5.0


def test_who_waits_no_longer_is_woken_no_longer(condition):
    def look():
        if condition.clock.now() >= 2.0:
            raise KeyError("over")

    with pytest.raises(KeyError):
        condition.wait_for(look, until=9.0)
    condition.wait_for(lambda: None, until=5.0)
    with condition.lock:
        condition.notify_all()
    assert condition.clock.woken == 0
