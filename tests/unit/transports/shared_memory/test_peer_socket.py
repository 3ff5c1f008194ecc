"""One end of a socket: nothing is lost, nobody blocks, and who waits for room is always told."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from ferrorpc.errors import LimitExceededError
from ferrorpc.transports.shared_memory.peer_socket import PeerSocket

MESSAGE = b"\1" * 4000


class Ends:
    """A link and the socket at its other end."""

    def __init__(self) -> None:
        mine, self.other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (mine, self.other):
            end.setblocking(False)
        self.wakes = 0
        self.told = 0
        self.peer_socket = PeerSocket(1, mine)
        self.peer_socket.wake = self._wake

    def _wake(self) -> None:
        self.wakes += 1

    def room(self) -> None:
        self.told += 1

    def fill(self) -> int:
        """Sends until a message waits; how many were sent."""
        count = 0
        while self.peer_socket.try_send(MESSAGE, self.room):
            count += 1
        assert self.peer_socket.pending
        assert self.wakes
        return count

    def read_all(self) -> int:
        count = 0
        while True:
            try:
                if not self.other.recv(1 << 16):
                    return count
            except BlockingIOError:
                return count
            count += 1


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.peer_socket.close()
    made.other.close()


def test_a_message_whose_sender_is_interrupted_is_not_sent_twice(ends: Ends) -> None:
    """The peer would count a chunk, or a receipt for it, twice."""
    whole = ends.peer_socket.connection

    class Struck:
        def send(self, message: bytes) -> None:
            whole.send(message)
            raise KeyboardInterrupt

    ends.peer_socket.connection = Struck()  # type: ignore[assignment]  it needs nothing else
    with pytest.raises(KeyboardInterrupt):
        ends.peer_socket.send(MESSAGE)
    ends.peer_socket.connection = whole
    ends.peer_socket.send(MESSAGE)
    assert ends.read_all() == 2


def test_a_refused_message_is_not_sent_and_all_others_arrive(ends: Ends) -> None:
    count = ends.fill()
    assert not ends.peer_socket.try_send(MESSAGE, ends.room)
    arrived = ends.read_all()
    ends.peer_socket.flush()
    assert arrived + ends.read_all() == count
    assert ends.told == 1


def test_nothing_is_told_while_messages_wait(ends: Ends) -> None:
    ends.fill()
    ends.peer_socket.send(MESSAGE)
    ends.peer_socket.flush()
    assert ends.told == 0


def test_who_waits_for_room_is_told_by_a_message_that_finds_it(ends: Ends) -> None:
    """Not only by the reader thread, which no longer looks once nothing is pending."""
    ends.fill()
    ends.read_all()
    ends.peer_socket.send(MESSAGE)
    assert not ends.peer_socket.pending
    assert ends.told == 1


def test_what_a_peer_said_before_it_ended_is_read_although_it_had_not_read_everything(ends: Ends) -> None:
    ends.peer_socket.send(MESSAGE)
    ends.other.send(b"goodbye")
    ends.other.close()
    assert [ends.peer_socket.receive(), ends.peer_socket.receive()] == [b"goodbye", b""]


@pytest.mark.parametrize("end", ["the peer's", "this one"])
def test_who_waits_for_room_is_told_of_the_end(ends: Ends, end: str) -> None:
    ends.fill()
    if end == "this one":
        ends.peer_socket.end()
    else:
        ends.other.close()
        ends.peer_socket.flush()
    assert ends.told == 1
    assert not ends.peer_socket.pending
    assert ends.peer_socket.try_send(MESSAGE, ends.room), "what nobody receives is dropped"


TOO_LARGE = bytes(64 << 10)
"""More than the smallest buffer of a socket takes, ever."""


@pytest.mark.parametrize("send", [PeerSocket.send, lambda peer_socket, message: peer_socket.try_send(message, lambda: None)])
def test_what_the_system_refuses_is_raised_and_does_not_end_the_sending(ends: Ends, send: Callable[..., bool]) -> None:
    """As the end of the socket, which nobody would report, it would have this and all later messages dropped."""
    ends.peer_socket.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    with pytest.raises(LimitExceededError, match=r"refuses what is sent to rank 1: .*Message too long"):
        send(ends.peer_socket, TOO_LARGE)
    assert send(ends.peer_socket, b"next")
    assert ends.other.recv(1 << 16) == b"next"


def in_another_thread(body: Callable[[], object]) -> None:
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()


def test_closing_does_not_wait_for_ever_for_one_who_was_interrupted_while_reading(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ferrorpc.transports.shared_memory.peer_socket.READER_SECONDS", 0.01)
    in_another_thread(ends.peer_socket.reading.acquire)
    ends.peer_socket.close()
    assert ends.peer_socket.connection.fileno() == -1


class Alarmed:
    """A connection during whose calls a signal strikes, once. Python calls its handler when the call is over."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._has_struck = False

    def _strike(self) -> None:
        if not self._has_struck:
            self._has_struck = True
            raise TimeoutError("of an alarm's handler")

    def send(self, message: bytes) -> int:
        sent = self._connection.send(message)
        self._strike()
        return sent

    def recv(self, size_bytes: int) -> bytes:
        message = self._connection.recv(size_bytes)
        self._strike()
        return message


@pytest.mark.parametrize("send", [PeerSocket.send, lambda peer_socket, message: peer_socket.try_send(message, lambda: None)])
def test_a_timeout_of_an_alarm_is_raised_and_does_not_end_the_sending(ends: Ends, send: Callable[..., bool]) -> None:
    """It is an OSError, as those of the socket. All later messages would be dropped, and nobody told."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ends.peer_socket, "connection", Alarmed(ends.peer_socket.connection))
        with pytest.raises(TimeoutError, match="of an alarm"):
            send(ends.peer_socket, MESSAGE)
        assert send(ends.peer_socket, MESSAGE)
    assert ends.read_all() == 2


def test_a_timeout_of_an_alarm_is_raised_where_a_message_was_read(ends: Ends) -> None:
    """As the end of the socket it would be passed over, and the message be lost."""
    ends.other.send(MESSAGE)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ends.peer_socket, "connection", Alarmed(ends.peer_socket.connection))
        with pytest.raises(TimeoutError, match="of an alarm"):
            ends.peer_socket.receive()
