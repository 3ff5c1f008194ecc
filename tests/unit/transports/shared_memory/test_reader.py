"""Links are read by one thread, or for a moment by one that waits: in order, nothing lost, nothing told twice."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from ferrorpc.guard import SYSTEM_CLOCK, Clock
from ferrorpc.transports.shared_memory.peer_socket import PeerSocket
from ferrorpc.transports.shared_memory.reader import BUSY_POLL_SECONDS, SKIPPED_POLLS_MAX, Reader
from tests.unit.transports.shared_memory.host_worlds import SECONDS

PEER = 7


class Ends:
    """A reader of one link, the socket at the link's other end, and what the reader told."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        mine, self.other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.setblocking(False)
        self.heard: list[tuple[bytes, int]] = []
        """Each message, and the thread that it was handed on by."""
        self.ends: list[int] = []
        self.failures: list[Exception] = []
        self.on_message: Callable[[bytes], None] = lambda message: None
        self.told = threading.Condition()
        self.peer_socket = PeerSocket(PEER, mine)
        self.reader = Reader([self.peer_socket], clock, self._hear, self._end, self.failures.append)
        self.thread = threading.Thread(target=self.reader.run, daemon=True)

    def _hear(self, peer: int, message: bytes) -> None:
        assert peer == PEER
        with self.told:
            self.heard.append((message, threading.get_ident()))
            self.told.notify_all()
        self.on_message(message)

    def _end(self, peer: int) -> None:
        with self.told:
            self.ends.append(peer)
            self.told.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.told:
            assert self.told.wait_for(condition, SECONDS)

    def busy_poll(self, over: Callable[[], bool]) -> None:
        self.reader.busy_poll(self.peer_socket, over)

    def close(self) -> None:
        if self.thread.ident is not None:
            self.reader.stop(SECONDS)
            self.thread.join(SECONDS)
        self.peer_socket.close()
        self.reader.close()
        self.other.close()


@pytest.fixture
def _many_switches() -> Iterator[None]:
    """Threads interrupt each other often, and none waits long for the interpreter."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


class SteppingClock:
    """A clock on which every look takes a quarter of the time there is for looking."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        self.seconds += BUSY_POLL_SECONDS / 4
        return self.seconds


def stepping() -> Ends:
    return Ends(SteppingClock())  # type: ignore[arg-type]  it needs nothing else of a clock


def test_who_waits_reads_on_its_own_thread_until_it_has_what_it_waits_for() -> None:
    with contextlib.closing(stepping()) as ends:
        for number in range(3):
            ends.other.send(b"%d" % number)
        ends.busy_poll(lambda: len(ends.heard) == 2)
        here = threading.get_ident()
        assert ends.heard == [(b"0", here), (b"1", here)]


def test_a_link_that_is_attended_to_is_left_alone_and_then_read_again(ends: Ends) -> None:
    read_elsewhere: list[bool] = []

    def over() -> bool:
        ends.other.send(b"second")
        ends.thread.start()
        with ends.told:  # It has the time to read that, if it would.
            read_elsewhere.append(ends.told.wait_for(lambda: len(ends.heard) > 1, 0.05))
        return True

    ends.other.send(b"first")
    ends.busy_poll(over)
    assert read_elsewhere == [False]
    ends.wait_for(lambda: len(ends.heard) == 2)
    assert ends.heard == [(b"first", threading.get_ident()), (b"second", ends.thread.ident)]


def test_the_end_of_a_link_is_told_once_by_the_reader_thread(ends: Ends) -> None:
    ends.other.send(b"last")
    ends.other.close()
    ends.busy_poll(lambda: False)
    assert [message for message, _ in ends.heard] == [b"last"]
    assert ends.ends == []
    ends.thread.start()
    ends.wait_for(lambda: ends.ends == [PEER])
    ends.thread.join(SECONDS)
    ends.peer_socket.polls_to_skip = 0
    ends.busy_poll(lambda: False)
    assert ends.ends == [PEER]


def test_who_waits_in_vain_sleeps_at_once_more_and_more_often() -> None:
    with contextlib.closing(stepping()) as ends:
        skips = []
        for _ in range(8):
            ends.busy_poll(lambda: False)
            skips.append(ends.peer_socket.polls_to_skip)
            ends.peer_socket.polls_to_skip = 0
        assert skips == [1, 3, 7, 15, 31, 63, SKIPPED_POLLS_MAX, SKIPPED_POLLS_MAX]
        ends.other.send(b"news")
        ends.busy_poll(lambda: True)
        assert ends.peer_socket.polls_to_skip == 0


