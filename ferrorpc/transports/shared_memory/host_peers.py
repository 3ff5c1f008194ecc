"""The ranks of a generation that share the memory of this host, from `discover_host_peers` (discovery.py) until `close`.

There is a socket to each of them, which ends with its process; reader.py reads all of them. A socket that ends without a
goodbye is reported at once as a lost link, and the coordinator decides what that means. A socket that ends with a goodbye
belongs to a peer that has left; its link counts as lost only for operations that still need it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Container, Mapping
from typing import Any, Final

import numpy as np

from ferrorpc.errors import FerroError, LimitExceededError, UsageError
from ferrorpc.generation_errors import links_closed, reason_of
from ferrorpc.guard import Clock, Guard, Latch
from ferrorpc.transports.base import BROKEN_CLOSE_SECONDS
from ferrorpc.transports.closing import wait_for_readers
from ferrorpc.transports.shared_memory.hosts import Hosts
from ferrorpc.transports.shared_memory.link import Link
from ferrorpc.transports.shared_memory.peer_socket import RESOURCES_HINT
from ferrorpc.transports.shared_memory.reader import Reader
from ferrorpc.transports.shared_memory.segment import Segment
from ferrorpc.transports.shared_memory.slots import Slots

STOP_SECONDS: Final = 0.5
"""How long the goodbyes of an exiting process may take: it has about two seconds for everything."""

GOODBYE: Final = b"\0"
"""A message of one zero byte. All other messages are protobuf, which never begins with a zero byte."""


class HostPeers:
    """The host peers of one rank in one generation. Made by `discover_host_peers`.

    Attributes:
        ranks: world ranks on this host in ascending order, including this one; only this one where nothing is shared.
        hosts: the ranks of every host of the world; equal on all ranks.
        links: the link to each host peer, by its world rank.
        separation_reason: why the world is not one host; empty when it is.
        latch: of the generation.
        reader: reads the sockets to the host peers.
        is_closing: whether `close` was called, so that nothing can be sent any more.
    """

    def __init__(
        self,
        rank: int,
        hosts: Hosts,
        segment: Segment | None,
        links: Mapping[int, Link],
        separation_reason: str,
        latch: Latch,
        clock: Clock,
    ) -> None:
        self.rank = rank
        self.hosts = hosts
        self.ranks = next(host for host in hosts if rank in host)
        self.links = links
        self.separation_reason = separation_reason
        self._segment = segment
        if segment is not None:
            for link in links.values():
                link.slots = Slots(segment, len(links))
        self.latch = latch
        self._clock = clock
        self._lock = threading.Lock()
        self._started = False
        self.is_closing = False
        sockets = [link.socket for link in links.values()]
        self.reader = Reader(sockets, clock, self._message_received, self._socket_ended, self._reading_failed)
        _all.add(self)

    @property
    def own(self) -> Segment:
        """This rank's segment.

        Raises:
            UsageError: this rank has no host peers.
        """
        if self._segment is None:
            raise UsageError(
                f"rank {self.rank} shares no memory: {self.separation_reason}", hint="use it where links is not empty"
            )
        return self._segment

    def memory(self, rank: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The segment of one of `ranks`: uint8, shape (its bytes,); read-only unless it is this rank's own.

        Raises:
            GroupClosedError: after `close`.
        """
        memory = self.own.memory if rank == self.rank else self.links[rank].memory
        if not memory.size:
            raise links_closed(self.rank)
        return memory

    def start(self, on_link_lost: Callable[[int, str], None], on_message: Callable[[int, bytes], None]) -> None:
        """Starts the thread that reads the sockets. To be called once. The callbacks must not block.

        Args:
            on_link_lost: called with (peer, reason) at most once per peer; never once `is_over`.
            on_message: called with (peer, message) for every message but goodbyes.
        """
        self._on_link_lost = on_link_lost
        self._on_message = on_message
        if self.links:
            self._clock.start(self.reader.run, f"ferrorpc-host-peers-of-{self.rank}")
            self._started = True

    @property
    def is_over(self) -> bool:
        """Whether this rank has closed its links, or the generation has ended, so that no failure is to be reported."""
        return self.is_closing or self.latch.cause is not None

    def report_lost(self, peer: int, reason: str) -> None:
        """Reports the loss of a host peer, unless one was reported before or it `is_over`."""
        link = self.links[peer]
        with self._lock:
            if self.is_over or link.loss is not None:
                return
            link.loss = reason
        self._on_link_lost(peer, reason)

    def lost(self) -> dict[int, str]:
        """As `Transport.lost`."""
        return {peer: link.loss for peer, link in self.links.items() if link.loss is not None}

    def close(self, timeout: float, unawaited: Container[int] = ()) -> None:
        """As `Transport.close`; also releases the memory.

        Arrays in this rank's segment stay valid, and so do views of other segments, although nobody writes them any more.
        """
        with self._lock:
            if self.is_closing:
                return
            self.is_closing = True
        try:
            for link in self.links.values():
                link.end()
                with contextlib.suppress(LimitExceededError):  # the others are still told
                    link.socket.send(GOODBYE)
            self._stop_reading(timeout, unawaited)
        except BaseException:  # an interrupt: no later call goes on with this
            self.reader.stop(0.0)
            raise
        finally:
            for link in self.links.values():
                link.close()
            self.reader.close()
            if self._segment is not None:
                self._segment.close()

    def _stop_reading(self, timeout: float, unawaited: Container[int]) -> None:
        """Waits until all that was sent is written. The end of the generation ends that."""
        if not self._started:
            timeout = 0.0  # an interrupt within `start` hides whether there is a thread
        if self.latch.cause is not None:
            self.reader.stop(min(timeout, BROKEN_CLOSE_SECONDS))
            return
        ticket = self.latch.watch(self.reader.discard)
        try:
            self.reader.finish()
            wait_for_readers(self.rank, self.reader.unread, unawaited, Guard(self._clock, self.latch, timeout))
            self.reader.stop(0.0)
        finally:
            self.latch.forget(ticket)

    # -- events of the reader ------------------------------------------------------------------------------------------

    def _message_received(self, peer: int, message: bytes) -> None:
        if message == GOODBYE:
            self.links[peer].has_left = True
        else:
            self._on_message(peer, message)

    def _socket_ended(self, peer: int) -> None:
        link = self.links[peer]
        if not link.has_left:
            self.report_lost(peer, "its process ended without a goodbye")
        link.end()

    def _reading_failed(self, error: Exception) -> None:
        """Ends the generation, because this rank hears nothing more of its host peers."""
        what = f"rank {self.rank} can read no more of what its host peers send: {reason_of(error)}"
        if isinstance(error, FerroError):
            cause = error
        elif isinstance(error, OSError | MemoryError):
            cause = LimitExceededError(what, hint=RESOURCES_HINT)
        else:
            cause = FerroError(what)
        if not self.is_over:
            self.latch.end(cause)
        if type(cause) is FerroError:
            raise error  # a bug is best seen where it is

    def abandon_in_child(self) -> None:
        """In a forked child: closes its copies of the sockets, so that peers see the parent's end while the child lives."""
        self._lock = threading.Lock()
        self.is_closing = True
        for link in self.links.values():
            link.socket.connection.close()  # takes no lock: a thread of the parent may have held it


_all: Final[weakref.WeakSet[HostPeers]] = weakref.WeakSet()


def _abandon_all() -> None:
    for host_peers in list(_all):
        host_peers.abandon_in_child()


def _say_goodbye() -> None:
    """At exit: says goodbye to peers although nobody called `close`."""
    for host_peers in list(_all):
        host_peers.close(STOP_SECONDS)


atexit.register(_say_goodbye)
os.register_at_fork(after_in_child=_abandon_all)
