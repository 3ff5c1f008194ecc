"""How long a connection was without its coordinator, and what is said of it."""

from __future__ import annotations

import pytest

from ferrorpc.coordination.outages import Outages
from ferrorpc.errors import ConfigError, CoordinatorUnavailableError
from ferrorpc.testing import ManualClock

KILLED = CoordinatorUnavailableError("it was killed")
REFUSED = ConfigError("the name is another's", retryable=True)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def outages(clock: ManualClock) -> Outages:
    """Of a connection that is up, and may be down for 5 s."""
    found = Outages("nowhere:1", clock, join_timeout=5.0, max_outage=60.0)
    assert found.end() == "", "that it answers at first is no warning"
    return found


def test_uptime_stands_still_in_an_outage(outages: Outages, clock: ManualClock) -> None:
    began = outages.uptime()
    for _ in range(3):
        clock.advance(2.0)
        outages.begin(KILLED, is_expected=False)
        clock.advance(50.0)
        assert not outages.is_up
        outages.end()
    assert outages.is_up
    assert outages.uptime() - began == 6.0


def test_it_is_described_while_it_lasts(outages: Outages, clock: ManualClock) -> None:
    outages.begin(KILLED, is_expected=False)
    clock.advance(1.5)
    assert outages.describe() == "no coordinator at nowhere:1 for 1.5 s (it was killed)"
    outages.begin(REFUSED, is_expected=False)
    assert outages.describe() == "the coordinator at nowhere:1 refuses this process (the name is another's)"
    outages.end()
    assert outages.describe() == ""


def test_its_beginning_its_end_and_every_new_reason_are_told_once(outages: Outages, clock: ManualClock) -> None:
    assert outages.begin(KILLED, is_expected=False) == "lost the coordinator at nowhere:1: it was killed"
    assert outages.begin(KILLED, is_expected=False) == ""
    assert outages.begin(REFUSED, is_expected=False) == "still without the coordinator at nowhere:1: the name is another's"
    clock.advance(2.0)
    assert outages.end() == "the coordinator at nowhere:1 is back after 2.0 s"
    assert outages.end() == ""


def test_an_expected_one_is_not_told(outages: Outages) -> None:
    assert outages.begin(KILLED, is_expected=True) == outages.begin(REFUSED, is_expected=True) == outages.end() == ""


def test_who_has_no_generation_waits_no_longer_than_it_joins(outages: Outages, clock: ManualClock) -> None:
    outages.begin(KILLED, is_expected=False)
    clock.advance(4.5)
    assert outages.final_error(has_session=True) is None
    clock.advance(1.0)
    assert "nobody answered at nowhere:1 for 5.5 s; the last attempt: it was killed" in str(
        outages.final_error(has_session=True)
    )
    outages.joined()
    assert outages.final_error(has_session=True) is None
    clock.advance(60.0)
    assert "nobody answered at nowhere:1 for 65.5 s" in str(outages.final_error(has_session=True))


def test_a_refusal_is_its_own_error(outages: Outages, clock: ManualClock) -> None:
    outages.begin(REFUSED, is_expected=False)
    clock.advance(5.0)
    assert outages.final_error(has_session=False) is REFUSED


def test_nothing_ends_where_the_coordinator_is_there(outages: Outages, clock: ManualClock) -> None:
    clock.advance(1000.0)
    assert outages.final_error(has_session=True) is None
