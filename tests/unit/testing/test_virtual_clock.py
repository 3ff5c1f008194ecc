"""A virtual world replays from its seed, never really waits, and never hangs silently."""

import sys
import threading
import time

import pytest

from ferrorpc.errors import FerroError, LimitExceededError, UsageError
from ferrorpc.guard import FOREVER
from ferrorpc.testing import ManualClock, VirtualClock
from ferrorpc.testing.virtual_clock import TURN_SECONDS, ThreadExit
from tests.waiting import eventually


def run(clock: VirtualClock, *bodies) -> None:
    clock.run([(f"body {number}", body) for number, body in enumerate(bodies)])


def ping_pong(seed: int, rounds: int = 50) -> tuple[list[int], int]:
    """Three threads that wake each other. Returns the order in which they ran, and the trace."""
    clock = VirtualClock(seed)
    parkers = [clock.parker() for _ in range(3)]
    order: list[int] = []

    def body(rank: int) -> None:
        for _ in range(rounds):
            order.append(rank)
            for parker in parkers:
                parker.unpark()
            parkers[rank].park(clock.now() + 1.0)

    run(clock, *[lambda rank=rank: body(rank) for rank in range(3)])
    return order, clock.trace


def test_the_same_seed_is_the_same_interleaving_and_another_is_another() -> None:
    assert ping_pong(1) == ping_pong(1)
    assert len({tuple(ping_pong(seed)[0]) for seed in range(5)}) == 5


def test_a_minute_passes_in_no_time() -> None:
    clock = VirtualClock()
    readings = []

    def sleeper() -> None:
        for _ in range(60):
            assert clock.parker().park(clock.now() + 1.0) is False
            readings.append(clock.now())

    began = time.monotonic()
    run(clock, sleeper)
    assert readings == [float(second) for second in range(1, 61)]
    assert time.monotonic() - began < 30


def test_who_gives_way_lets_others_run_and_else_some_time_pass() -> None:
    clock = VirtualClock()
    found: list[str] = []

    def polls() -> None:
        while len(found) < 2:
            clock.give_way()
        assert clock.now() == pytest.approx(1.0, abs=2 * TURN_SECONDS)

    def waits() -> None:
        found.append("began")
        clock.parker().park(1.0)
        found.append("waited")

    run(clock, polls, waits)
    clock.give_way()  # outside the world there is nobody to let go first


def test_a_permit_given_early_is_kept_and_counts_once() -> None:
    clock = VirtualClock()
    outcomes = []

    def body() -> None:
        parker = clock.parker()
        parker.unpark()
        parker.unpark()
        outcomes.append(parker.park(FOREVER))
        outcomes.append(parker.park(clock.now() + 0.5))

    run(clock, body)
    assert outcomes == [True, False]
    assert clock.now() == 0.5


def test_actions_run_in_the_order_of_their_times_and_of_their_calls() -> None:
    clock = VirtualClock()
    seen = []

    def body() -> None:
        for name, when in (("c", 2.0), ("a", 1.0), ("b", 1.0), ("past", -1.0)):
            clock.call_at(when, lambda name=name: seen.append((name, clock.now())))
        clock.parker().park(3.0)

    run(clock, body)
    assert seen == [("past", 0.0), ("a", 1.0), ("b", 1.0), ("c", 2.0)]


@pytest.mark.parametrize("until", [FOREVER, 2e8])
def test_when_everybody_waits_for_ever_each_is_told_where(until: float) -> None:
    clock = VirtualClock()
    messages = []

    def waits_for_nothing() -> None:
        clock.parker().park(3e7)
        try:
            clock.parker().park(until)
        except FerroError as error:
            messages.append(str(error))

    run(clock, waits_for_nothing, waits_for_nothing)
    assert len(messages) == 2
    for message in messages:
        assert "no thread can run and no timer is due within a year" in message
        assert "'body 0' in waits_for_nothing (test_virtual.py:" in message or "'body 1' in" in message


