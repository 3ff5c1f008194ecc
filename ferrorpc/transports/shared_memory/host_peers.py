"""The ranks of a generation that share the memory of this host, from `discover_host_peers` (discovery.py) until `close`.

There is a socket to each of them, which ends with its process; reader.py reads all of them. A socket that ends without a
goodbye is reported at once as a lost link, and the coordinator decides what that means. A socket that ends with a goodbye
belongs to a peer that has left; its link counts as lost only for operations that still need it.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from ferrorpc.errors import GroupClosedError, UsageError
from ferrorpc.guard import Clock, Latch
from ferrorpc.transports.shared_memory.handshake import HostPeer
from ferrorpc.transports.shared_memory.hosts import Hosts
from ferrorpc.transports.shared_memory.reader import Reader
from ferrorpc.transports.shared_memory.segment import Segment

STOP_SECONDS: Final = 0.5
"""How long the goodbyes of an exiting process may take: it has about two seconds for everything."""

GOODBYE: Final = b"\0"
"""A message of one zero byte. All other messages are protobuf, which never begins with a zero byte."""


class HostPeers:
    """The host peers of one rank in one generation. Made by `discover_host_peers`.

    Attributes:
        ranks: world ranks on this host in ascending order, including this one; only this one where nothing is shared.
        hosts: the ranks of every host of the world; equal on all ranks.
        separation_reason: why the world is not one host; empty when it is.
        reader: reads the sockets to the host peers, which it has by rank.
    """

    def __init__(
        self,
        rank: int,
        hosts: Hosts,
        segment: Segment | None,
        proven: Sequence[HostPeer],
        separation_reason: str,
        latch: Latch,
        clock: Clock,
    ) -> None:
        self.rank = rank
        self.hosts = hosts
        self.ranks = next(host for host in hosts if rank in host)
        self.separation_reason = separation_reason
        self._segment = segment
        self._host_peers = {host_peer.rank: host_peer for host_peer in proven}
        self._latch = latch
        self._clock = clock
        self._lock = threading.Lock()
        self._lost: dict[int, str] = {}
        self._left: set[int] = set()
        self._started = False
        self._closing = False
        connections = {host_peer.rank: host_peer.connection for host_peer in proven}
        self.reader = Reader(connections, clock, self._message_received, self._socket_ended)
        _all.add(self)

    @property
    def own(self) -> Segment:
        """This rank's segment.

        Raises:
            UsageError: this rank has no host peers.
        """
        if self._segment is None:
            raise UsageError(f"rank {self.rank} shares no memory: {self.separation_reason}")
        return self._segment

    def memory(self, rank: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The segment of one of `ranks`: uint8, shape (its bytes,); read-only unless it is this rank's own.

        Raises:
            GroupClosedError: after `close`.
        """
        memory = self.own.memory if rank == self.rank else self._host_peers[rank].memory
        if not memory.size:
            raise GroupClosedError(f"rank {self.rank} has closed its shared memory")
        return memory

    def start(
        self,
        on_link_lost: Callable[[int, str], None],
        on_message: Callable[[int, bytes], None],
        on_end: Callable[[int], None],
    ) -> None:
        """Starts the thread that reads the sockets. To be called once. The callbacks must not block.

        Args:
            on_link_lost: called with (peer, reason) at most once per peer; never after `close` or after the latch has tripped.
            on_message: called with (peer, message) for every message but goodbyes.
            on_end: called with (peer) when its socket has ended, for whatever reason.
        """
        self._on_link_lost = on_link_lost
        self._on_message = on_message
        self._on_end = on_end
        if self.reader.sockets:
            self._clock.start(self.reader.run, f"ferrorpc-host-peers-of-{self.rank}")
            self._started = True

    def has_left(self, peer: int) -> bool:
        """Whether a host peer has said goodbye. Its memory stays mapped, with all that it wrote before."""
        return peer in self._left

    def report_lost(self, peer: int, reason: str) -> None:
        """Reports the loss of a host peer, unless one was reported before or the generation is over."""
        with self._lock:
            if self._closing or self._latch.cause is not None or peer in self._lost:
                return
            self._lost[peer] = reason
        self._on_link_lost(peer, reason)

    def lost(self) -> dict[int, str]:
        """As `Transport.lost`."""
        with self._lock:
            return dict(self._lost)

    def close(self, timeout: float) -> None:
        """Says goodbye, stops reading and releases the memory. Idempotent; takes at most `timeout` seconds.

        Arrays in this rank's segment stay valid, and so do views of other segments, although nobody writes them any more.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
        for peer_socket in self.reader.sockets.values():
            peer_socket.send(GOODBYE)
        self.reader.stop(timeout if self._started else 0.0)  # an interrupt within `start` hides whether there is a thread
        self.reader.close()
        for host_peer in self._host_peers.values():
            host_peer.close()
        if self._segment is not None:
            self._segment.close()

    # -- events of the reader ------------------------------------------------------------------------------------------

    def _message_received(self, peer: int, message: bytes) -> None:
        if message == GOODBYE:
            self._left.add(peer)
        else:
            self._on_message(peer, message)

    def _socket_ended(self, peer: int) -> None:
        if peer not in self._left:
            self.report_lost(peer, "its process ended without a goodbye")
        self._on_end(peer)

    def abandon_in_child(self) -> None:
        """In a forked child: closes its copies of the sockets, so that peers see the parent's end while the child lives."""
        self._lock = threading.Lock()
        self._closing = True
        self.reader.abandon_in_child()


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
