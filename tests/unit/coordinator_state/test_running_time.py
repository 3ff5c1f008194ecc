"""Running time: the coordinator's own pauses are not counted."""

from __future__ import annotations

from ferrorpc_coordinator.state.running_time import RunningTime


def test_time_passes_while_the_coordinator_is_called_often_enough() -> None:
    running_time = RunningTime(1_000, tick_interval_ns=250, pause_ns=500)
    assert [running_time.advance(now) for now in (1_250, 1_500, 2_000)] == [1_250, 1_500, 2_000]


def test_a_pause_is_not_counted() -> None:
    running_time = RunningTime(0, tick_interval_ns=250, pause_ns=500)
    assert running_time.advance(250) == 250
    assert running_time.advance(30_250) == 250
    assert running_time.advance(30_350) == 350


def test_a_gap_without_requested_ticks_is_no_pause() -> None:
    running_time = RunningTime(0, tick_interval_ns=250, pause_ns=500)
    assert running_time.advance(30_000, tick_requested=False) == 30_000


def test_a_clock_that_goes_backwards_stands_still() -> None:
    running_time = RunningTime(1_000, tick_interval_ns=250, pause_ns=500)
    assert running_time.advance(400) == 1_000


def test_the_next_call_is_in_clock_time_and_at_most_a_tick_interval_away() -> None:
    running_time = RunningTime(0, tick_interval_ns=250, pause_ns=500)
    running_time.advance(10_000)
    assert running_time.next_call(100) == 10_100
    assert running_time.next_call(5_000) == 10_250
