"""The ranks of this generation that share this host's memory, from `meet` (meeting.py) until `close`.

One daemon thread reads the sockets of all of them. A socket that ends without a goodbye is a suspicion, told at once; the
coordinator decides what it means. One that ends with a goodbye is a peer that left: only who still needs it has lost it.
"""

from __future__ import annotations

import atexit
import os
import selectors
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ferrorpc.errors import GroupClosedError, UsageError
from ferrorpc.guard import Clock, Latch
from ferrorpc.transports.shared_memory.hosts import Hosts
from ferrorpc.transports.shared_memory.link import Link

if TYPE_CHECKING:
    from ferrorpc.transports.shared_memory.greeting import Neighbour
    from ferrorpc.transports.shared_memory.segment import Segment

STOP_SECONDS: Final = 0.5
"""How long the goodbyes of a process that ends may take: it has about two seconds for all it does."""

TURN_MESSAGES: Final = 16
"""How many messages of one neighbour are read before it is another one's turn."""

GOODBYE: Final = b"\0"
"""The first byte of a message is its kind; this one is the only kind that is all there is of a message."""


class Neighbours:
    """One rank's neighbours in one generation. Made by `meet`, alike on every rank.

    Attributes:
        ranks: world ranks on this host, ascending, this one included; only this one where nothing is shared.
        hosts: the same for every rank of the world: the layout that all ranks agree on.
        single_copy: whether all of `ranks` can read each other's private memory.
        why_not: why the world is not one host, in words; empty when it is.
    """

    def __init__(
        self,
        rank: int,
        hosts: Hosts,
        segment: Segment | None,
        proven: Sequence[Neighbour],
        single_copy: bool,
        why_not: str,
        latch: Latch,
        clock: Clock,
    ) -> None:
        self.rank = rank
        self.hosts = hosts
        self.ranks = next(host for host in hosts if rank in host)
        self.single_copy = single_copy
        self.why_not = why_not
        self._segment = segment
        self._neighbours = {neighbour.rank: neighbour for neighbour in proven}
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
        self._discard = False
        self._ended = threading.Event()
        self._wake_descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) if proven else -1
        self._links = {neighbour.rank: Link(neighbour.rank, neighbour.connection, self._wake) for neighbour in proven}
        _all.add(self)

    @property
    def own(self) -> Segment:
        """This rank's memory. Only where `ranks` has others.

        Raises:
            UsageError: this rank shares nothing.
        """
        if self._segment is None:
            raise UsageError(f"rank {self.rank} shares no memory: {self.why_not}")
        return self._segment

    def memory(self, rank: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The segment of one of `ranks`: uint8, shape (its bytes,); read-only unless it is this rank's own.

        Raises:
            GroupClosedError: after `close`.
        """
        memory = self.own.memory if rank == self.rank else self._neighbours[rank].memory
        if not memory.size:
            raise GroupClosedError(f"rank {self.rank} has closed its shared memory")
        return memory

    def read_private(self, rank: int, address: int, target: np.ndarray[Any, Any]) -> None:
        """Fills `target` (C-contiguous) with the bytes at `address` of a peer's process, in one copy and without the GIL.

        Raises:
            PeerLostError: its process has ended.
            BackendUnavailableError: the kernel does not permit it; never where `single_copy` is true.
            CodecError: the peer has no such memory.
        """
        private = self._neighbours[rank].private
        if private is None:
            raise UsageError(f"the private memory of rank {rank} cannot be read: {self._neighbours[rank].why_not_readable}")
        private.read(address, target)

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
        if self._links:
            self._started = True
            self._clock.start(self._read, f"ferrorpc-neighbours-of-{self.rank}")

    def send(self, peer: int, message: bytes) -> None:
        """Sends a small message to a neighbour, in order with others; never blocks."""
        self._links[peer].send(message)

    def offer(self, peer: int, message: bytes, room: Callable[[], None]) -> bool:
        """Sends a message, unless others to this neighbour still wait: then False, and `room` is called once none does."""
        return self._links[peer].offer(message, room)

    def has_left(self, peer: int) -> bool:
        """Whether a neighbour has said goodbye. What it wrote before is in its memory, which stays mapped."""
        return peer in self._left

    def lose(self, peer: int, reason: str) -> None:
        """Reports a neighbour that is still needed and can do no more."""
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
        for link in self._links.values():
            link.send(GOODBYE)
        self._wake()
        if self._started and not self._ended.wait(timeout):
            self._discard = True
            self._wake()
            self._ended.wait()
        self._free()

    def _free(self) -> None:
        for link in self._links.values():
            link.close()
        for neighbour in self._neighbours.values():
            neighbour.close()
        if self._segment is not None:
            self._segment.close()
        with self._lock:
            descriptor, self._wake_descriptor = self._wake_descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _wake(self) -> None:
        with self._lock:
            if self._wake_descriptor >= 0:
                os.eventfd_write(self._wake_descriptor, 1)

    # -- the reader thread ---------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Until every link has ended, or this rank closes and has nothing left to say."""
        try:
            self._read_all()
        finally:
            self._ended.set()

    def _read_all(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_descriptor, selectors.EVENT_READ)
            for link in self._links.values():
                selector.register(link.connection, selectors.EVENT_READ, link)
            open_links = set(self._links.values())
            while open_links and not self._finished(open_links):
                for key, events in selector.select():
                    if key.data is None:
                        os.eventfd_read(self._wake_descriptor)
                    elif not self._serve(key.data, events):
                        selector.unregister(key.fileobj)
                        open_links.discard(key.data)
                        key.data.end()
                        self._on_end(key.data.peer)
                for link in open_links:
                    events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.pending else 0)
                    if selector.get_key(link.connection).events != events:
                        selector.modify(link.connection, events, link)

    def _finished(self, links: set[Link]) -> bool:
        """Whether this rank closes and has said all that it had to, or gives up saying it."""
        return self._closing and (self._discard or not any(link.pending for link in links))

    def _serve(self, link: Link, events: int) -> bool:
        """Something can be done on a link; False at its end."""
        if events & selectors.EVENT_WRITE:
            link.flush()
        for _ in range(TURN_MESSAGES if events & selectors.EVENT_READ else 0):
            message = link.receive()
            if message is None:
                break
            if not message:
                if link.peer not in self._left:
                    self.lose(link.peer, "its process ended without a goodbye")
                return False
            if message == GOODBYE:
                self._left.add(link.peer)
            else:
                self._on_message(link.peer, message)
        return True

    def abandon_in_child(self) -> None:
        """In a forked child: gives back its copies of the sockets, so that the parent's end is seen while the child lives."""
        self._lock = threading.Lock()
        self._closing = True
        for link in self._links.values():
            link.connection.close()


def _nobody(*_: Any) -> None:
    """Nobody has asked to be told yet."""


_process = os.getpid()
_all: Final[weakref.WeakSet[Neighbours]] = weakref.WeakSet()


def _abandon_all() -> None:
    for neighbours in list(_all):
        neighbours.abandon_in_child()


def _say_goodbye() -> None:
    """Nobody called close: neighbours are told all the same. Not in a forked child, whose links belong to its parent."""
    if os.getpid() == _process:
        for neighbours in list(_all):
            neighbours.close(STOP_SECONDS)


atexit.register(_say_goodbye)

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
