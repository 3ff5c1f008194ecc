"""The handle of an asynchronous operation."""

import asyncio
import contextlib
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest

from ferrorpc.errors import CollectiveTimeoutError, FerroError, PeerLostError, TensorMismatchError, UsageError
from ferrorpc.guard import SYSTEM_CLOCK, Parker, SystemClock
from ferrorpc.testing import ManualClock
from ferrorpc.work import Work
from tests.waiting import eventually


class InTurns(SystemClock):
    """A clock whose threads take turns."""

    one_at_a_time = True


def work() -> Work[int]:
    return Work(SYSTEM_CLOCK, "all_reduce #1")


def on_device(handle: Work[Any], make: Callable[[Any], Any], landing: Any = None) -> Work[Any]:
    """One whose result is on a GPU."""
    handle.is_on_device, handle.make_result = True, lambda left: (make(left), landing)
    return handle


@pytest.fixture(autouse=True)
def nothing_left_by_other_tests() -> None:
    """What they never looked at is not logged here."""
    gc.collect()


def test_wait_may_time_out_any_number_of_times_without_consuming_the_result() -> None:
    handle = work()
    for timeout in (0.01, 0, "0.01"):  # what any other call takes as a number of seconds
        with pytest.raises(CollectiveTimeoutError, match=f"still runs after {timeout} s"):
            handle.wait(timeout=timeout)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="timeout"):
        handle.wait(timeout="1 s")
    handle.complete(7)
    assert handle.done()
    assert [handle.wait(), handle.wait(timeout=0)] == [7, 7]


def test_who_asks_whether_it_is_done_lets_other_threads_go_first_while_it_is_not() -> None:
    class Counting(SystemClock):
        ways = 0

        def give_way(self) -> None:
            self.ways += 1

    clock = Counting()
    handle: Work[int] = Work(clock, "all_reduce #1")
    assert not handle.done()
    assert not handle.has_ended
    assert clock.ways == 1
    handle.complete(7)
    assert handle.done()
    assert clock.ways == 1


def test_a_failed_operation_raises_in_wait_and_shows_in_exception() -> None:
    handle = work()
    assert handle.exception() is None
    handle.fail(PeerLostError(1, "gone"))
    assert isinstance(handle.exception(), PeerLostError)
    with pytest.raises(PeerLostError):
        handle.wait()


def test_a_failed_wait_keeps_nothing_of_its_caller_alive() -> None:
    """A handle that the caller keeps beside its arrays must not refer to the caller's frame."""

    class Arrays: ...

    def train() -> weakref.ref[Arrays]:
        arrays, handle = Arrays(), work()
        handle.fail(PeerLostError(1, "gone"))
        with contextlib.suppress(PeerLostError):
            handle.wait()
        return weakref.ref(arrays)

    gc.disable()
    try:
        assert train()() is None
    finally:
        gc.enable()


def test_an_error_does_not_show_before_the_operation_is_done() -> None:
    """It would count as one that nobody looked at."""
    handle = work()
    with handle._lock:  # so that whoever ends it cannot go on
        failing = threading.Thread(target=handle.fail, args=(PeerLostError(1, "gone"),))
        failing.start()
        eventually(lambda: handle.failure)
        assert not handle.done()
        assert handle.exception() is None
    failing.join()
    assert isinstance(handle.exception(), PeerLostError)


def test_it_can_be_awaited() -> None:
    async def main() -> int:
        handle = work()
        SYSTEM_CLOCK.call_at(SYSTEM_CLOCK.now() + 0.01, lambda: handle.complete(3))
        return await handle

    assert asyncio.run(main()) == 3


def test_awaited_where_no_loop_of_asyncio_runs_it_says_what_to_await() -> None:
    """As in trio."""
    with pytest.raises(UsageError, match=r"is awaited without a running loop of asyncio\ntry: .*run_sync\(work.wait\)"):
        work().__await__().send(None)


def test_who_stopped_awaiting_and_closed_the_loop_disturbs_neither_the_driver_nor_who_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handle = work()
    told: list[int] = []

    async def impatient() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(handle, 0.01)

    asyncio.run(impatient())
    handle.on_done(lambda: told.append(1))
    handle.complete(3)
    assert (handle.wait(timeout=0), told, caplog.records) == (3, [1], [])


def test_what_cannot_be_called_is_no_callback() -> None:
    with pytest.raises(UsageError, match="callback=None cannot be called"):
        work().on_done(None)  # type: ignore[arg-type]


def test_a_callback_that_fails_is_logged_and_keeps_nobody_else_waiting(caplog: pytest.LogCaptureFixture) -> None:
    handle = work()
    told: list[int] = []
    handle.on_done(lambda: [].pop())
    handle.on_done(lambda: told.append(1))
    with caplog.at_level(logging.ERROR, "ferrorpc.work"):
        handle.complete(3)
    assert (handle.wait(timeout=0), told) == (3, [1])
    assert "all_reduce #1" in caplog.text


