"""Waiting for a change, with parkers that end each wait at once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ferrorpc.coordination.monitor import Monitor


class Clock:
    """A second passes with each park; it counts who is woken."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.woken = 0

    def now(self) -> float:
        return self.seconds

    def parker(self) -> SimpleNamespace:
        return SimpleNamespace(park=self._park, unpark=self._unpark)

    def _park(self, until: float) -> None:
        self.seconds += 1.0

    def _unpark(self) -> None:
        self.woken += 1


@pytest.fixture
def monitor():
    return Monitor(Clock())


def test_what_is_looked_for_is_found_or_the_time_is_up(monitor):
    assert monitor.wait(lambda: "there", until=0.0) == "there", "also where no time is left"
    assert monitor.wait(lambda: "there" if monitor.clock.now() >= 3.0 else None, until=9.0) == "there"
    assert monitor.wait(lambda: None, until=5.0) is None
    assert monitor.clock.now() == 5.0


def test_who_waits_no_longer_is_woken_no_longer(monitor):
    def look():
        if monitor.clock.now() >= 2.0:
            raise KeyError("over")

    with pytest.raises(KeyError):
        monitor.wait(look, until=9.0)
    monitor.wait(lambda: None, until=5.0)
    with monitor.lock:
        monitor.changed()
    assert monitor.clock.woken == 0
