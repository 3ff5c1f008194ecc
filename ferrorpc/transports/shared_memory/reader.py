"""Reads the sockets of all neighbours, on one daemon thread; or one of them, for a moment, on the thread that waits for it.

Whoever waits for a neighbour's message would be woken by the reader thread, which the kernel has to wake first: two changes of
threads, several times as long as the message takes. So before it sleeps it looks at that one socket itself, with the reader
thread told to leave it alone. Whoever reads a link holds its `reading`, so what one neighbour says is handed on in order.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Mapping
from socket import socket
from typing import Final

from ferrorpc.guard import Clock
from ferrorpc.transports.shared_memory.link import Link

TURN_MESSAGES: Final = 16
"""How many messages of one neighbour are read before it is another one's turn."""

ATTENTION_SECONDS: Final = 500e-6
"""How long a thread that waits looks, giving way in between: longer than two ranks take to answer each other that both have to
be woken. One that looks for less finds its peer asleep and goes to sleep, as does the peer in its turn, and so on for ever."""

SKIPS_MAX: Final = 63
"""Where that is of no use, or others need the processor, up to so many waits begin with sleep before one looks again."""


class Reader:
    """Has the links to all neighbours. `run` is the body of its thread.

    Args:
        connections: by the neighbour's world rank.
        clock: the time.
        heard: told (peer, message) of every message, in order; must not block.
        ended: told (peer) at the end of its link; must not block.
    """

    def __init__(
        self,
        connections: Mapping[int, socket],
        clock: Clock,
        heard: Callable[[int, bytes], None],
        ended: Callable[[int], None],
    ) -> None:
        self._clock = clock
        self._heard = heard
        self._ended = ended
        self._lock = threading.Lock()
        self._wake_descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) if connections else -1
        self.links = {peer: Link(peer, connection, self._wake) for peer, connection in connections.items()}
        self._epoll: select.epoll
        """The thread's, as long as it runs: where links are armed."""
        self._armed: dict[Link, int] = {}
        """What the kernel is asked to tell of each link that has not ended."""
        self._stopping = False
        self._discard = False
        self._over = threading.Event()

    def run(self) -> None:
        """Until every link has ended, or `stop`."""
        with select.epoll() as epoll:
            try:
                self._read_all(epoll)
            finally:
                with self._lock:
                    self._armed.clear()
                self._over.set()

    def attend(self, peer: int, over: Callable[[], bool]) -> None:
        """Reads what a neighbour sends on this thread, until `over` or for a moment. Not at all where another thread does, and
        seldom where that was of no use lately.
        """
        link = self.links[peer]
        if link.skips:
            link.skips -= 1
            return
        if not link.reading.acquire(blocking=False):
            return
        try:
            link.attended = True
            self._arm(link)
            link.vain = 0 if self._look(link, over) else min(2 * link.vain + 1, SKIPS_MAX)
            link.skips = link.vain
        finally:
            link.attended = False
            try:
                link.reading.release()
            finally:  # an interrupt between the two must not leave the link unread
                self._arm(link)

    def _look(self, link: Link, over: Callable[[], bool]) -> bool:
        """Whether `over` came true in time."""
        until = self._clock.now() + ATTENTION_SECONDS
        while self._clock.now() < until:
            message = link.receive()
            if message is None:
                os.sched_yield()
            elif not message:
                break  # The end of a link is for the reader thread to tell.
            else:
                self._heard(link.peer, message)
                if over():
                    return True
        return False

    def stop(self, timeout: float) -> None:
        """Ends the thread once all that was sent is written, or after `timeout` seconds."""
        self._stopping = True
        self._wake()
        if not self._over.wait(timeout):
            self._discard = True
            self._wake()
            self._over.wait()

    def close(self) -> None:
        """Gives sockets and descriptors back. The thread has ended, or never began."""
        for link in self.links.values():
            link.close()
        with self._lock:
            descriptor, self._wake_descriptor = self._wake_descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _wake(self) -> None:
        with self._lock:
            if self._wake_descriptor >= 0:
                os.eventfd_write(self._wake_descriptor, 1)

    def _arm(self, link: Link) -> None:
        """Tells the kernel what is to be told of a link now. What is there already is told at once."""
        with self._lock:
            armed = self._armed.get(link)
            wanted = (0 if link.attended else select.EPOLLIN) | (select.EPOLLOUT if link.pending else 0)
            if armed is not None and armed != wanted:
                self._epoll.modify(link.connection, wanted)
                self._armed[link] = wanted

    def _read_all(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        epoll.register(self._wake_descriptor, select.EPOLLIN)
        links = {link.connection.fileno(): link for link in self.links.values()}
        for link in links.values():
            epoll.register(link.connection, select.EPOLLIN)
        self._armed = dict.fromkeys(links.values(), select.EPOLLIN)
        while links and not self._finished():
            for descriptor, events in epoll.poll():
                if descriptor == self._wake_descriptor:
                    os.eventfd_read(descriptor)
                elif not self._serve(links[descriptor], events):
                    self._end(links.pop(descriptor))
            for link in links.values():
                self._arm(link)

    def _finished(self) -> bool:
        """Whether this rank closes and has said all that it had to, or gives up saying it."""
        return self._stopping and (self._discard or not any(link.pending for link in self._armed))

    def _end(self, link: Link) -> None:
        with self._lock:
            del self._armed[link]
            self._epoll.unregister(link.connection)
        link.end()
        self._ended(link.peer)

    def _serve(self, link: Link, events: int) -> bool:
        """Something can be done on a link; False at its end."""
        if events & select.EPOLLOUT:
            link.flush()
        if not events & ~select.EPOLLOUT or not link.reading.acquire(blocking=False):
            return True  # Whoever attends to it arms it again.
        try:
            for _ in range(TURN_MESSAGES):
                message = link.receive()
                if message is None:
                    break
                if not message:
                    return False
                self._heard(link.peer, message)
        finally:
            link.reading.release()
        return True

    def abandon_in_child(self) -> None:
        """In a forked child: gives back its copies of the sockets. It takes no lock: a thread of the parent's may hold it."""
        for link in self.links.values():
            link.connection.close()
