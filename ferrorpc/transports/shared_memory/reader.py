"""Reads the sockets of all host peers on one daemon thread, or one socket for a moment on a thread that waits for that peer.

A thread that waits for a peer's message would be woken by the reader thread, which the kernel has to wake first: two thread
switches, which take several times as long as the message. So before it sleeps, the thread polls that one socket itself, and the
reader thread leaves it alone meanwhile. The thread that reads a socket holds its `reading` lock, so the messages of each peer
are handed on in order.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Sequence
from typing import Final

from ferrorpc.guard import Clock
from ferrorpc.transports.shared_memory.peer_socket import PeerSocket

BATCH_MESSAGES: Final = 16
"""How many messages of one socket are read before the next socket gets its turn."""

BUSY_POLL_SECONDS: Final = 500e-6
"""How long a thread polls before it sleeps, yielding the processor in between. It is longer than a message and its answer take
between two ranks that both have to be woken. With less, a rank would go to sleep while its peer wakes up, then the peer
likewise, and so on for ever."""

SKIPPED_POLLS_MAX: Final = 63
"""Where polling keeps failing, or other threads need the processor, up to so many waits do not poll before one tries again."""


class Reader:
    """Reads the sockets to all host peers. `run` is the body of its thread.

    Args:
        on_message: called with (peer, message) for every message, in order; must not block.
        on_end: called with (peer) at the end of its socket; must not block.
        on_failure: called on the reader thread with what has ended it before its time; must not block.
    """

    def __init__(
        self,
        sockets: Sequence[PeerSocket],
        clock: Clock,
        on_message: Callable[[int, bytes], None],
        on_end: Callable[[int], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._clock = clock
        self._on_message = on_message
        self._on_end = on_end
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._wake_descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) if sockets else -1
        self._sockets = sockets
        for peer_socket in sockets:
            peer_socket.wake = self._wake
        self._epoll: select.epoll
        """The reader thread's, while it runs."""
        self._has_begun = False
        self._stopping = False
        self._discard = False
        self._over = threading.Event()

    def run(self) -> None:
        """Reads until every socket has ended, or `stop`."""
        with self._lock:
            if self._stopping and self._discard:  # `stop` may have returned, and the sockets may be closed
                self._over.set()
                return
            self._has_begun = True
        try:
            with select.epoll() as epoll:
                try:
                    self._read_all(epoll)
                finally:
                    with self._lock:
                        for peer_socket in self._sockets:
                            peer_socket.armed = None
        except Exception as error:  # noqa: BLE001  of no memory or no descriptor: all peers would seem to be silent
            self._on_failure(error)
        finally:
            self._over.set()

    def busy_poll(self, peer_socket: PeerSocket, over: Callable[[], bool]) -> None:
        """Reads what comes on one socket on the calling thread, until `over` or for BUSY_POLL_SECONDS.

        Returns at once where another thread reads that socket, and mostly where polling has failed lately.
        """
        if peer_socket.polls_to_skip:
            peer_socket.polls_to_skip -= 1
            return
        try:
            if peer_socket.busy_poller or not peer_socket.reading.acquire(blocking=False):
                return
            peer_socket.busy_poller = threading.get_ident()
            self._arm(peer_socket)
            peer_socket.failed_polls = (
                0 if self._poll(peer_socket, over) else min(2 * peer_socket.failed_polls + 1, SKIPPED_POLLS_MAX)
            )
            peer_socket.polls_to_skip = peer_socket.failed_polls
            self._let_go(peer_socket)
        except BaseException:  # wherever an interrupt strikes, it must not leave the socket unread
            self._let_go(peer_socket)
            raise

    def _let_go(self, peer_socket: PeerSocket) -> None:
        """Leaves a socket to the reader thread, if this thread reads it."""
        if peer_socket.busy_poller == threading.get_ident():
            peer_socket.busy_poller = 0
        with contextlib.suppress(RuntimeError):  # another thread reads it, or none
            peer_socket.reading.release()
        self._arm(peer_socket)

    def _poll(self, peer_socket: PeerSocket, over: Callable[[], bool]) -> bool:
        """Whether `over` became true in time."""
        until = self._clock.now() + BUSY_POLL_SECONDS
        while self._clock.now() < until:
            message = peer_socket.receive()
            if message is None:
                os.sched_yield()
            elif not message:
                break  # The reader thread reports the end of a socket.
            else:
                self._on_message(peer_socket.peer, message)
                if over():
                    return True
        return False

    def finish(self) -> None:
        """Lets the thread end once all waiting messages are written."""
        self._stopping = True
        self._wake()

    def stop(self, timeout: float) -> None:
        """Ends the thread once all waiting messages are written, or after `timeout` seconds. One that begins only later ends at
        once."""
        self.finish()
        if not self._over.wait(timeout):
            self.discard()
            with self._lock:
                has_begun = self._has_begun
            if has_begun:
                self._over.wait()

    def unread(self) -> dict[int, Callable[[float], object]]:
        """By each peer to which messages wait to be written, what waits for that; empty once the thread has ended."""
        if self._over.is_set():
            return {}
        return {peer_socket.peer: self._over.wait for peer_socket in self._sockets if not peer_socket.all_written()}

    def discard(self) -> None:
        """Gives up the messages that are not written yet."""
        self._discard = True
        self._wake()

    def close(self) -> None:
        """Closes its descriptor, after the sockets were closed. The thread has ended or never began."""
        with self._lock:
            descriptor, self._wake_descriptor = self._wake_descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _wake(self) -> None:
        with self._lock:
            if self._wake_descriptor >= 0:
                os.eventfd_write(self._wake_descriptor, 1)

    def _arm(self, peer_socket: PeerSocket) -> None:
        """Updates the epoll events that are requested for a socket. Events that are pending already are reported at once."""
        with self._lock:
            armed = peer_socket.armed
            wanted = (0 if peer_socket.busy_poller else select.EPOLLIN) | (select.EPOLLOUT if peer_socket.pending else 0)
            if armed is not None and armed != wanted:
                self._epoll.modify(peer_socket.connection, wanted)
                peer_socket.armed = wanted

    def _read_all(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        epoll.register(self._wake_descriptor, select.EPOLLIN)
        sockets = {peer_socket.connection.fileno(): peer_socket for peer_socket in self._sockets}
        for peer_socket in sockets.values():
            epoll.register(peer_socket.connection, select.EPOLLIN)
            peer_socket.armed = select.EPOLLIN
        while sockets and not self._finished():
            for descriptor, events in epoll.poll():
                if descriptor == self._wake_descriptor:
                    os.eventfd_read(descriptor)
                elif not self._serve(sockets[descriptor], events):
                    self._end(sockets.pop(descriptor))
            for peer_socket in sockets.values():
                self._arm(peer_socket)

    def _finished(self) -> bool:
        """Whether the thread should end: `stop` was called, and all messages are written or given up."""
        return self._stopping and (self._discard or not any(peer_socket.pending for peer_socket in self._sockets))

    def _end(self, peer_socket: PeerSocket) -> None:
        with self._lock:
            peer_socket.armed = None
            self._epoll.unregister(peer_socket.connection)
        peer_socket.end()
        self._on_end(peer_socket.peer)

    def _serve(self, peer_socket: PeerSocket, events: int) -> bool:
        """Handles the epoll events of a socket. False at its end."""
        if events & select.EPOLLOUT:
            peer_socket.flush()
        if not events & ~select.EPOLLOUT or not peer_socket.reading.acquire(blocking=False):
            return True  # The thread that polls it arms it again.
        try:
            for _ in range(BATCH_MESSAGES):
                message = peer_socket.receive()
                if message is None:
                    break
                if not message:
                    return False
                self._on_message(peer_socket.peer, message)
        finally:
            peer_socket.reading.release()
        return True
