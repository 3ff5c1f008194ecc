"""The handshake between two ranks of one host: connects a Unix socket, maps each other's memory and proves whose it is.

The lower rank of a pair listens, the higher one dials. Each sends a greeting with a read-only descriptor of its segment and a
nonce, which the other rank has already received through the coordinator. A rank accepts its peer once the mapped segment begins
with that nonce. This detects processes of other generations, and segments that do not belong to the peer.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
from collections.abc import Sequence
from typing import Any, Final

from ferrorpc.errors import CodecError, FerroError, PermissionDeniedError, VersionMismatchError
from ferrorpc.guard import Clock, Latch
from ferrorpc.transports.shared_memory.link import Link
from ferrorpc.transports.shared_memory.segment import Segment, map_peer
from ferrorpc.types import Assignment
from ferrorpc.v1.shared_memory_pb2 import SharedMemoryGreeting, SharedMemoryOffer
from ferrorpc.wire.limits import DATA_PROTOCOL_VERSION
from ferrorpc.wire.parse import parse

GREETING_SECONDS: Final = 5.0
"""How long a rank that has offered its memory may take to send its greeting. Milliseconds are normal."""

_POLL_SECONDS: Final = 0.1
_GREETING_BYTES_MAX: Final = 4096
_CREDENTIALS: Final = struct.Struct("3i")
_SECONDS_AND_MICROSECONDS: Final = struct.Struct("@ll")


def listen(name: str) -> socket.socket:
    """A listening socket with an abstract name, which needs no file and vanishes with the process."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind("\0" + name)
        listener.listen(socket.SOMAXCONN)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


