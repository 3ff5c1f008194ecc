"""Parkers keep permits, latches trip once, guards end in time."""

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from ferrorpc.errors import GroupAbortedError, LimitExceededError, PeerLostError, UsageError
from ferrorpc.guard import FOREVER, SYSTEM_CLOCK, Latch, seconds_of


def test_a_permit_given_early_is_kept_and_counts_once() -> None:
    parker = SYSTEM_CLOCK.parker()
    parker.unpark()
    parker.unpark()
    assert parker.park(FOREVER)
    assert not parker.park(SYSTEM_CLOCK.now() + 0.01)


def test_a_parked_thread_wakes_for_a_permit_of_another() -> None:
    parker = SYSTEM_CLOCK.parker()
    SYSTEM_CLOCK.call_at(SYSTEM_CLOCK.now() + 0.01, parker.unpark)
    assert parker.park(SYSTEM_CLOCK.now() + 5.0)


def test_a_deadline_in_the_past_does_not_wait() -> None:
    started = time.monotonic()
    assert not SYSTEM_CLOCK.parker().park(started - 1.0)
    assert time.monotonic() - started < 1.0


def test_a_deadline_beyond_what_the_system_can_wait_for_is_one_all_the_same() -> None:
    parker = SYSTEM_CLOCK.parker()
    parker.unpark()
    assert parker.park(SYSTEM_CLOCK.now() + 1e300)


@pytest.mark.parametrize("until", ["FOREVER", "SYSTEM_CLOCK.now() + 60.0"])
def test_the_main_thread_notices_an_interrupt_that_does_not_end_its_wait(until: str) -> None:
    """CUDA sets Python's handler of SIGINT anew, so that the system goes on with the wait after it (SA_RESTART)."""
    waits = (
        "import os, signal, threading\nfrom ferrorpc.guard import FOREVER, SYSTEM_CLOCK\n"
        "signal.siginterrupt(signal.SIGINT, False)\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        f"try: SYSTEM_CLOCK.parker().park({until})\n"
        "except KeyboardInterrupt: print('interrupted')"
    )
    done = subprocess.run([sys.executable, "-c", waits], timeout=30.0, check=True, capture_output=True, text=True)
    assert done.stdout == "interrupted\n"


def test_what_is_to_be_done_later_keeps_no_process_alive() -> None:
    before = set(threading.enumerate())
    SYSTEM_CLOCK.call_at(SYSTEM_CLOCK.now() + 1000.0, lambda: None)
    (timer,) = set(threading.enumerate()) - before
    assert isinstance(timer, threading.Timer)
    timer.cancel()
    assert timer.daemon


def test_a_latch_keeps_the_first_cause_and_calls_each_watcher_once() -> None:
    latch = Latch()
    calls: list[str] = []
    latch.watch(lambda: calls.append("early"))
    forgotten = latch.watch(lambda: calls.append("forgotten"))
    latch.forget(forgotten)
    assert latch.trip(PeerLostError(1, "gone"))
    assert not latch.trip(GroupAbortedError(0, "later"))
    latch.watch(lambda: calls.append("late"))
    assert calls == ["early", "late"]
    with pytest.raises(PeerLostError) as raised:
        latch.check()
    assert raised.value is not latch.cause


def test_a_watcher_that_fails_keeps_no_other_from_being_called() -> None:
    latch = Latch()
    calls: list[str] = []

    def fails(word: str) -> None:
        calls.append(word)
        raise LimitExceededError(word)

    for word in ("first", "second"):
        latch.watch(lambda word=word: fails(word))  # type: ignore[misc]
    latch.watch(lambda: calls.append("third"))
    with pytest.raises(LimitExceededError, match="first"):
        latch.trip(PeerLostError(1, "gone"))
    assert calls == ["first", "second", "third"]
    assert isinstance(latch.cause, PeerLostError)


def test_many_threads_trip_a_latch_once() -> None:
    latch = Latch()
    won: list[bool] = []
    threads = [threading.Thread(target=lambda n=n: won.append(latch.trip(PeerLostError(n, "x")))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won.count(True) == 1


@pytest.mark.parametrize("timeout", [float("nan"), -1e-9, "soon", [1], 1j])
def test_a_timeout_is_a_number_of_seconds(timeout: object) -> None:
    assert [seconds_of(good, 7.0) for good in (None, 0, 1.5, FOREVER)] == [7.0, 0.0, 1.5, FOREVER]
    with pytest.raises(UsageError, match="is no number of seconds"):
        seconds_of(timeout, 7.0)


def test_a_part_of_a_latch_trips_with_it_and_is_forgotten_with_its_last_user() -> None:
    whole = Latch()
    part, ticket = whole.part()
    other, _ = whole.part()
    assert len(whole._watchers) == 2
    reference = weakref.ref(other)
    del other
    gc.collect()
    assert reference() is None
    assert list(whole._watchers) == [ticket]
    whole.trip(PeerLostError(1, "signal 9"))
    assert part.cause is whole.cause
    late, _ = whole.part()
    assert late.cause is whole.cause
    del late, part
    gc.collect()
