"""The ranks of this generation that share this host's memory, from `discover_host_peers` (meeting.py) until `close`.

A socket to each of them (reader.py reads them) ends with its process. One that ends without a goodbye is a suspicion, told at
once; the coordinator decides what it means. One that ends with a goodbye is a peer that left: only who still needs it has
lost it.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ferrorpc.errors import GroupClosedError, UsageError
from ferrorpc.guard import Clock, Latch
from ferrorpc.transports.shared_memory.hosts import Hosts
from ferrorpc.transports.shared_memory.reader import Reader

if TYPE_CHECKING:
    from ferrorpc.transports.shared_memory.handshake import HostPeer
    from ferrorpc.transports.shared_memory.segment import Segment

STOP_SECONDS: Final = 0.5
"""How long the goodbyes of a process that ends may take: it has about two seconds for all it does."""

GOODBYE: Final = b"\0"
"""The first byte of a message is its kind; this one is the only kind that is all there is of a message."""


class HostPeers:
    """One rank's host_peers in one generation. Made by `discover_host_peers`, alike on every rank.

    Attributes:
        ranks: world ranks on this host, ascending, this one included; only this one where nothing is shared.
        hosts: the same for every rank of the world: the layout that all ranks agree on.
        separation_reason: why the world is not one host, in words; empty when it is.
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
        self._on_link_lost: Callable[[int, str], None] = _nobody
        self._on_message: Callable[[int, bytes], None] = _nobody
        self._on_end: Callable[[int], None] = _nobody
        self._lock = threading.Lock()
        self._lost: set[int] = set()
        self._left: set[int] = set()
        self._started = False
        self._closing = False
        connections = {host_peer.rank: host_peer.connection for host_peer in proven}
        self._reader = Reader(connections, clock, self._message_received, self._socket_ended)
        _all.add(self)

    @property
    def own(self) -> Segment:
        """This rank's memory. Only where `ranks` has others.

        Raises:
            UsageError: this rank shares nothing.
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
        on_message: Callable[[int, bytes], None] | None = None,
        on_end: Callable[[int], None] | None = None,
    ) -> None:
        """Begins to read the sockets, on a thread of its own; to be called once. None of the three may block.

        Args:
            on_link_lost: told (peer, reason) at most once per peer, and never after `close` or after the latch has tripped.
            on_message: told (peer, message) of everything but goodbyes.
            on_end: told (peer) when nothing comes from it any more and nothing reaches it, whatever the reason.
        """
        self._on_link_lost = on_link_lost
        self._on_message = _nobody if on_message is None else on_message
        self._on_end = _nobody if on_end is None else on_end
        if self._reader.sockets:
            self._started = True
            self._clock.start(self._reader.run, f"ferrorpc-host_peers-of-{self.rank}")

    def send(self, peer: int, message: bytes) -> bool:
        """Sends a small message to a host_peer, in order with others; never blocks. False, and dropped, where it reads none."""
        return self._reader.sockets[peer].send(message)

    def try_send(self, peer: int, message: bytes, room: Callable[[], None]) -> bool:
        """Sends a message, unless others to this host_peer still wait: then False, and `room` is called once none does."""
        return self._reader.sockets[peer].try_send(message, room)

    def busy_poll(self, peer: int, over: Callable[[], bool]) -> None:
        """Reads what a host_peer sends on this thread, until `over` or for about half a millisecond. Only after `start`."""
        self._reader.busy_poll(peer, over)

    def has_left(self, peer: int) -> bool:
        """Whether a host_peer has said goodbye. What it wrote before is in its memory, which stays mapped."""
        return peer in self._left

    def report_lost(self, peer: int, reason: str) -> None:
        """Reports a host_peer that is still needed and can do no more."""
        with self._lock:
            if self._closing or self._latch.cause is not None or peer in self._lost:
                return
            self._lost.add(peer)
        self._on_link_lost(peer, reason)

    def close(self, timeout: float) -> None:
        """Says goodbye, stops reading and gives the memory back. Idempotent; at most `timeout` seconds.

        Arrays in this rank's segment live on; views of others' memory too, though they are no longer written.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
        for peer_socket in self._reader.sockets.values():
            peer_socket.send(GOODBYE)
        if self._started:
            self._reader.stop(timeout)
        self._reader.close()
        for host_peer in self._host_peers.values():
            host_peer.close()
        if self._segment is not None:
            self._segment.close()

    # -- what the reader tells -----------------------------------------------------------------------------------------

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
        """In a forked child: gives back its copies of the sockets, so that the parent's end is seen while the child lives."""
        self._lock = threading.Lock()
        self._closing = True
        self._reader.abandon_in_child()


def _nobody(*_: Any) -> None:
    """Nobody has asked to be told yet."""


_all: Final[weakref.WeakSet[HostPeers]] = weakref.WeakSet()


def _abandon_all() -> None:
    for host_peers in list(_all):
        host_peers.abandon_in_child()


def _say_goodbye() -> None:
    """Nobody called close: host_peers are told all the same."""
    for host_peers in list(_all):
        host_peers.close(STOP_SECONDS)


atexit.register(_say_goodbye)

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
