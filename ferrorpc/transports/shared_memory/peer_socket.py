"""The Unix socket to one peer on this host: the doorbell, and the way of all small messages.

A sequenced-packet socket keeps the borders between messages, and its end is seen the moment a process dies, however it does.
Sending never blocks: what the kernel does not take at once waits in a queue that the reader thread writes on.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from ferrorpc.transports.control import CONTROL_MAX

MESSAGE_BYTES_MAX: Final = 32 << 10
"""A message with the longest signature fits."""
READER_SECONDS: Final = 0.2
"""Far longer than anybody reads a link at a time."""


class PeerSocket:
    """One end, non-blocking, from a proven peer.

    Args:
        peer: its world rank.
        wake: asks the reader thread to look at `pending`; must not block.
    """

    def __init__(self, peer: int, connection: socket.socket, wake: Callable[[], None]) -> None:
        self.peer = peer
        self.connection = connection
        self.reading = threading.Lock()
        """Held by whoever reads it."""
        self.busy_polled = False
        """Whether that is somebody who waits for the peer."""
        self.polls_to_skip = 0
        """How many who wait for the peer are to sleep at once."""
        self.failed_polls = 0
        """Grows with each who attended to it in vain, one after the other."""
        self._wake = wake
        self._lock = threading.Lock()
        self._queue: deque[bytes] = deque()
        self._waiting: list[Callable[[], None]] = []
        self._over = False

    @property
    def pending(self) -> bool:
        """Whether messages wait for the kernel to have room."""
        return bool(self._queue)

    def send(self, message: bytes) -> bool:
        """Sends a message, in order; one that nobody can receive any more is dropped, for the reader sees the end. False, and
        dropped, where CONTROL_MAX wait already."""
        with self._lock:
            if len(self._queue) >= CONTROL_MAX:
                return False
            self._queue.append(message)
        self.flush()
        if self._queue:
            self._wake()
        return True

    def try_send(self, message: bytes, room: Callable[[], None]) -> bool:
        """Sends a message as `send` does, if none waits. Else False, and `room` is called once when none does any more.

        Args:
            room: called on any thread; must not block.
        """
        with self._lock:
            if self._queue:
                if room not in self._waiting:
                    self._waiting.append(room)
                return False
        return self.send(message)

    def flush(self) -> None:
        """Writes what the kernel has room for."""
        woken: list[Callable[[], None]] = []
        with self._lock:
            self._write()
            if not self._queue:
                woken, self._waiting = self._waiting, []
        for room in woken:
            room()

    def end(self) -> None:
        """Nothing that is sent arrives any more."""
        with self._lock:
            self._over = True
        self.flush()

    def _write(self) -> None:
        while self._queue and not self._over:
            try:
                self.connection.send(self._queue[0])
            except BlockingIOError:
                return
            except OSError:
                self._over = True
                break
            self._queue.popleft()
        if self._over:
            self._queue.clear()

    def receive(self) -> bytes | None:
        """The next message; empty at the end of the link, None where there is none yet.

        Raises:
            MessageTooLong: never sent by ferrorpc.
        """
        while True:
            try:
                return self.connection.recv(MESSAGE_BYTES_MAX)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                continue  # The peer ended before it had read all: what it wrote is still there to be read.
            except OSError:
                return b""

    def close(self) -> None:
        """Gives the socket back; the peer reads what was sent, and then the end.

        Not while somebody reads it, who might then read another file of that number; but an interrupt may have ended a reader
        before it could say so.
        """
        self.end()
        is_mine = self.reading.acquire(timeout=READER_SECONDS)
        self.connection.close()
        if is_mine:
            self.reading.release()
