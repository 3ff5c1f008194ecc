"""Worlds whose ranks are threads of this process and meet as processes of one host do."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Sequence

from ferrorpc.coordination.local import LocalSession, LocalWorld
from ferrorpc.transports.shared_memory.discovery import discover_host_peers
from ferrorpc.transports.shared_memory.host_peers import HostPeers
from tests.threads import in_threads

SECONDS = 30.0


def in_a_forked_child(body: Callable[[], bool]) -> int:
    """The exit status of a child that runs `body`: 0 where it returned True."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if body() else 1)
        except BaseException:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class HostWorld:
    """A world of `size` ranks and the peers of each (or what `discover_host_peers` raised).

    Args:
        listening: whether the peers' sockets are read at once.
    """

    def __init__(self, size: int, transports: Sequence[str] = (), *, listening: bool = True) -> None:
        self.world = LocalWorld(size, job=f"job-{uuid.uuid4()}", timeout=SECONDS)
        self.sessions: list[LocalSession] = [self.world.session(rank) for rank in range(size)]
        self.lost: list[tuple[int, int, str]] = []
        self.told = threading.Event()
        self._listening = listening
        self.messages: list[tuple[int, int, bytes]] = []
        self.outcomes = in_threads(size, lambda rank: self._meet(rank, transports[rank] if transports else "auto"))

    def _meet(self, rank: int, transport: str) -> HostPeers:
        session = self.sessions[rank]
        membership = session.membership
        found = discover_host_peers(membership.assignment, transport, session.barrier, membership.latch, session.clock)
        if self._listening:
            found.start(
                lambda peer, reason: self._lose(rank, peer, reason),
                lambda peer, data: self._receive(rank, peer, data),
            )
        return found

    def _lose(self, rank: int, peer: int, reason: str) -> None:
        self.lost.append((rank, peer, reason))
        self.told.set()

    def _receive(self, rank: int, peer: int, message: bytes) -> None:
        self.messages.append((rank, peer, message))
        self.told.set()

    def __enter__(self) -> HostWorld:
        return self

    def __exit__(self, *error: object) -> None:
        for outcome in self.outcomes:
            if isinstance(outcome, HostPeers):
                outcome.close(1.0)

    def __getitem__(self, rank: int) -> HostPeers:
        outcome = self.outcomes[rank]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome
