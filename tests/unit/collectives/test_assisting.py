"""A thread that waits for a Work advances the operation itself, and never leaves it to nobody."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from ferrorpc import work as work_module
from ferrorpc.collectives import progress as progress_module
from ferrorpc.collectives.event_driven import EventDrivenExecution
from ferrorpc.collectives.execution import Execution
from ferrorpc.collectives.polling import Polling
from ferrorpc.collectives.progress import Progress
from ferrorpc.errors import (
    CollectiveTimeoutError,
    FerroError,
    GroupAbortedError,
    LimitExceededError,
    PeerLostError,
    TensorMismatchError,
    UsageError,
)
from ferrorpc.guard import SYSTEM_CLOCK, Guard, Latch
from ferrorpc.work import Work
from tests.interrupts import InterruptAt
from tests.unit.collectives.test_progress import Never, Scripted, reporting
from tests.waiting import eventually

MODULES = [progress_module.__file__, work_module.__file__]
SECONDS = 20.0


class Polled(Scripted):
    """Complete at its poll number `steps`. Knows the threads that advanced it."""

    def __init__(self, latch: Latch, **arguments: Any) -> None:
        super().__init__(latch, **arguments)
        self.polling: Any = Polling(1)
        self.threads: list[str] = []

    def advance(self) -> bool:
        self.threads.append(threading.current_thread().name)
        self.advances += 1
        if self.advances <= self._steps:
            return False
        if self._error is not None:
            raise self._error
        return True


class Eventful(EventDrivenExecution):
    """Complete after so many events, which come one by one from another thread."""

    def __init__(self, latch: Latch, *, steps: int = 0) -> None:
        super().__init__(Guard(SYSTEM_CLOCK, latch, 30.0))
        self.finished = 0
        self.threads: list[str] = []
        self._left = steps

    label = "eventful #1"  # type: ignore[assignment]

    def step(self) -> bool:
        self.threads.append(threading.current_thread().name)
        if self._left == 0:
            return True
        self._left -= 1
        SYSTEM_CLOCK.call_at(SYSTEM_CLOCK.now() + 0.001, self.notify)
        return False

    def leave(self) -> None:
        self.finished += 1

    def waiting_on(self) -> list[int]:
        return [3]

    def probe(self) -> None: ...

    def explain(self) -> str:
        return "waits for rank 3"

    def timeout_error(self) -> FerroError:
        return CollectiveTimeoutError([3], "too late")


class Busy(Scripted):
    """Keeps the progress thread until it is let go."""

    def __init__(self) -> None:
        super().__init__(Latch())
        self.is_kept, self.may_go = threading.Event(), threading.Event()

    def advance(self) -> bool:
        self.is_kept.set()
        return self.may_go.wait(SECONDS)


@pytest.fixture
def progress() -> Progress:
    return Progress(SYSTEM_CLOCK)


@pytest.fixture
def busy(progress: Progress) -> Busy:
    made = Busy()
    submit(progress, made)
    made.is_kept.wait(SECONDS)
    return made


def submit(progress: Progress, execution: Execution) -> Work[Any]:
    return progress.submit(execution, lambda done: 7)


def test_who_waits_completes_it_without_the_progress_thread(progress: Progress, busy: Busy) -> None:
    execution = Polled(Latch(), steps=5)
    work = submit(progress, execution)
    done: list[int] = []
    work.on_done(lambda: done.append(1))
    assert work.wait() == 7
    assert (set(execution.threads), execution.finished, done) == ({"MainThread"}, 1, [1])
    busy.may_go.set()


def test_an_event_wakes_who_waits_without_the_progress_thread(progress: Progress, busy: Busy) -> None:
    execution = Eventful(Latch(), steps=2)
    assert submit(progress, execution).wait() == 7
    assert execution.threads[0] == "MainThread"
    assert execution.finished == 1
    busy.may_go.set()


def test_who_does_not_wait_long_leaves_it_alone(progress: Progress, busy: Busy) -> None:
    execution = Polled(Latch(), steps=5)
    work = submit(progress, execution)
    with pytest.raises(CollectiveTimeoutError):
        work.wait(timeout=0.001)
    assert execution.threads == []
    busy.may_go.set()
    assert work.wait(timeout=SECONDS) == 7


def test_what_takes_longer_is_the_progress_threads_again(progress: Progress) -> None:
    class HandedBack(Polled):
        def advance(self) -> bool:
            super().advance()
            return self.threads[-1] == "ferrorpc-progress" and "MainThread" in self.threads

    assert submit(progress, HandedBack(Latch())).wait(timeout=SECONDS) == 7


class OfADevice(Polled):
    device = object()  # type: ignore[assignment]


class Crowded(Polled):
    """There are more ranks than processors."""

    def __init__(self, latch: Latch) -> None:
        super().__init__(latch)
        self.polling = Polling(100_000)


@pytest.mark.parametrize("kind", [Scripted, OfADevice, Crowded])
def test_what_wakes_its_driver_is_on_a_device_or_takes_a_peers_processor_is_not_assisted(
    progress: Progress, busy: Busy, kind: type[Scripted]
) -> None:
    execution = kind(Latch())
    work = submit(progress, execution)
    with pytest.raises(CollectiveTimeoutError):
        work.wait(timeout=0.05)
    assert execution.advances == 0
    busy.may_go.set()


def test_what_is_polled_later_because_it_was_assisted_keeps_its_place(progress: Progress, busy: Busy) -> None:
    """Only the oldest of a queue is polled, and the second cannot end before the first."""

    class InTurn(Polled):
        queue = "the channel"  # type: ignore[assignment]

        def __init__(self, before: InTurn | None = None) -> None:
            super().__init__(Latch())
            self.before = before
            self.is_assisted, self.may_go = threading.Event(), threading.Event()

        def advance(self) -> bool:
            if threading.current_thread().name == "ferrorpc-progress":
                return self.before is None or self.before.finished > 0
            self.is_assisted.set()
            self.may_go.wait(SECONDS)
            return False

    first = InTurn()
    works = [submit(progress, first), submit(progress, InTurn(first))]
    waiting = threading.Thread(target=works[0].wait)
    waiting.start()
    first.is_assisted.wait(SECONDS)
    busy.may_go.set()
    eventually(lambda: len(progress._polled) == 1, "the second is polled")
    first.may_go.set()
    eventually(lambda: all(work.done() for work in works), "both are done")
    waiting.join()


# Failures.


@pytest.mark.parametrize(
    ("raised", "found"),
    [(PeerLostError(2, "mine"), PeerLostError), (MemoryError("8 TiB"), LimitExceededError)],
    ids=["its own", "memory"],
)
def test_a_failure_is_reported_once_and_raised(
    progress: Progress, busy: Busy, raised: Exception, found: type[FerroError]
) -> None:
    latch, reported = reporting()
    work = submit(progress, Polled(latch, steps=3, error=raised))
    busy_goes = threading.Timer(0.05, busy.may_go.set)
    busy_goes.start()
    with pytest.raises(found):
        work.wait(timeout=SECONDS)
    assert [type(error) for error in reported] == [found]


def test_a_mistake_of_this_rank_concerns_it_alone(progress: Progress) -> None:
    latch, reported = reporting()
    with pytest.raises(TensorMismatchError):
        submit(progress, Polled(latch, error=TensorMismatchError("no fit"))).wait()
    assert (reported, latch.cause) == ([], None)


def test_what_a_signal_handler_raises_ends_the_generation_and_reaches_its_caller(progress: Progress) -> None:
    latch, reported = reporting()
    work = submit(progress, Polled(latch, steps=3, error=ArithmeticError("of a handler")))
    with pytest.raises((ArithmeticError, FerroError), match="of a handler"):
        work.wait(timeout=SECONDS)
    with pytest.raises(FerroError, match="of a handler"):
        work.wait(timeout=SECONDS)
    assert len(reported) == 1


def test_what_a_signal_handler_raises_while_the_result_is_made_reaches_who_waits_and_the_result_is_not_lost(
    progress: Progress, busy: Busy
) -> None:
    strikes = [ArithmeticError("of a handler")]

    def convert(done: Execution) -> int:
        if strikes:
            raise strikes.pop()
        return 7

    latch, reported = reporting()
    work = progress.submit(Polled(latch, steps=3), convert)
    with pytest.raises(ArithmeticError, match="of a handler"):
        work.wait(timeout=SECONDS)
    busy.may_go.set()
    assert work.wait(timeout=SECONDS) == 7
    assert reported == []


def test_the_end_of_the_generation_ends_the_wait(progress: Progress) -> None:
    latch = Latch()
    execution = Polled(latch, steps=10_000_000)
    work = submit(progress, execution)
    SYSTEM_CLOCK.call_at(SYSTEM_CLOCK.now() + 0.005, lambda: latch.trip(PeerLostError(1, "gone")))
    with pytest.raises(PeerLostError):
        work.wait(timeout=SECONDS)
    assert execution.finished == 1


def test_a_deadline_that_passes_while_it_is_assisted_ends_it_afterwards(progress: Progress) -> None:
    class Slow(Polled):
        def advance(self) -> bool:
            if threading.current_thread().name == "MainThread" and not self.probes:
                self.probes = 1
                while SYSTEM_CLOCK.now() < self.guard.deadline + 0.05:
                    SYSTEM_CLOCK.give_way()
            self.advances += 1
            return False

    latch, reported = reporting()
    execution = Slow(latch, seconds=0.1)
    work = submit(progress, execution)
    eventually(lambda: bool(progress._polled), "it is polled")
    with pytest.raises(CollectiveTimeoutError, match="too late"):
        work.wait(timeout=SECONDS)
    assert len(reported) == 1


def test_an_interrupt_within_a_step_ends_the_generation(progress: Progress, busy: Busy) -> None:
    """What the step has done is unknown, and it cannot be done again."""

    class Struck(Polled):
        def advance(self) -> bool:
            super().advance()
            raise KeyboardInterrupt

    latch, reported = reporting()
    work = submit(progress, Struck(latch))
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    busy.may_go.set()
    with pytest.raises(GroupAbortedError, match="KeyboardInterrupt during scripted #1"):
        work.wait(timeout=SECONDS)
    assert len(reported) == 1


def test_a_signal_handler_that_waits_for_what_it_has_interrupted_is_told_so(progress: Progress, busy: Busy) -> None:
    """The operation goes on only when the handler has returned."""

    class Handled(Polled):
        def advance(self) -> bool:
            with pytest.raises(UsageError, match="waits for the very operation that it has interrupted"):
                work.wait()
            return True

    work = submit(progress, Handled(Latch()))
    assert work.wait() == 7
    busy.may_go.set()


class LetsGo(Polled):
    """Its last step lets the progress thread go on."""

    def __init__(self, keeper: Busy, latch: Latch, error: Exception | None) -> None:
        super().__init__(latch, steps=2, error=error)
        self.keeper = keeper

    def advance(self) -> bool:
        if self.advances == 2:
            self.keeper.may_go.set()
        return super().advance()


class EventfulThatLetsGo(Eventful):
    """The progress thread goes on at once."""

    def __init__(self, keeper: Busy, latch: Latch, error: Exception | None) -> None:
        super().__init__(latch, steps=2)
        keeper.may_go.set()


class NeedsTheThread(Eventful):
    """Only the progress thread completes it, which goes on once it is assisted."""

    def __init__(self, keeper: Busy, latch: Latch, error: Exception | None) -> None:
        super().__init__(latch)
        self.keeper = keeper

    def step(self) -> bool:
        assisted = threading.current_thread().name == "MainThread"
        if assisted:
            self.keeper.may_go.set()
        return not assisted


@pytest.mark.parametrize(
    ("kind", "error"),
    [(LetsGo, None), (LetsGo, PeerLostError(1, "gone")), (EventfulThatLetsGo, None), (NeedsTheThread, None)],
    ids=["polled, succeeds", "polled, fails", "with events", "handed back"],
)
def test_wherever_an_interrupt_strikes_the_operation_ends(
    kind: type[LetsGo | EventfulThatLetsGo | NeedsTheThread], error: FerroError | None
) -> None:
    """With its result, or with an error where a step was struck; and others who wait are told once."""
    outcomes = set()
    for place in range(1, 400):
        progress, latch = Progress(SYSTEM_CLOCK), Latch()
        keeper = Busy()
        execution = kind(keeper, latch, error)
        submit(progress, keeper)
        keeper.is_kept.wait(SECONDS)
        work = submit(progress, execution)
        told, times = threading.Event(), list[int]()
        work.on_done(lambda times=times: times.append(1))  # type: ignore[misc]
        work.on_done(told.set)
        tracer, before = InterruptAt(place, MODULES.__contains__), sys.getprofile()
        try:
            sys.setprofile(tracer)
            work.wait()
        except (KeyboardInterrupt, PeerLostError):
            pass
        finally:
            sys.setprofile(before)
        keeper.may_go.set()
        assert told.wait(SECONDS), place
        assert (execution.finished > 0, times) == (True, [1]), place
        if tracer.left > 0:
            break
        found = work.exception()
        assert found is None or isinstance(found, PeerLostError) or "KeyboardInterrupt during" in str(found)
        outcomes.add("broken" if "KeyboardInterrupt" in str(found) else "went on")
    else:
        raise AssertionError("there are more places than that")
    steps_may_be_struck = kind is LetsGo
    assert outcomes == ({"went on", "broken"} if steps_may_be_struck else {"went on"})


# What events advance already.


class Begun(Never):
    has_begun = True


def test_what_events_advance_already_wakes_nobody_when_it_is_submitted(progress: Progress) -> None:
    execution = Begun(Latch())
    work = submit(progress, execution)
    assert not progress._ready
    assert execution.advances == 0
    execution.advance = lambda: True  # type: ignore[method-assign]
    execution.wake()
    assert work.wait(timeout=SECONDS) == 7


def test_what_was_over_before_it_was_submitted_ends_at_once(progress: Progress) -> None:
    execution = Begun(Latch())
    execution.has_ended = True
    execution.advance = lambda: True  # type: ignore[method-assign]
    assert submit(progress, execution).wait(timeout=SECONDS) == 7


def test_its_deadline_counts_although_the_thread_slept_longer(progress: Progress) -> None:
    submit(progress, Begun(Latch()))
    eventually(lambda: progress._sleeps_until < float("inf"), "the thread sleeps")
    latch, reported = reporting()
    with pytest.raises(CollectiveTimeoutError, match="too late"):
        submit(progress, Begun(latch, seconds=0.02)).wait(timeout=SECONDS)
    assert len(reported) == 1


class Explained(Scripted):
    """Lets other threads go on while it says what it waits for."""

    def explain(self) -> str:
        eventually(lambda: self.advances > self._steps)
        return super().explain()


def test_who_only_looks_what_it_waits_for_keeps_it_from_nothing(progress: Progress) -> None:
    work = submit(progress, Explained(Latch(), steps=2))
    with pytest.raises(CollectiveTimeoutError, match="waits for rank 3; it still runs") as caught:
        work.wait(timeout=0)
    assert caught.value.waiting_on == [3]
    assert work.wait(timeout=SECONDS) == 7


def test_who_looks_while_it_ends_is_told_its_name(progress: Progress, busy: Busy) -> None:
    class Ending(Scripted):
        def explain(self) -> str:
            raise AttributeError("another thread has taken it apart")

    work = submit(progress, Ending(Latch()))
    with pytest.raises(CollectiveTimeoutError, match=r"^scripted #1 still runs after 0 s"):
        work.wait(timeout=0)
    busy.may_go.set()
    assert work.wait(timeout=SECONDS) == 7


class Late(Polled):
    """Could be completed, by who waits, as soon as its failure is reported."""

    reported = False

    def advance(self) -> bool:
        super().advance()
        return self.reported and threading.current_thread() is threading.main_thread()


def test_what_has_failed_is_not_completed_by_who_waits_before_the_first_cause_is_known(progress: Progress) -> None:
    told = threading.Event()

    def report(error: FerroError, latch: Latch) -> None:
        execution.reported = True
        told.set()

    latch = Latch(report)
    execution = Late(latch, seconds=0.05)
    work = submit(progress, execution)
    assert told.wait(SECONDS)
    SYSTEM_CLOCK.call_at(SYSTEM_CLOCK.now() + 0.2, lambda: latch.trip(GroupAbortedError(1, "first")))
    with pytest.raises(GroupAbortedError):
        work.wait(timeout=SECONDS)
