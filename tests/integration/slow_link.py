"""A slow link over loopback: a proxy for TCP that passes so many bytes a second towards a server, and its answers late."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from ferrorpc.wire.address import join_address, split_address

PIECES_PER_SECOND = 20
PIECE_BYTES_MAX = 1 << 16


class SlowLink:
    """Leads to `target`, a host:port, at its own `address`. Both delays may be changed while something is under way.

    Attributes:
        bytes_per_second: of what goes to the server.

    Args:
        buffer_bytes: what the link takes before it passes anything; 0 for as much as the kernel likes.
    """

    def __init__(self, target: str, bytes_per_second: int, buffer_bytes: int = 0) -> None:
        self.bytes_per_second = bytes_per_second
        self.answer_seconds = 0.0
        """How long each piece that comes back is kept."""
        self._target = split_address(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        if buffer_bytes:  # the sockets that it accepts inherit it
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self.address = join_address("127.0.0.1", self._listener.getsockname()[1])
        self._ends: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Takes the link away."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is taken away
            while True:
                near, far = self._listener.accept()[0], socket.create_connection(self._target)
                self._ends += [near, far]
                threading.Thread(target=self._go, args=(near, far), daemon=True).start()
                threading.Thread(target=self._return, args=(far, near), daemon=True).start()

    def _go(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            speed = self.bytes_per_second  # of one piece: what was read as a large one must not be waited for at a low speed
            while data := near.recv(min(speed // PIECES_PER_SECOND, PIECE_BYTES_MAX)):
                far.sendall(data)
                time.sleep(len(data) / speed)
                speed = self.bytes_per_second
            far.shutdown(socket.SHUT_WR)

    def _return(self, far: socket.socket, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := far.recv(PIECE_BYTES_MAX):
                time.sleep(self.answer_seconds)
                near.sendall(data)
            near.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def slow_link(target: str, *, bytes_per_second: int = 1 << 30, buffer_bytes: int = 0) -> Iterator[SlowLink]:
    """A link to `target`, for as long as it lasts."""
    link = SlowLink(target, bytes_per_second, buffer_bytes)
    try:
        yield link
    finally:
        link.close()
