"""What a rank knows of its link to one host peer: the socket, the peer's segment, and how far the link has ended."""

from __future__ import annotations

import socket

import numpy as np

from ferrorpc.transports.shared_memory.peer_socket import PeerSocket
from ferrorpc.transports.shared_memory.segment import Bytes
from ferrorpc.transports.shared_memory.slots import Slots


class Link:
    """The link to one proven peer in one generation.

    Attributes:
        socket: to the peer.
        memory: the peer's segment, read-only uint8, shape (its bytes,); empty after `close`.
        slots: for frames to the peer, in this rank's segment. `HostPeers` adds them.
        sent_bytes: how many bytes of arrays were sent to the peer.
        has_left: whether the peer said goodbye. Its memory stays mapped, with all that it wrote before.
        has_ended: whether nothing more can be sent to the peer.
        is_refused: whether the peer sent something invalid, after which nothing that it sends is believed.
        loss: why the link is lost, where that was reported.
    """

    __slots__ = ("has_ended", "has_left", "is_refused", "loss", "memory", "sent_bytes", "slots", "socket")

    slots: Slots

    def __init__(self, peer: int, connection: socket.socket, memory: Bytes) -> None:
        self.socket = PeerSocket(peer, connection)
        self.memory = memory
        self.sent_bytes = 0
        self.has_left = False
        self.has_ended = False
        self.is_refused = False
        self.loss: str | None = None

    def end(self) -> None:
        """Nothing more can be sent to the peer."""
        self.has_ended = True
        self.slots.end()

    def close(self) -> None:
        """Closes the socket and drops the mapping, which lives on as long as views of it exist."""
        self.socket.close()
        self.memory = np.empty(0, np.uint8)
