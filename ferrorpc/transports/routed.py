"""Routes messages of a rank: over shared memory to its host peers, over the network to all other ranks."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Final

from ferrorpc.guard import Clock
from ferrorpc.transports.base import Payload, Transport
from ferrorpc.wire.frames import Header, Key

FAR_SECONDS: Final = 1.0
"""What the near transport leaves to the far one when both close: that writes meanwhile."""


class RoutedTransport(Transport):
    """Combines two transports of one rank. Both deliver to the same mailbox.

    Args:
        near: reaches only `peers`.
        far: reaches all ranks.
    """

    def __init__(self, near: Transport, peers: tuple[int, ...], far: Transport, clock: Clock) -> None:
        self.rank = far.rank
        self.size = far.size
        self.mailbox = far.mailbox
        self._near = near
        self._far = far
        self._clock = clock
        self._lanes = [near if rank in peers else far for rank in range(far.size)]

    def send(self, peer: int, key: Key, header: Header, offset: int, payload: Payload, room: Callable[[], None]) -> bool:
        return self._lanes[peer].send(peer, key, header, offset, payload, room)

    def grant(self, peer: int, key: Key, slot: int) -> None:
        self._lanes[peer].grant(peer, key, slot)

    def probe(self, peer: int, key: Key, signature: str) -> None:
        self._lanes[peer].probe(peer, key, signature)

    def busy_poll(self, peer: int, over: Callable[[], bool]) -> None:
        self._lanes[peer].busy_poll(peer, over)

    def traffic(self) -> dict[int, tuple[str, int]]:
        return self._far.traffic() | self._near.traffic()

    def unreached(self) -> dict[int, str]:
        return self._far.unreached() | self._near.unreached()

    def lost(self) -> dict[int, str]:
        return self._far.lost() | self._near.lost()

    def close(self, timeout: float, unawaited: Container[int] = ()) -> None:
        deadline = self._clock.now() + timeout
        self._far.finish()
        self._near.close(max(timeout / 2, timeout - FAR_SECONDS), unawaited)
        self._far.close(max(0.0, deadline - self._clock.now()), unawaited)
