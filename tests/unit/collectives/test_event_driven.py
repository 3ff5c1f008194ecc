"""Whoever has news advances an execution; its driver sleeps until it is over, and nobody ever waits for a turn."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from ferrorpc.collectives.driver import drive
from ferrorpc.collectives.event_driven import EventDrivenExecution
from ferrorpc.collectives.progress import Progress
from ferrorpc.errors import CollectiveTimeoutError, FerroError, GroupAbortedError, UsageError
from ferrorpc.guard import SYSTEM_CLOCK, Guard, Latch

SECONDS = 60.0


class Counting(EventDrivenExecution):
    """Complete once `count` pieces of news have come, each of which is one item of `news`."""

    def __init__(self, count: int, work: Callable[[], None] = lambda: None) -> None:
        super().__init__(Guard(SYSTEM_CLOCK, Latch(), SECONDS))
        self.news: list[int] = []
        self.taken = 0
        self.inside = 0
        self.threads: set[int] = set()
        self.left = 0
        self.wake = lambda: None
        self._count = count
        self._work = work
        self.looked: Callable[[], None] = lambda: None
        """Called when a step has taken what there was."""

    def step(self) -> bool:
        self.inside += 1
        assert self.inside == 1, "two threads at once"
        self.threads.add(threading.get_ident())
        self._work()
        while len(self.news) > self.taken:
            self.taken += 1
        self.looked()
        self.inside -= 1
        return self.taken >= self._count

    def tell(self) -> None:
        self.news.append(1)
        self.notify()

    @property
    def label(self) -> str:
        return "counting #1"

    def waiting_on(self) -> list[int]:
        return []

    def probe(self) -> None:
        """Nobody is asked."""

    def explain(self) -> str:
        return "waits for news"

    def timeout_error(self) -> FerroError:
        return CollectiveTimeoutError([], "too late")

    def leave(self) -> None:
        self.left += 1


def together(count: int, body: Callable[[], None]) -> None:
    threads = [threading.Thread(target=body, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_the_driver_sleeps_while_those_who_have_news_do_the_work() -> None:
    execution = Counting(3)
    for delay in (0.02, 0.04, 0.06):
        SYSTEM_CLOCK.call_at(SYSTEM_CLOCK.now() + delay, execution.tell)
    drive(execution)
    assert len(execution.threads - {threading.get_ident()}) == 3
    assert (execution.taken, execution.left) == (3, 1)


def test_no_news_is_lost_however_many_bring_it() -> None:
    each, threads = 2000, 4
    execution = Counting(each * threads)
    notify_if_driven = threading.Event()
    execution.wake = notify_if_driven.set
    assert not execution.advance()

    def body() -> None:
        for _ in range(each):
            execution.tell()

    together(threads, body)
    assert notify_if_driven.wait(SECONDS)
    assert execution.advance()


def test_nobody_waits_for_a_turn_that_another_has() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        assert go_on.wait(SECONDS)

    execution = Counting(1)
    assert not execution.advance()
    execution._work = slow
    threading.Thread(target=execution.notify, daemon=True).start()
    assert entered.wait(SECONDS)
    execution.tell()
    assert not execution.advance()
    execution._work = lambda: None
    notify_if_driven = threading.Event()
    execution.wake = notify_if_driven.set
    go_on.set()
    assert notify_if_driven.wait(SECONDS)
    assert execution.advance()


def test_news_that_comes_after_whoever_has_the_turn_has_looked_is_looked_for_once_more() -> None:
    looked, go_on, notify_if_driven = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        looked.set()
        assert go_on.wait(SECONDS)

    execution = Counting(1)
    assert not execution.advance()
    execution.looked, execution.wake = hold, notify_if_driven.set
    threading.Thread(target=execution.notify, daemon=True).start()
    assert looked.wait(SECONDS)
    execution.tell()
    go_on.set()
    assert notify_if_driven.wait(SECONDS)
    assert execution.advance()


def test_news_that_advancing_brings_to_others_does_not_pile_up_calls() -> None:
    deep = 5000
    executions = [Counting(1) for _ in range(deep)]
    for execution, following in pairwise(executions):
        execution.advance()
        execution._work = following.tell
    executions[-1].advance()
    executions[0].tell()
    assert all(execution.taken for execution in executions)


def test_what_goes_wrong_on_another_thread_is_raised_by_the_driver() -> None:
    execution = Counting(1)

    def wrong() -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("wrong on a reader's thread")

    execution._work = wrong
    SYSTEM_CLOCK.call_at(SYSTEM_CLOCK.now() + 0.02, execution.tell)
    with pytest.raises(UsageError, match="reader's thread"):
        drive(execution)
    assert execution.left == 1


def test_an_interrupt_is_raised_where_it_struck_and_fails_the_operation_that_was_being_advanced() -> None:
    """Ctrl-C may strike while the main thread advances an operation that another thread drives."""
    progress, here = Progress(SYSTEM_CLOCK), threading.get_ident()

    def interrupted() -> None:
        if threading.get_ident() == here:
            raise KeyboardInterrupt

    struck, queued = Counting(2, interrupted), Counting(1)
    looked = threading.Event()
    struck.looked = looked.set
    failing = progress.submit(struck, lambda _: None)
    going_on = progress.submit(queued, lambda _: 7)
    assert looked.wait(SECONDS)

    def tell_both() -> None:
        queued.news.append(1)
        queued.notify()  # waits until this thread has advanced the other
        interrupted()

    struck._work = tell_both
    with pytest.raises(KeyboardInterrupt):
        struck.tell()
    with pytest.raises(GroupAbortedError, match="KeyboardInterrupt during counting #1"):
        failing.wait(SECONDS)
    assert going_on.wait(SECONDS) == 7


def test_a_thread_that_is_interrupted_as_it_gets_the_turn_does_not_keep_it() -> None:
    """Nobody could advance the operation any more, and its end would wait for that thread for ever."""

    class Struck:
        def __init__(self, lock: Any) -> None:
            self._plain, self.release = lock, lock.release

        def acquire(self, blocking: bool) -> None:
            self._plain.acquire(blocking=blocking)
            raise KeyboardInterrupt

    execution = Counting(2)
    execution.advance()
    plain, execution._step_lock = execution._step_lock, Struck(execution._step_lock)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        execution.tell()
    execution._step_lock = plain
    together(1, execution.tell)
    assert execution.advance()


def test_what_failed_is_free_as_soon_as_it_is_over() -> None:
    """Without waiting for the garbage collector: an error refers to whom it was raised in."""

    def wrong() -> None:
        raise UsageError("wrong")

    execution = Counting(1, wrong)
    held = weakref.ref(execution)
    gc.disable()
    try:
        with contextlib.suppress(UsageError):
            drive(execution)
        del execution
        assert held() is None
    finally:
        gc.enable()


def test_nothing_is_done_any_more_once_it_is_finished() -> None:
    entered, go_on, order = threading.Event(), threading.Event(), list[str]()

    def slow() -> None:
        entered.set()
        assert go_on.wait(SECONDS)
        order.append("worked")

    execution = Counting(5)
    execution.advance()
    execution._work = slow
    threading.Thread(target=execution.tell, daemon=True).start()
    assert entered.wait(SECONDS)
    SYSTEM_CLOCK.call_at(SYSTEM_CLOCK.now() + 0.05, go_on.set)
    execution.finish()
    order.append("finished")
    execution.tell()
    execution.finish()
    assert order == ["worked", "finished"]
    assert execution.left == 1


def test_what_others_did_since_counts_as_movement_and_the_drivers_own_first_look_does_not() -> None:
    execution = Counting(5)
    execution.advance()
    assert not execution.moved()
    execution.tell()
    assert [execution.moved(), execution.moved()] == [True, False]


def test_an_interrupt_in_one_loses_no_event_of_another_that_waits_behind_it() -> None:
    def struck() -> None:
        second.tell()
        raise KeyboardInterrupt

    woken: list[str] = []
    first, second = Counting(1, struck), Counting(1)
    second.wake = lambda: woken.append("second")
    with pytest.raises(KeyboardInterrupt):
        first.notify()
    assert woken == ["second"]
    assert second.advance()


def test_an_event_that_comes_after_its_end_makes_no_step() -> None:
    execution = Counting(2)
    assert not execution.advance()
    execution.finish()
    execution.tell()
    assert execution.taken == 0
