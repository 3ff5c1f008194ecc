"""Where the system refuses a thread, the call that needs one says so, nothing waits in vain, and the next call may work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from ferrorpc import ProcessGroup, SimulatedBackend
from ferrorpc.collectives.blocking import SenderThreads
from ferrorpc.collectives.progress import Progress
from ferrorpc.errors import LimitExceededError
from ferrorpc.guard import SYSTEM_CLOCK, Guard, Latch, SystemClock
from ferrorpc.transports.grpc.pending_streams import PendingStreams
from ferrorpc.transports.grpc.threads import ThreadPerCall
from tests.unit.collectives.test_progress import Scripted
from tests.unit.transports.shared_memory.host_worlds import HostWorld
from tests.waiting import eventually


class FullClock(SystemClock):
    """The real clock of a process that may start no thread until `refuses` is reset."""

    refuses = True

    def start(self, body: Callable[[], None], name: str) -> None:
        if self.refuses:
            raise LimitExceededError("the system refuses a thread")
        super().start(body, name)


def refused(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_the_error_says_how_many_there_are_and_what_to_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(LimitExceededError, match=r"a thread \(ferrorpc-test\) beside the \d+ of this process") as raised:
        SYSTEM_CLOCK.start(lambda: None, "ferrorpc-test")
    assert "ulimit -u" in raised.value.hint
    assert "ulimit -v" in raised.value.hint, "a stack that cannot be mapped is told in the same words"
    with pytest.raises(LimitExceededError):
        SYSTEM_CLOCK.call_at(SYSTEM_CLOCK.now(), lambda: None)


def test_an_interpreter_that_exits_is_not_taken_for_a_full_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused_at_exit(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refused_at_exit)
    with pytest.raises(LimitExceededError, match=r"this process is ending, .* \(ferrorpc-test\)") as raised:
        SYSTEM_CLOCK.start(lambda: None, "ferrorpc-test")
    assert "before the main script ends" in raised.value.hint


def test_an_asynchronous_operation_is_refused_and_a_later_one_is_done() -> None:
    clock, latch = FullClock(), Latch()
    progress = Progress(clock)
    with pytest.raises(LimitExceededError):
        progress.submit(Scripted(latch), lambda execution: 1)
    clock.refuses = False
    assert progress.submit(Scripted(latch), lambda execution: 2).wait(30.0) == 2


def test_a_refused_collective_ends_the_generation_and_a_refused_recv_leaves_its_message() -> None:
    clock = FullClock()
    groups = [ProcessGroup(backend) for backend in SimulatedBackend.create_group(2, clock=clock)]
    with pytest.raises(LimitExceededError):
        groups[0].recv(1, async_op=True)
    groups[1].send(7, 0)
    assert int(groups[0].recv(1)) == 7
    with pytest.raises(LimitExceededError):
        groups[0].all_reduce(1, async_op=True)
    with pytest.raises(LimitExceededError, match="rank 0 ended the group: "):
        groups[1].all_reduce(1)


def test_host_peers_that_could_not_read_close_all_the_same() -> None:
    with HostWorld(2, listening=False) as ranks:
        for rank in range(2):
            ranks[rank]._clock = FullClock()
            with pytest.raises(LimitExceededError):
                ranks[rank].start(lambda peer, reason: None, lambda peer, message: None)
            ranks[rank].close(0.1)


def test_an_array_without_a_thread_to_send_it_is_not_waited_for() -> None:
    sent: list[Any] = []

    class Sender:
        def send(self, data: Any, peer: int, tag: int) -> None:
            sent.append((peer, tag))

    clock = FullClock()
    senders = SenderThreads(Sender(), Guard(clock, Latch(), 30.0))  # type: ignore[arg-type]
    with pytest.raises(LimitExceededError):
        senders.send(np.zeros(1), 1, 5)
    assert senders.peers() == []
    clock.refuses = False
    senders.send(np.zeros(1), 1, 6)
    eventually(lambda: not senders.peers())
    assert sent == [(1, 6)]


def test_a_call_without_a_thread_leaves_the_servers_other_calls_alone(caplog: pytest.LogCaptureFixture) -> None:
    """What `submit` raises would end the thread that serves them all."""
    clock = FullClock()
    executor = ThreadPerCall(clock, "calls")
    future: Future[int] = executor.submit(lambda: 1)
    assert isinstance(future.exception(5.0), LimitExceededError)
    assert "a peer's stream is not read" in caplog.text
    clock.refuses = False
    assert executor.submit(lambda: 2).result(5.0) == 2


def test_a_server_that_closes_says_nothing_of_streams_that_come_too_late(caplog: pytest.LogCaptureFixture) -> None:
    executor = ThreadPerCall(FullClock(), "calls")
    executor.closing = True
    assert isinstance(executor.submit(lambda: 1).exception(5.0), LimitExceededError)
    assert not caplog.text


def test_a_stream_that_nobody_would_watch_is_refused_and_the_next_is_watched() -> None:
    class Call:
        def __init__(self) -> None:
            self.cancelled = threading.Event()

        def cancel(self) -> None:
            self.cancelled.set()

    clock = FullClock()
    pending, first, second = PendingStreams(clock, 0.01), Call(), Call()
    with pytest.raises(LimitExceededError), pending.wait_for_open(first):
        raise AssertionError("nobody would end it")
    clock.refuses = False
    with pending.wait_for_open(second):
        assert second.cancelled.wait(20.0)
    assert not first.cancelled.is_set()
