"""Executions are advanced when woken, probed when slow, ended at their deadline, and their failures reported once."""

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from ferrorpc.collectives import driver, progress as progress_module
from ferrorpc.collectives.driver import EXPLAINED_AT_ONCE, drive
from ferrorpc.collectives.execution import Execution
from ferrorpc.collectives.polling import Polling
from ferrorpc.collectives.progress import PROBES_AT_ONCE, Progress, progress_of
from ferrorpc.errors import CollectiveTimeoutError, FerroError, GroupAbortedError, LimitExceededError, PeerLostError, UsageError
from ferrorpc.guard import SYSTEM_CLOCK, Clock, Guard, Latch, Parker, SystemClock
from ferrorpc.testing import ManualClock
from ferrorpc.work import Work
from tests.unit.transports.shared_memory.host_worlds import in_a_forked_child
from tests.waiting import eventually


class Scripted(Execution):
    """Complete after `steps` wake-ups, or failing with `error` then."""

    def __init__(
        self,
        latch: Latch,
        *,
        steps: int = 0,
        error: Exception | None = None,
        seconds: float = 30.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.guard = Guard(clock, latch, seconds)
        self.results, self.specs = [], []
        self.advances = 0
        self.probes = 0
        self.finished = 0
        self._steps = steps
        self._error = error

    @property
    def label(self) -> str:
        return "scripted #1"

    def advance(self) -> bool:
        self.advances += 1
        if self.advances <= self._steps:
            SYSTEM_CLOCK.call_at(SYSTEM_CLOCK.now() + 0.005, lambda: self.wake())
            return False
        if self._error is not None:
            raise self._error
        return True

    def waiting_on(self) -> list[int]:
        return [3]

    def probe(self) -> None:
        self.probes += 1

    def explain(self) -> str:
        return "waits for rank 3"

    def timeout_error(self) -> FerroError:
        return CollectiveTimeoutError([3], "too late")

    def finish(self) -> None:
        self.finished += 1


class Never(Scripted):
    """Waits for ever."""

    def advance(self) -> bool:
        self.advances += 1
        return False


def reporting() -> tuple[Latch, list[FerroError]]:
    """A latch, and the causes with which it was ended."""
    reported: list[FerroError] = []

    def report(error: FerroError, latch: Latch) -> None:
        reported.append(error)
        latch.trip(error)

    return Latch(report), reported


def run(way: str, execution: Execution) -> None:
    if way == "drive":
        drive(execution)
    else:
        Progress(SYSTEM_CLOCK).submit(execution, lambda done: done).wait(timeout=20.0)


both = pytest.mark.parametrize("way", ["drive", "progress"])


@both
def test_it_is_advanced_once_for_each_wake_and_then_freed(way: str) -> None:
    execution = Scripted(Latch(), steps=3)
    run(way, execution)
    assert (execution.advances, execution.finished) == (4, 1)


@both
def test_at_its_deadline_it_is_reported_and_raises_its_own_timeout(way: str) -> None:
    latch, reported = reporting()
    execution = Never(latch, seconds=1.0)
    with pytest.raises(CollectiveTimeoutError) as raised:
        run(way, execution)
    assert raised.value.waiting_on == [3]
    assert [type(error) for error in reported] == [CollectiveTimeoutError]
    assert (execution.probes >= 1, execution.finished) == (True, 1)


@both
def test_what_is_raised_is_the_first_cause_that_was_kept(way: str) -> None:
    def somebody_was_first(error: FerroError, latch: Latch) -> None:
        latch.trip(GroupAbortedError(0, "theirs"))

    execution = Scripted(Latch(somebody_was_first), steps=1, error=PeerLostError(2, "mine"))
    with pytest.raises(GroupAbortedError, match="theirs"):
        run(way, execution)


class Stuck(Scripted):
    """What it holds is on a GPU that has failed."""

    def finish(self) -> None:
        raise RuntimeError("the GPU is gone")


@both
def test_a_failure_is_not_hidden_by_one_to_let_go_of_what_the_operation_holds(way: str) -> None:
    latch, reported = reporting()
    with pytest.raises(PeerLostError, match="mine"):
        run(way, Stuck(latch, steps=1, error=PeerLostError(2, "mine")))
    assert [type(error) for error in reported] == [PeerLostError]


class CUDADriverError(RuntimeError):
    """CuPy's, of a kernel that was launched on a GPU that has failed."""

    status = 700


@both
def test_an_operation_whose_kernel_finds_that_the_gpu_has_failed_says_so(way: str) -> None:
    latch, reported = reporting()
    with pytest.raises(FerroError, match="the GPU has failed: illegal address") as raised:
        run(way, Scripted(latch, steps=1, error=CUDADriverError("illegal address")))
    assert "started again" in raised.value.hint
    assert [type(error).__name__ for error in (raised.value, *reported)] == ["BackendUnavailableError"] * 2


@pytest.mark.parametrize(("error", "raised"), [(None, "the GPU is gone"), (PeerLostError(2, "mine"), "mine")])
def test_an_operation_that_cannot_let_go_of_what_it_holds_fails_and_the_thread_goes_on(error: Any, raised: str) -> None:
    latch, reported = reporting()
    progress = Progress(SYSTEM_CLOCK)
    work = progress.submit(Stuck(latch, steps=1, error=error), lambda done: done)
    with pytest.raises(FerroError, match=raised):
        work.wait(timeout=20.0)
    assert [raised in each.message for each in reported] == [True]
    progress.submit(Scripted(Latch(), steps=1), lambda done: done).wait(timeout=20.0)


@both
def test_a_failure_that_is_met_after_the_end_of_the_generation_does_not_hide_its_first_cause(way: str) -> None:
    latch, reported = reporting()

    class Late(Scripted):
        """The first cause is pushed after the driver has looked at the latch, and before the execution meets a failure."""

        def advance(self) -> bool:
            latch.trip(GroupAbortedError(0, "theirs"))
            raise PeerLostError(2, "mine")

    with pytest.raises(GroupAbortedError, match="theirs"):
        run(way, Late(latch))
    assert reported == []


@both
def test_the_end_of_the_generation_ends_the_wait(way: str) -> None:
    latch, reported = reporting()
    SYSTEM_CLOCK.call_at(SYSTEM_CLOCK.now() + 0.02, lambda: latch.trip(PeerLostError(1, "gone")))
    execution = Never(latch)
    with pytest.raises(PeerLostError):
        run(way, execution)
    assert (reported, execution.finished) == ([], 1)


@both
def test_the_end_of_the_generation_ends_the_wait_of_one_that_is_polled(way: str) -> None:
    latch, last = Latch(), 900  # who waits looks 800 times before it sleeps between looks

    class Polled(Never):
        polling = Polling(1)

        def advance(self) -> bool:
            if self.advances == last:
                latch.trip(PeerLostError(1, "gone"))
            assert self.advances <= last, "it is advanced after the end"
            return super().advance()

    execution = Polled(latch)
    with pytest.raises(PeerLostError):
        run(way, execution)
    assert execution.finished == 1


@pytest.fixture
def no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (driver, progress_module):
        monkeypatch.setattr(module, "VERDICT_SECONDS", 0.01)


@both
@pytest.mark.parametrize("error", [None, UsageError("a bad argument"), PeerLostError(2, "mine")], ids=["well", "alone", "lost"])
def test_what_is_over_no_longer_watches_its_generation(way: str, error: Exception | None, no_verdict: None) -> None:
    called: list[str] = []

    class Watched(Latch):
        def watch(self, watcher: Callable[[], None]) -> int:
            return super().watch(lambda: called.append("watcher"))

    latch = Watched(lambda cause, latch: None)  # it trips once all ranks are told
    with contextlib.suppress(FerroError):
        run(way, Scripted(latch, steps=2, error=error))
    latch.trip(PeerLostError(1, "gone"))
    assert called == []


@both
def test_a_usage_error_concerns_this_rank_alone(way: str) -> None:
    latch, reported = reporting()
    with pytest.raises(UsageError):
        run(way, Scripted(latch, steps=1, error=UsageError("wrong out")))
    assert (reported, latch.cause) == ([], None)


@both
def test_an_array_without_room_breaks_the_generation_and_is_no_bug(way: str) -> None:
    latch, reported = reporting()
    with pytest.raises(LimitExceededError, match="scripted #1: this process has no memory"):
        run(way, Scripted(latch, steps=1, error=MemoryError("8 TiB")))
    assert [type(error) for error in reported] == [LimitExceededError]


@both
def test_nothing_starts_after_the_generation_has_ended(way: str) -> None:
    latch = Latch()
    latch.trip(PeerLostError(1, "gone"))
    execution = Scripted(latch)
    with pytest.raises(PeerLostError):
        run(way, execution)
    assert execution.advances == 0


@both
def test_a_verdict_that_does_not_come_leaves_the_ranks_own_error(way: str, no_verdict: None) -> None:
    execution = Scripted(Latch(lambda cause, latch: None), steps=1, error=PeerLostError(2, "mine"))
    with pytest.raises(PeerLostError, match="mine"):
        run(way, execution)
    assert execution.guard.latch.cause is None


def test_a_bug_in_one_operation_does_not_stop_the_others() -> None:
    latch, reported = reporting()
    progress = Progress(SYSTEM_CLOCK)
    broken = progress.submit(Scripted(latch, error=ZeroDivisionError("a bug")), lambda done: done)
    sound = progress.submit(Scripted(Latch(), steps=2), lambda done: 7)
    assert sound.wait(timeout=20.0) == 7
    with pytest.raises(FerroError, match="a bug"):
        broken.wait(timeout=20.0)
    assert len(reported) == 1


@pytest.mark.parametrize("problem", [UsageError("no such kind"), MemoryError("no room"), ZeroDivisionError("a bug")])
def test_what_cannot_be_made_into_a_result_is_given_back_for_the_next_one(problem: Exception) -> None:
    class Received(Scripted):
        def give_back(self) -> None:
            given_back.append(self.finished)

    def convert(done: Execution) -> None:
        raise problem

    (latch, reported), given_back = reporting(), list[int]()
    with pytest.raises(FerroError, match=str(problem)) as raised:
        Progress(SYSTEM_CLOCK).submit(Received(latch), convert).wait(timeout=20.0)
    assert not isinstance(raised.value, GroupAbortedError), "the group goes on"
    assert (given_back, reported) == ([1], [])


def test_a_gpu_that_cannot_be_made_current_fails_its_own_operation_alone() -> None:
    latch, reported = reporting()
    progress = Progress(SYSTEM_CLOCK)

    class Failed:
        def enter_own_thread(self) -> None:
            raise RuntimeError("an illegal address")

    broken = Scripted(latch)
    broken.device = Failed()  # type: ignore[assignment]
    with pytest.raises(FerroError, match="an illegal address"):
        progress.submit(broken, lambda done: done).wait(timeout=20.0)
    assert len(reported) == 1
    assert progress.submit(Scripted(Latch(), steps=2), lambda done: 7).wait(timeout=20.0) == 7


def test_many_operations_in_flight_end_in_their_own_time() -> None:
    progress = Progress(SYSTEM_CLOCK)
    works = [progress.submit(Scripted(Latch(), steps=n % 5), lambda done, n=n: n) for n in range(50)]
    assert [work.wait(timeout=20.0) for work in works] == list(range(50))
    assert sum(thread.name == "ferrorpc-progress" for thread in threading.enumerate()) >= 1


def test_of_thousands_in_flight_only_the_oldest_ask_their_peers_and_are_explained(caplog: pytest.LogCaptureFixture) -> None:
    """When each asked, a slow peer was left more answers than may be unread, which ended the generation."""
    clock, latch = ManualClock(), Latch()
    progress = Progress(clock)
    waiting = [Never(latch, clock=clock) for _ in range(3000)]
    works = [progress.submit(each, lambda done: done) for each in waiting]
    for seconds in (0.26, 4.0, 0.8, 0.0):
        eventually(lambda: len(progress._timers) == 3000 and progress._timers[0][0] > clock.now(), "the timers that were due")
        clock.advance(seconds)
    assert [each.probes for each in waiting] == [2] * PROBES_AT_ONCE + [0] * (3000 - PROBES_AT_ONCE)
    found = [record.getMessage() for record in caplog.records]
    assert found == ["after 5 s, waits for rank 3"] * EXPLAINED_AT_ONCE + ["after 5 s, more operations wait than the 8 above"]
    latch.trip(PeerLostError(3, "killed"))
    for work in works:
        with pytest.raises(PeerLostError):
            work.wait()


def test_what_is_over_before_it_was_handed_over_no_longer_watches_its_generation() -> None:
    """A send that has begun on its caller's thread may be woken at any time."""

    class Eager(Scripted):
        handed_over: Work[None]

        @property
        def wake(self) -> Callable[[], None]:
            return self._wake

        @wake.setter
        def wake(self, wake: Callable[[], None]) -> None:
            self._wake = wake
            wake()
            self.handed_over.wait(timeout=20.0)

    progress, latch = Progress(SYSTEM_CLOCK), Latch()
    progress.submit(Scripted(latch), lambda done: None).wait(timeout=20.0)  # starts its thread
    execution = Eager(latch)
    execution.handed_over = Work(SYSTEM_CLOCK, execution.label)
    progress.submit(execution, lambda done: None, execution.handed_over)
    assert not latch._watchers


def test_nobody_looks_for_what_was_polled_once_it_is_over() -> None:
    naps: list[float] = []

    class Naps(SystemClock):
        def parker(self) -> Parker:
            parker = super().parker()

            class Noted:
                def park(self, until: float) -> bool:
                    naps.append(until - SYSTEM_CLOCK.now())
                    return parker.park(until)

                def unpark(self) -> None:
                    parker.unpark()

            return Noted()

    class Polled(Scripted):
        polling = Polling(1)

    Progress(Naps()).submit(Polled(Latch(), steps=2), lambda done: done).wait(timeout=20.0)
    eventually(lambda: naps[-1] > 0.02, "a thread that sleeps until something happens")


def test_what_cannot_begin_yet_is_not_polled() -> None:
    """Where thousands of operations wait in shared memory, polling each of them takes longer than the operations do."""
    may_end, channel = threading.Event(), object()

    class Queued(Scripted):
        polling = Polling(1)
        queue = channel

        def advance(self) -> bool:
            self.advances += 1
            return may_end.is_set()

    progress, latch = Progress(SYSTEM_CLOCK), Latch()
    oldest, *later = [Queued(latch) for _ in range(5)]
    works = [progress.submit(each, lambda done: done) for each in (oldest, *later)]
    eventually(lambda: oldest.advances > 20, "polls")
    assert [each.advances for each in later] == [1] * 4
    may_end.set()
    assert [work.wait(timeout=20.0) for work in works] == [oldest, *later]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_an_operation_is_held_once_it_is_over(fails: bool) -> None:
    """Although its timers are not due yet, and no other operation follows."""
    progress, latch = Progress(SYSTEM_CLOCK), Latch()
    execution = Scripted(latch, steps=3, error=UsageError("a bad argument") if fails else None)
    work = progress.submit(execution, lambda execution: None)
    with contextlib.suppress(UsageError):
        work.wait(10.0)
    held = weakref.ref(execution)
    del execution, work
    deadline = SYSTEM_CLOCK.now() + 0.2
    while held() is not None and SYSTEM_CLOCK.now() < deadline:
        gc.collect()
    assert held() is None


def test_what_has_failed_is_let_go_of_without_a_garbage_collection() -> None:
    """Its arrays may fill most of a GPU, and the next generation needs the room."""

    def report(error: FerroError, latch: Latch) -> None:
        latch.trip(GroupAbortedError(0, error.message))

    execution = Never(Latch(report), seconds=0.05)
    held = weakref.ref(execution)
    gc.collect()
    gc.disable()
    try:
        work = Progress(SYSTEM_CLOCK).submit(execution, lambda done: done)
        del execution
        with pytest.raises(GroupAbortedError):
            work.wait(timeout=20.0)
        eventually(lambda: held() is None, "the execution is freed")
    finally:
        gc.enable()


def test_a_forked_child_drives_the_operations_of_its_own_groups() -> None:
    """Such as those of a world in one process: its parent's thread is not there."""

    def result() -> object:
        return progress_of(SYSTEM_CLOCK).submit(Scripted(Latch(), steps=1), lambda _: 7).wait(10.0)

    assert result() == 7
    assert in_a_forked_child(lambda: result() == 7) == 0


@both
def test_an_error_of_the_users_own_is_no_bug_of_the_librarys(way: str) -> None:
    """Such as what a signal handler raises, which Python calls wherever it is."""

    class Alarmed(Never):
        def advance(self) -> bool:
            raise TimeoutError("the batch took too long")

    latch, reported = reporting()
    with pytest.raises((TimeoutError, FerroError)):
        run(way, Alarmed(latch))
    (told,) = reported
    assert isinstance(told, GroupAbortedError)
    assert told.cause == "TimeoutError: the batch took too long during scripted #1"
    assert told.hint.startswith(f"see {__file__}:")
    assert told.retryable


@both
def test_an_error_within_the_library_is_a_bug(way: str) -> None:
    class Broken(Never):
        def advance(self) -> bool:
            nothing: Any = None
            Latch.check(nothing)
            return True

    latch, reported = reporting()
    with pytest.raises((AttributeError, FerroError)):
        run(way, Broken(latch))
    assert reported[0].hint == "report this as a bug in ferrorpc, with the lines above"