def test_a_helper_that_dies_and_an_action_that_raises_are_reported_to_those_who_wait() -> None:
    def dies(clock: VirtualClock) -> None:
        clock.start(lambda: 1 // 0, "helper")

    def exits(clock: VirtualClock) -> None:
        clock.start(lambda: sys.exit("ZeroDivisionError"), "helper")

    def raises(clock: VirtualClock) -> None:
        clock.call_at(1.0, lambda: 1 // 0)

    for plant in (dies, exits, raises):
        clock = VirtualClock()

        def body(clock: VirtualClock = clock, plant=plant) -> None:
            plant(clock)
            with pytest.raises(FerroError, match="ZeroDivisionError"):
                clock.parker().park(FOREVER)

        run(clock, body)


def test_what_a_thread_frees_at_its_end_is_freed_before_the_next_one_runs() -> None:
    """Its thread-local values, after its body has returned."""
    clock, order, own = VirtualClock(), [], threading.local()

    class Slow:
        def __del__(self) -> None:
            time.sleep(0.05)
            order.append("freed")

    def first() -> None:
        own.value = Slow()
        order.append("first")

    def second() -> None:
        clock.parker().park(1.0)
        order.append("second")

    run(clock, first, second)
    assert order == ["first", "freed", "second"]


def test_helpers_unwind_when_the_worlds_own_threads_are_done() -> None:
    clock = VirtualClock()
    ended = []

    def helper() -> None:
        try:
            clock.parker().park(FOREVER)
        finally:
            ended.append("helper")

    run(clock, lambda: (clock.start(helper, "helper"), clock.parker().park(1.0)))
    assert ended == ["helper"]


def test_an_interrupted_thread_raises_from_every_wait() -> None:
    class Gone(ThreadExit):
        pass

    clock = VirtualClock()
    waits = []

    def victim() -> None:
        for _ in range(2):
            try:
                clock.parker().park(FOREVER)
            except Gone:
                waits.append(clock.now())
        clock.parker().park(FOREVER)

    clock.call_at(2.0, lambda: clock.interrupt(0, Gone()))
    run(clock, victim, lambda: clock.parker().park(5.0))
    assert waits == [2.0, 2.0]


def test_a_paused_thread_goes_on_where_it_was() -> None:
    clock = VirtualClock()
    readings = []

    def body() -> None:
        for until in (2.0, 9.0):
            clock.parker().park(until)
            readings.append(clock.now())

    clock.call_at(1.0, lambda: clock.pause(0))
    clock.call_at(7.0, lambda: clock.unpause(0))
    run(clock, body, lambda: clock.parker().park(8.0))
    assert readings == [7.0, 9.0]


def test_a_thread_that_could_run_stands_still_too_when_it_is_paused() -> None:
    clock = VirtualClock()
    parker, readings = clock.parker(), []

    def paused() -> None:
        parker.park(FOREVER)
        readings.append(clock.now())

    def other() -> None:
        clock.parker().park(1.0)
        parker.unpark()
        clock.pause(0)
        clock.parker().park(5.0)
        clock.unpause(0)

    run(clock, paused, other)
    assert readings == [5.0]


@pytest.mark.parametrize("seed", range(6))
def test_who_is_interrupted_before_it_began_does_nothing_any_more(seed: int) -> None:
    clock, ran, at_the_interrupt = VirtualClock(seed), list[str](), list[str]()

    def interrupt() -> None:
        at_the_interrupt.extend(ran)
        clock.interrupt(1, ThreadExit())

    run(clock, interrupt, lambda: ran.append("victim"))
    assert ran == at_the_interrupt


def test_an_interrupted_thread_unwinds_at_once_although_it_is_paused() -> None:
    clock = VirtualClock()
    readings = []

    class Gone(ThreadExit):
        pass

    def body() -> None:
        try:
            clock.parker().park(5.0)
        finally:
            readings.append(clock.now())

    clock.call_at(1.0, lambda: clock.pause(0))
    clock.call_at(2.0, lambda: clock.interrupt(0, Gone()))
    clock.call_at(1000.0, lambda: clock.unpause(0))
    run(clock, body)
    assert readings == [2.0]


def test_threads_from_outside_cannot_wait_in_it_and_a_world_runs_once() -> None:
    clock = VirtualClock()
    with pytest.raises(UsageError, match="outside"):
        clock.parker().park(1.0)
    refused: list[UsageError] = []

    def outside() -> None:
        try:
            clock.parker().park(1.0)
        except UsageError as error:
            refused.append(error)

    def body() -> None:
        stranger = threading.Thread(target=outside, daemon=True)
        stranger.start()
        stranger.join(20.0)

    run(clock, body)
    assert len(refused) == 1
    with pytest.raises(UsageError, match="had its run"):
        run(clock, lambda: None)


def test_a_world_with_nothing_left_but_a_paused_thread_is_stopped_with_an_error() -> None:
    clock = VirtualClock()
    messages = []

    def body() -> None:
        clock.pause(0)
        with pytest.raises(FerroError) as raised:
            clock.parker().park(1.0)
        messages.append(str(raised.value))

    clock.run([("paused", body)], wall_seconds=5.0)
    assert "no thread can run and no timer is due within a year" in messages[0]
    assert "thread 'paused' in body" in messages[0]


def test_a_thread_that_blocks_for_real_is_named() -> None:
    go_on = threading.Event()

    def stuck() -> None:
        go_on.wait(60)

    clock = VirtualClock()
    with pytest.raises(FerroError, match="'stuck' in stuck"):
        clock.run([("stuck", stuck)], wall_seconds=1.0)
    go_on.set()


def test_after_the_limit_of_time_those_end_too_that_are_paused() -> None:
    clock, ended = VirtualClock(), list[str]()

    def busy() -> None:
        clock.pause(1)
        try:
            while True:
                clock.parker().park(clock.now() + 1.0)
        finally:
            ended.append("busy")

    def paused() -> None:
        try:
            clock.parker().park(1.0)
        finally:
            ended.append("paused")

    with pytest.raises(FerroError, match=r"still runs after 0\.05 real seconds"):
        clock.run([("busy", busy), ("paused", paused)], wall_seconds=0.05)
    eventually(lambda: sorted(ended) == ["busy", "paused"])


def test_when_the_system_refuses_a_thread_those_that_wait_for_it_end(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def two_at_most(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", two_at_most)
    with pytest.raises(LimitExceededError, match="refuses a thread"):
        run(VirtualClock(), *[pytest.fail] * 3)
    for thread in started:
        thread.join(20.0)
        assert not thread.is_alive()


def test_a_helper_that_is_refused_is_an_error_of_the_one_who_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    clock = VirtualClock()

    def body() -> None:
        monkeypatch.setattr(threading.Thread, "start", refused)
        with pytest.raises(LimitExceededError):
            clock.start(lambda: None, "helper")
        clock.parker().park(1.0)

    run(clock, body)


def test_a_manual_clock_moves_only_by_hand() -> None:
    clock = ManualClock(10.0)
    seen: list[float] = []
    outcomes: list[bool] = []
    parker = clock.parker()
    clock.call_at(12.0, lambda: seen.append(clock.now()))
    clock.start(lambda: outcomes.append(parker.park(13.0)), "sleeper")
    clock.wait_for_parked(1)
    clock.advance(1.0)
    assert (seen, outcomes) == ([], [])
    clock.advance(1.0)
    assert seen == [12.0]
    clock.start(lambda: outcomes.append(clock.parker().park(12.5)), "another")
    clock.wait_for_parked(2)
    clock.advance(5.0)
    for _ in range(1000):
        if len(outcomes) == 2:
            break
        time.sleep(0.01)
    assert outcomes == [False, False]
    parker.unpark()
    assert parker.park(0.0) is True
    assert parker.park(0.0) is False
    clock.call_at(1.0, lambda: seen.append(clock.now()))
    assert seen == [12.0, 17.0], "what is due already is done at once"
    with pytest.raises(AssertionError, match="0 threads wait on the clock, not 1"):
        clock.wait_for_parked(1, wall_seconds=0.01)
