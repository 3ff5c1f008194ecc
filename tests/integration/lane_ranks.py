"""Ranks of one process, each with a worker's server and a transport: what tests of the gRPC lane talk through."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from ferrorpc.errors import FerroError
from ferrorpc.guard import SYSTEM_CLOCK, Latch
from ferrorpc.transports.credit import CHUNK_BYTES
from ferrorpc.transports.grpc.server import WorkerServer
from ferrorpc.transports.grpc.transport import GrpcTransport
from ferrorpc.transports.mailbox import Box, Mailbox
from ferrorpc.types import Assignment, DType, Peer
from ferrorpc.wire.frames import Frame, Header, Key
from ferrorpc.wire.token import Token

SECONDS = 60.0


class Rank:
    """One rank: a server, and the transport of the generation it is in."""

    def __init__(self, rank: int, server: WorkerServer) -> None:
        self.rank = rank
        self.server = server
        self.lost: list[tuple[int, str]] = []
        self.failures: list[FerroError] = []
        self.latch = Latch()

    def enter(self, assignment: Assignment, dial_seconds: float = SECONDS) -> Rank:
        self.latch = Latch()
        self.mailbox = Mailbox(self.rank, self.failures.append)
        self.transport = GrpcTransport(
            self.server,
            assignment,
            self.mailbox,
            self.latch,
            SYSTEM_CLOCK,
            lambda peer, reason: self.lost.append((peer, reason)),
            dial_seconds=dial_seconds,
        )
        return self

    def box(self, key: Key, signature: str = "a()") -> Box:
        return self.mailbox.enter(key, signature, lambda: None)

    def frames(self, key: Key, peer: int, slot: int, box: Box) -> list[Frame]:
        return list(box.frames.get((peer, slot), ()))


def assignment_of(rank: int, servers: list[WorkerServer], generation: int = 1) -> Assignment:
    peers = tuple(Peer(number, f"member-{number}", address=server.address) for number, server in enumerate(servers))
    return Assignment("j", "c", generation, rank, peers)


@contextlib.contextmanager
def two_servers(
    lanes: int = 1, *, open_timeout_seconds: float = 2.0, lease_seconds: float = 3.0
) -> Iterator[list[WorkerServer]]:
    """The servers of two ranks of one job, whose secret is "secret"."""
    token, settings = Token(fixed="secret"), {"open_timeout_seconds": open_timeout_seconds, "lease_seconds": lease_seconds}
    made = [WorkerServer("127.0.0.1", "127.0.0.1", token, lanes=lanes, **settings) for _ in range(2)]
    try:
        yield made
    finally:
        for server in made:
            server.close()


def pair_of(servers: list[WorkerServer]) -> list[Rank]:
    """Both ranks, in generation 1."""
    return [Rank(rank, servers[rank]).enter(assignment_of(rank, servers)) for rank in range(2)]


def header_of(total: int, signature: str = "a()", slot: int = 0) -> Header:
    return Header(slot, signature, DType.UINT8, (total,), total)


def send(sender: Any, peer: int, key: Key, data: np.ndarray, slot: int = 0) -> None:
    """Sends a whole message by the sender's transport, waiting for room."""
    header = header_of(data.size, slot=slot)
    room = threading.Event()
    for offset in range(0, max(data.size, 1), CHUNK_BYTES):
        chunk = data[offset : offset + CHUNK_BYTES] if data.size else None
        while not sender.transport.send(peer, key, header, offset, chunk, room.set):
            assert room.wait(SECONDS), "nobody was told that there is room"
            room.clear()


def random_bytes(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