class Handshaker:
    """Does this rank's handshakes with the other ranks of `host`.

    Args:
        host: world ranks that may share memory, including this one.
        offers: of all ranks of the world, in rank order.
    """

    def __init__(
        self,
        assignment: Assignment,
        host: Sequence[int],
        offers: Sequence[SharedMemoryOffer],
        listener: socket.socket,
        segment: Segment,
    ) -> None:
        self.links: dict[int, Link] = {}
        """The link to each proven peer, by rank."""
        self.failures: dict[int, str] = {}
        """By rank, why a rank of the host is no host peer."""
        self._assignment = assignment
        self._offers = offers
        self._listener = listener
        self._segment = segment
        self._peers = [rank for rank in host if rank != assignment.rank]
        self._selector = selectors.DefaultSelector()
        self._descriptor = segment.read_only_descriptor()

    def run(self, latch: Latch, clock: Clock, seconds: float = GREETING_SECONDS) -> None:
        """Returns once every rank is proven or has failed, the time is over, or the generation has ended."""
        try:
            self._selector.register(self._listener, selectors.EVENT_READ)
            lower, dialled = [rank for rank in self._peers if rank < self._assignment.rank], None
            dial_next_at = clock.now()
            deadline = dial_next_at + seconds
            while self._missing() and latch.cause is None and (left := deadline - clock.now()) > 0:
                # One at a time: the kernel lets a user have no more descriptors on the way than one process may have open. But
                # one that is silent must not keep those above it from those below.
                while lower and (dialled not in self._missing() or clock.now() >= dial_next_at):
                    self._dial(dialled := lower.pop(), seconds)
                    dial_next_at = clock.now() + seconds / 10
                for key, _ in self._selector.select(min(left, _POLL_SECONDS)):
                    self._accept() if key.fileobj is self._listener else self._read(key)
            for rank in self._missing():
                self.failures[rank] = f"rank {rank} has not greeted within {seconds:g} s"
        finally:
            self._end()

    def _missing(self) -> list[int]:
        return [rank for rank in self._peers if rank not in self.links and rank not in self.failures]

    def _end(self) -> None:
        """Closes the connections that proved no peer."""
        kept = {link.socket.connection for link in self.links.values()}
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket) and key.fileobj not in kept and key.fileobj is not self._listener:
                key.fileobj.close()
        self._selector.close()
        os.close(self._descriptor)

    def _dial(self, rank: int, seconds: float) -> None:
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            self.failures[rank] = f"rank {rank} cannot be dialled: {error.strerror}"
            return
        timeout = _SECONDS_AND_MICROSECONDS.pack(int(seconds) + 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        try:
            connection.connect("\0" + self._offers[rank].socket)
            connection.setblocking(False)
            self._greet(connection, rank)
        except OSError as error:
            connection.close()
            self.failures[rank] = f"rank {rank} cannot be reached over a Unix socket: {error.strerror}"
            return
        self._selector.register(connection, selectors.EVENT_READ, rank)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if _user_of(connection) != os.geteuid():
            connection.close()  # at once: every user of the host can read the names of abstract sockets
            return
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, None)

    def _greet(self, connection: socket.socket, rank: int) -> None:
        mine = self._assignment
        greeting = SharedMemoryGreeting(
            version=DATA_PROTOCOL_VERSION,
            job=mine.job,
            cluster_id=mine.cluster_id,
            generation=mine.generation,
            source_rank=mine.rank,
            target_rank=rank,
            nonce=self._segment.nonce,
            segment_bytes=self._segment.size_bytes,
        )
        socket.send_fds(connection, [greeting.SerializeToString()], [self._descriptor])

    def _read(self, key: selectors.SelectorKey) -> None:
        """Reads the greeting on a connection. `key.data` is the rank that was dialled; None where the peer dialled."""
        connection: Any = key.fileobj
        self._selector.unregister(connection)
        dialled: int | None = key.data
        rank = dialled
        try:
            greeting, descriptor = _receive(connection)
            try:
                rank = self._check(greeting, connection, dialled)
                if dialled is None:
                    self._greet(connection, rank)  # also where the versions differ: then both name them
                if greeting.version != DATA_PROTOCOL_VERSION:
                    raise VersionMismatchError(
                        f"it speaks version {greeting.version} of the data plane's protocol, this rank {DATA_PROTOCOL_VERSION}"
                    )
                memory = map_peer(descriptor, greeting.segment_bytes, self._offers[rank].nonce)
            finally:
                os.close(descriptor)
        except (FerroError, OSError) as error:
            connection.close()
            if rank is not None:
                self.failures[rank] = f"rank {rank}: {error.message if isinstance(error, FerroError) else error.strerror}"
            return
        self.links[rank] = Link(rank, connection, memory)

    def _check(self, greeting: SharedMemoryGreeting, connection: socket.socket, dialled: int | None) -> int:
        """The rank that sent the greeting, once it is known to belong to the generation."""
        mine, rank = self._assignment, greeting.source_rank
        user = _user_of(connection)
        if user != os.geteuid():
            raise PermissionDeniedError(f"a process of user {user} greeted one of user {os.geteuid()}")
        expected = rank == dialled if dialled is not None else rank > mine.rank
        if not expected or rank not in self._missing():
            raise PermissionDeniedError(f"rank {rank} greeted rank {mine.rank} unasked")
        theirs = (greeting.job, greeting.cluster_id, greeting.generation, greeting.target_rank)
        if theirs != (mine.job, mine.cluster_id, mine.generation, mine.rank) or greeting.nonce != self._offers[rank].nonce:
            raise PermissionDeniedError(f"a greeting of rank {rank} belongs to another generation")
        return rank


def _receive(connection: socket.socket) -> tuple[SharedMemoryGreeting, int]:
    """Receives a greeting and the one descriptor that comes with it."""
    data, descriptors, flags, _ = socket.recv_fds(connection, _GREETING_BYTES_MAX, 2, socket.MSG_CMSG_CLOEXEC)
    try:
        if not data:
            raise CodecError("it hung up")
        if len(descriptors) != 1 or flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            raise CodecError(f"its greeting has {len(descriptors)} descriptors instead of one")
        return parse(SharedMemoryGreeting, data, "its greeting is no message of ours"), descriptors.pop()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _user_of(connection: socket.socket) -> int:
    """The user id of the process at the other end, from the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    return int(user)
