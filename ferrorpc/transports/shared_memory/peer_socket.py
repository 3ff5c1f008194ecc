"""The Unix socket to one peer on this host. It carries all small messages, and the announcements of frames in shared memory.

A sequenced-packet socket (SOCK_SEQPACKET) keeps message boundaries, and its end is seen at once when the peer's process dies.
Sending never blocks: what the kernel does not accept at once waits in a queue, which the reader thread writes later.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from ferrorpc.errors import LimitExceededError
from ferrorpc.guard import wake_nobody
from ferrorpc.transports.control import CONTROL_MAX

MESSAGE_BYTES_MAX: Final = 32 << 10
"""Fits a message with the longest signature."""
RESOURCES_HINT: Final = "give the host more memory, the process more open files (`ulimit -n`), or the host fewer ranks"
READER_SECONDS: Final = 0.2
"""How long `close` waits for a thread that reads; far longer than a thread reads at a time."""


class PeerSocket:
    """The socket to a proven peer, non-blocking.

    Args:
        peer: the peer's world rank.
    """

    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.peer = peer
        self.connection = connection
        self.wake: Callable[[], None] = wake_nobody
        """Asks the thread that reads the socket, once there is one, to check `pending`."""
        self.reading = threading.RLock()
        """Held by the thread that reads the socket. It knows its owner, which an interrupted thread does not."""
        self.armed: int | None = None
        """The epoll events that the reader thread has requested; None where it does not read the socket."""
        self.busy_poller = 0
        """The thread in `Reader.busy_poll`, where one reads; else 0."""
        self.polls_to_skip = 0
        """How many of the next calls of `busy_poll` return at once."""
        self.failed_polls = 0
        """Grows with each call of `busy_poll` in a row that failed; reset by one that succeeds."""
        self._lock = threading.Lock()
        self._queue: deque[bytes] = deque()
        self._waiting: list[Callable[[], None]] = []
        self._over = False

    @property
    def pending(self) -> bool:
        """Whether messages wait until the kernel accepts them."""
        return bool(self._queue)

    def all_written(self) -> bool:
        """Whether no message is `pending`, also none that a thread just tries to write."""
        with self._lock:
            return not self._queue

    def send(self, message: bytes) -> bool:
        """Sends a message, in order. Returns False, and drops it, where CONTROL_MAX messages wait already.

        Drops it as well when the socket has ended, which the reader reports.

        Raises:
            LimitExceededError: the system refuses it, for lack of memory say. It is lost.
        """
        with self._lock:
            if not self._queue and self._sent(message):
                return True
            if len(self._queue) >= CONTROL_MAX:
                return False
            self._queue.append(message)
        self.flush()
        if self._queue:
            self.wake()
        return True

    def try_send(self, message: bytes, room: Callable[[], None]) -> bool:
        """Sends a message as `send` does, if none waits. Else returns False, and calls `room` once when none waits any more.

        Args:
            room: called on any thread; must not block.

        Raises:
            LimitExceededError: as `send`.
        """
        with self._lock:
            if self._queue:
                if room not in self._waiting:
                    self._waiting.append(room)
                return False
            if self._sent(message):
                return True
            self._queue.append(message)
        self.wake()
        return True

    def flush(self) -> None:
        """Writes as many waiting messages as the kernel accepts. Raises LimitExceededError as `send`."""
        woken: list[Callable[[], None]] = []
        with self._lock:
            self._write()
            if not self._queue:
                woken, self._waiting = self._waiting, []
        for room in woken:
            room()

    def end(self) -> None:
        """Drops the waiting messages and all later ones."""
        with self._lock:
            self._over = True
        self.flush()

    def _write(self) -> None:
        while self._queue:
            message = self._queue.popleft()  # before it is sent: an interrupt between the two must not send it twice
            if not self._sent(message):
                self._queue.appendleft(message)
                return

    def _sent(self, message: bytes) -> bool:
        """Whether the kernel accepts a message now. It is dropped when the socket has ended, which counts as sent."""
        if not self._over:
            try:
                self.connection.send(message)
            except BlockingIOError:
                return False
            except OSError as error:
                if _is_of_a_handler(error):
                    raise
                if not isinstance(error, ConnectionError) and error.errno not in (errno.ENOTCONN, errno.EBADF):
                    refused = f"the system refuses what is sent to rank {self.peer}: {error}"
                    raise LimitExceededError(refused, hint=RESOURCES_HINT) from None
                self._over = True
        return True

    def receive(self) -> bytes | None:
        """The next message; empty at the end of the socket, None where there is none yet.

        Raises:
            MessageTooLong: never sent by ferrorpc.
        """
        while True:
            try:
                return self.connection.recv(MESSAGE_BYTES_MAX)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                continue  # The peer ended before it had read everything; what it wrote can still be read.
            except OSError as error:
                if _is_of_a_handler(error):
                    raise
                return b""

    def close(self) -> None:
        """Closes the socket. The peer reads what was sent, and then the end.

        Waits for a thread that reads, because the descriptor's number could be reused under it. The wait is limited, because a
        reader that an interrupt has ended may never release the lock.
        """
        self.end()
        is_mine = self.reading.acquire(timeout=READER_SECONDS)
        self.connection.close()
        if is_mine:
            self.reading.release()


def _is_of_a_handler(error: OSError) -> bool:
    """Whether a signal handler raised it, as a TimeoutError of an alarm, and not the socket's method, which has no frame."""
    trace = error.__traceback__
    return trace is not None and trace.tb_next is not None