def test_who_is_to_sleep_at_once_does_not_look() -> None:
    with contextlib.closing(stepping()) as ends:
        ends.busy_poll(lambda: False)
        ends.other.send(b"news")
        ends.busy_poll(lambda: True)
        assert ends.heard == []
        ends.busy_poll(lambda: True)
        assert [message for message, _ in ends.heard] == [b"news"]


def test_one_who_attends_does_not_do_so_for_ever() -> None:
    with contextlib.closing(stepping()) as ends:
        ends.on_message = lambda message: ends.other.send(message) and None
        ends.other.send(b"again")
        ends.busy_poll(lambda: False)
        assert 1 <= len(ends.heard) <= 4


@pytest.mark.usefixtures("_many_switches")
def test_several_who_wait_and_the_reader_thread_hand_on_everything_in_order(ends: Ends) -> None:
    count = 3000
    ends.thread.start()
    stop = threading.Event()

    def more_than(before: int) -> bool:
        return len(ends.heard) > before

    def wait_for_it() -> None:
        while not stop.is_set():
            ends.busy_poll(partial(more_than, len(ends.heard)))

    waiting = [threading.Thread(target=wait_for_it, daemon=True) for _ in range(2)]
    for thread in waiting:
        thread.start()
    for number in range(count):
        ends.other.send(b"%d" % number)
    ends.wait_for(lambda: len(ends.heard) == count)
    stop.set()
    for thread in waiting:
        thread.join(SECONDS)
    assert [message for message, _ in ends.heard] == [b"%d" % number for number in range(count)]


def test_what_the_kernel_had_no_room_for_is_written_while_somebody_attends(ends: Ends) -> None:
    ends.thread.start()
    message = b"\1" * 4000
    sent = 0
    while ends.peer_socket.try_send(message, lambda: None):
        sent += 1
    assert ends.peer_socket.pending
    ends.other.settimeout(SECONDS)
    for _ in range(sent):
        ends.busy_poll(lambda: False)
        assert ends.other.recv(1 << 16) == message


def test_a_reader_that_finds_no_descriptor_tells_so_and_can_be_stopped(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(select, "epoll", full)
        ends.reader.run()
    assert [type(failure) for failure in ends.failures] == [OSError]
    stopping = threading.Thread(target=ends.reader.stop, args=(0.0,), daemon=True)
    stopping.start()
    stopping.join(SECONDS)
    assert not stopping.is_alive()


def test_a_reader_that_ends_before_its_time_leaves_its_links_to_those_who_wait(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise MemoryError

    ends.other.send(b"first")
    with monkeypatch.context() as patched:
        patched.setattr(ends.peer_socket, "receive", full)
        ends.reader.run()
    assert [type(failure) for failure in ends.failures] == [MemoryError]
    ends.busy_poll(lambda: True)
    assert [message for message, _ in ends.heard] == [b"first"]


def test_who_waits_for_room_on_a_link_is_told_of_its_end(ends: Ends) -> None:
    told = threading.Event()
    while ends.peer_socket.try_send(b"\1" * 4000, told.set):
        pass
    ends.other.close()
    ends.thread.start()
    assert told.wait(SECONDS)
    ends.wait_for(lambda: ends.ends == [PEER])


def test_closing_waits_for_who_reads_and_leaves_nothing_to_read() -> None:
    ends = Ends()
    ends.thread.start()
    started = threading.Event()
    closed = threading.Thread(target=ends.close)
    seen: list[bool] = []

    def over() -> bool:
        started.set()
        closed.start()
        closed.join(0.05)
        seen.append(closed.is_alive())
        return True

    while not started.is_set():
        ends.other.send(b"news")
        ends.peer_socket.polls_to_skip = 0
        ends.busy_poll(over)
    closed.join(SECONDS)
    assert seen == [True]
    ends.busy_poll(lambda: False)


@pytest.mark.parametrize("call", ["acquire", "release"])
def test_a_thread_that_is_interrupted_as_it_gets_or_leaves_a_socket_does_not_keep_it(ends: Ends, call: str) -> None:
    """The reader thread would never read that socket again."""

    class Struck:
        def __init__(self, lock: Any) -> None:
            self.acquire, self.release = lock.acquire, lock.release
            self._plain = getattr(lock, call)
            setattr(self, call, self._interrupted)

        def _interrupted(self, **arguments: bool) -> None:
            setattr(self, call, self._plain)
            self._plain(**arguments)
            raise KeyboardInterrupt

    ends.peer_socket.reading = Struck(ends.peer_socket.reading)  # type: ignore[assignment]
    ends.other.send(b"first")
    with pytest.raises(KeyboardInterrupt):
        ends.busy_poll(lambda: True)
    ends.thread.start()
    ends.other.send(b"second")
    ends.wait_for(lambda: len(ends.heard) == 2)
