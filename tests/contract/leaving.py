"""Peers of transports that leave just while they are looked at."""

from __future__ import annotations

import time
from typing import Any

from ferrorpc.transports.base import Transport
from ferrorpc.transports.grpc.link import Link
from ferrorpc.transports.grpc.transport import GrpcTransport
from ferrorpc.transports.inproc import InprocTransport
from ferrorpc.transports.point_to_point import ANY_NUMBER, Ending, PostedReceive
from ferrorpc.transports.routed import RoutedTransport
from ferrorpc.transports.shared_memory.link import Link as HostLink
from ferrorpc.transports.shared_memory.transport import SharedMemoryTransport
from ferrorpc.wire.frames import POINT_TO_POINT, Key
from tests.integration.lane_ranks import random_bytes
from tests.waiting import eventually


class Leaving(set[int]):
    """Of whom it is asked for the first time is not in it, and is from then on."""

    def __contains__(self, rank: object) -> bool:
        assert isinstance(rank, int)
        before = super().__contains__(rank)
        self.add(rank)
        return before


class LeavingLink(Link):
    """Whose peer has not left when that is asked for the first time, and has from then on."""

    @property
    def has_left(self) -> bool:
        before = super().has_left
        self.leave(time.monotonic())
        return before


class LeavingHostLink(HostLink):
    """The same of a host peer."""

    __slots__ = ("_left",)

    @property
    def has_left(self) -> bool:
        before, self._left = self._left, True
        return before

    @has_left.setter
    def has_left(self, left: bool) -> None:
        self._left = left


def leave_after_one_look(transport: Transport, peer: int) -> None:
    """What else `transport` does when a peer leaves does not matter to a probe."""
    if isinstance(transport, RoutedTransport):
        transport = transport._lanes[peer]
    if isinstance(transport, SharedMemoryTransport):
        link = transport._links[peer]
        leaving = LeavingHostLink(peer, link.socket.connection, link.memory)
        leaving.slots = link.slots
        transport._host_peers.links[peer] = leaving
    elif isinstance(transport, InprocTransport):
        transport._departed = Leaving()
    else:
        assert isinstance(transport, GrpcTransport)
        transport._links[peer] = LeavingLink()


def check_that_recvs_end(leaves: Any, stays: Any) -> None:
    """Recvs from an end that leaves end on the one that stays, which loses no link: those of which no message has come."""
    comes, ends = (PostedReceive((0, leaves.rank, tag), lambda: None) for tag in (0, 1))
    stays.mailbox.post(comes)
    stays.mailbox.post(ends)
    leaves.send(stays, Key(0, POINT_TO_POINT, 1), random_bytes(100_000))
    leaves.transport.close(60.0)

    def is_over() -> bool:
        stays.transport.probe(leaves.rank, Key(0, POINT_TO_POINT, ANY_NUMBER), "recv()")
        return ends.ending is not None

    eventually(is_over, "the end of the recv without a message")
    assert (comes.message is not None, comes.ending, ends.ending) == (True, None, Ending.SENDER_LEFT)
    assert stays.lost == []