def test_a_callback_that_fails_keeps_nobody_waiting_even_where_a_handler_of_that_line_raises(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Strict(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise KeyError("tenant")

    monkeypatch.setattr(logging.getLogger("ferrorpc.work"), "handlers", [Strict()])
    handle, told = work(), []
    handle.on_done(lambda: [].pop())
    handle.on_done(lambda: told.append(1))
    handle.complete(3)
    assert (handle.wait(timeout=0), told) == (3, [1])
    assert "KeyError: 'tenant'" in capsys.readouterr().err


@pytest.mark.parametrize("raised", [SystemExit, asyncio.CancelledError])
def test_a_callback_cannot_end_a_thread_of_the_library(raised: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    handle, told, ended = work(), [], []

    def fail() -> None:
        told.append("failing")
        raise raised

    def drive() -> None:
        handle.complete(3)
        ended.append(True)

    handle.on_done(fail)
    handle.on_done(lambda: told.append("next"))
    driver = threading.Thread(target=drive)
    driver.start()
    driver.join(20.0)
    assert (handle.wait(timeout=0), told, ended) == (3, ["failing", "next"], [True])
    assert "all_reduce #1" in caplog.text


def test_an_unobserved_error_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "ferrorpc.work"):
        handle = work()
        handle.fail(PeerLostError(1, "gone"))
        del handle
        gc.collect()
        watched = work()
        watched.fail(PeerLostError(2, "gone"))
        watched.exception()
        del watched
        waited = work()
        waited.fail(PeerLostError(2, "gone"))
        with contextlib.suppress(PeerLostError):
            waited.wait()
        del waited
        gc.collect()
        assert len(caplog.records) == 1
        looked_too_soon = work()
        assert looked_too_soon.exception() is None
        looked_too_soon.fail(PeerLostError(3, "gone"))
        del looked_too_soon
        gc.collect()
    assert [record.getMessage().split(" failed")[0] for record in caplog.records] == ["all_reduce #1"] * 2


def failed_with(error: FerroError) -> Work[int]:
    handle = work()
    handle.fail(error)
    return handle


def test_a_cause_that_ended_many_operations_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    cause, other = PeerLostError(1, "gone"), PeerLostError(1, "gone")
    with caplog.at_level(logging.ERROR, "ferrorpc.work"):
        handles = [failed_with(error) for error in (cause.again(), cause.again(), other.again(), cause.again().again())]
        del handles
        gc.collect()
    assert len(caplog.records) == 2


def test_a_cause_that_one_operation_has_shown_is_not_logged_for_the_others(caplog: pytest.LogCaptureFixture) -> None:
    cause = PeerLostError(1, "gone")
    with caplog.at_level(logging.ERROR, "ferrorpc.work"):
        handles = [failed_with(cause.again()) for _ in range(3)]
        with pytest.raises(PeerLostError):
            handles[1].wait()
        del handles
        gc.collect()
    assert caplog.records == []


def test_repr_is_a_status_line() -> None:
    handle = work()
    assert repr(handle) == "<Work all_reduce #1: running>"
    handle.complete(0)
    assert repr(handle) == "<Work all_reduce #1: done>"


class Counted:
    """A meter that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def operating(self, began: float) -> None:
        self.told.append("waits")

    def operated(self, seconds: float) -> None:
        assert seconds >= 0
        self.told.append("has waited")


def test_a_meter_is_told_of_every_wait_from_its_beginning() -> None:
    handle: Work[int] = Work(SYSTEM_CLOCK, "send")
    meter = handle.meter = Counted()
    with pytest.raises(CollectiveTimeoutError):
        handle.wait(timeout=0.01)
    assert meter.told == ["waits", "has waited"]
    handle.complete(3)
    assert handle.wait() == 3
    assert meter.told == ["waits", "has waited"], "nobody waited for what was there"


def test_a_meter_is_told_how_long_a_wait_took_by_the_operations_clock() -> None:
    clock, seconds = ManualClock(), list[float]()

    class Meter(Counted):
        def operated(self, waited: float) -> None:
            seconds.append(waited)

    handle: Work[int] = Work(clock, "send")
    handle.meter = Meter()
    waiting = threading.Thread(target=handle.wait, daemon=True)
    waiting.start()
    clock.wait_for_parked(1)
    clock.advance(7.0)
    handle.complete(3)
    waiting.join(20.0)
    assert seconds == [7.0]


def test_what_ends_in_the_moment_of_a_timeout_has_ended() -> None:
    class Late(SystemClock):
        def parker(self) -> Parker:
            return self

        def park(self, until: float) -> bool:
            handle.complete(7)
            return False

        def unpark(self) -> None: ...

    handle: Work[int] = Work(Late(), "all_reduce #1")
    assert handle.wait(timeout=0.01) == 7


def test_a_result_on_a_device_is_waited_for_on_the_host_only_where_that_is_asked_for() -> None:
    landing = Mock(is_reached=False)
    handle = on_device(work(), lambda left: left, landing)
    handle.complete(7)
    assert handle.wait() == 7
    assert not landing.settle.called
    assert not handle.done(), "the GPU is not there yet"
    assert handle.wait(host=True) == 7
    assert landing.settle.called
    landing.is_reached = True
    assert handle.done()


def test_a_result_is_made_once_however_often_it_is_waited_for() -> None:
    handle: Work[list[int]] = Work(SYSTEM_CLOCK, "all_reduce #1")
    on_device(handle, lambda left: [left]).complete(3)  # type: ignore[arg-type]  what it is made of
    first = handle.wait()
    assert first == [3]
    assert handle.wait() is first


def test_a_wait_that_timed_out_leaves_nothing_behind() -> None:
    handle: Work[int] = Work(SYSTEM_CLOCK, "send")
    told: list[int] = []
    handle.on_done(lambda: told.append(1))
    for _ in range(20):
        with pytest.raises(CollectiveTimeoutError):
            handle.wait(timeout=0)
    assert len(handle._callbacks) == 1
    handle.complete(3)
    assert told == [1]


@pytest.mark.parametrize("clock", [SYSTEM_CLOCK, InTurns()], ids=["real", "in turns"])
def test_who_stopped_awaiting_leaves_nothing_behind(clock: SystemClock) -> None:
    handle: Work[int] = Work(clock, "send")

    async def impatient() -> None:
        for _ in range(5):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(handle, 0.005)

    asyncio.run(impatient())
    assert handle._callbacks == []


@pytest.mark.parametrize("waits_first", [False, True])
def test_arrays_of_the_caller_are_written_once_the_operation_has_ended_unless_who_waits_did(waits_first: bool) -> None:
    made: list[str] = []
    landing = Mock(is_reached=True)
    handle = on_device(
        work(), lambda left: made.append("where nobody waits" if entered else "where it was waited for"), landing
    )
    entered: list[bool] = []

    @contextmanager
    def context() -> Iterator[None]:
        entered.append(True)
        yield

    handle.complete(7)  # the driver may be faster than the one who has submitted it
    if waits_first:
        handle.wait()
    handle.landing_context = context
    assert handle.done()
    assert made == ["where it was waited for" if waits_first else "where nobody waits"]


def test_a_result_that_another_thread_was_making_meanwhile_is_not_made_again() -> None:
    making, goes_on, entered = threading.Event(), threading.Event(), list[bool]()

    def make(left: int) -> int:
        making.set()
        assert goes_on.wait(20)
        return left

    @contextmanager
    def context() -> Iterator[None]:
        entered.append(True)
        raise MemoryError("no stream can be made")
        yield

    class Counted:
        """A lock that tells who waits for it."""

        def __init__(self) -> None:
            self._lock = threading.RLock()
            self.waiters = 0

        def acquire(self, blocking: bool = True) -> bool:
            self.waiters += 1
            return self._lock.acquire(blocking)

        def release(self) -> None:
            self._lock.release()

        def __enter__(self) -> None:
            self.acquire()

        def __exit__(self, *_: object) -> None:
            self.release()

    handle = on_device(work(), make)
    handle.complete(7)  # before it has the context
    handle.landing_context = context
    results: list[int] = []
    first = threading.Thread(target=lambda: results.append(handle.wait()))
    other = threading.Thread(target=lambda: handle.complete_arrays(wait=True))
    counted = Counted()
    handle._result_lock = counted  # type: ignore[assignment]
    first.start()
    assert making.wait(20)
    other.start()
    eventually(lambda: counted.waiters == 2)
    goes_on.set()
    first.join(20)
    other.join(20)
    assert (results, entered, handle.exception()) == ([7], [], None)


def test_an_operation_has_failed_where_arrays_of_the_caller_cannot_be_written() -> None:
    def refused(left: int) -> None:
        raise TensorMismatchError("it gave float32[3], but out is float32[2]")

    handle = on_device(work(), refused)
    handle.landing_context = contextlib.nullcontext
    handle.complete(7)
    assert handle.done()
    assert isinstance(handle.exception(), TensorMismatchError)
    with pytest.raises(TensorMismatchError):
        handle.wait()


def test_who_is_interrupted_while_a_result_is_made_leaves_it_to_others() -> None:
    made: list[int] = []

    def interrupted(left: int) -> None:
        made.append(left)
        if len(made) == 1:
            raise KeyboardInterrupt

    handle = on_device(work(), interrupted)
    told: list[str] = []
    handle.on_done(lambda: told.append("it has ended"))
    handle.landing_context = contextlib.nullcontext
    with pytest.raises(KeyboardInterrupt):
        handle.complete(7)
    assert told == ["it has ended"]
    results: list[object] = []
    other = threading.Thread(target=lambda: results.append(handle.wait()))
    other.start()
    other.join(20)
    assert made == [7, 7]
    assert results


def test_a_result_that_was_made_keeps_nothing_of_the_operation() -> None:
    class Arrays:
        def make(self, left: int) -> int:
            return left

    arrays = Arrays()
    handle = on_device(work(), arrays.make)
    handle.landing_context = contextlib.nullcontext
    handle.complete(7)
    gone = weakref.ref(arrays)
    del arrays
    assert gone() is None
