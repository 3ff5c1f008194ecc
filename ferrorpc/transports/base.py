"""A transport carries the frames of one generation between its ranks. It knows nothing about collectives.

A `Key` names one operation of the generation. A `Frame` is one chunk of a message of that operation, as it arrived (both are in
wire/frames.py). A `Box` (mailbox.py) keeps the frames, grants and probe answers of one operation on the receiving rank until
the driver of that operation takes them.

Flow control. The first EAGER_CHUNKS chunks of each message may be sent at once. The rest are sent when the receiver has granted
them, which it does once it has entered the operation. So an operation that both sides have entered is never blocked by one that
only one side has entered, and memory is bounded by eager chunks times operations in flight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ferrorpc.wire.frames import Header, Key

if TYPE_CHECKING:
    import numpy as np

    from ferrorpc.transports.mailbox import Mailbox

Payload: TypeAlias = "np.ndarray[Any, Any] | None"
"""Of a chunk: a contiguous uint8 array of at most CHUNK_BYTES, or None for an empty message."""

CLOSE_SECONDS: Final = 60.0
"""How long a closing rank may take to deliver what it has sent: some megabytes, at 1 Mbit/s. The wait for a peer that has died
or was stopped ends long before that, with its generation or its link."""

BROKEN_CLOSE_SECONDS: Final = 0.2
"""How long `close` may take in a broken generation: nothing has to be flushed, and some peer may be gone."""


class Transport(ABC):
    """The lanes from one rank to all others of its generation. Ranks are world ranks.

    Every method may be called from any thread. None of them blocks, but `busy_poll` may take a moment, and `close` its timeout.
    """

    rank: int
    size: int
    mailbox: Mailbox
    """Where this rank's frames arrive. Given at construction, so that several transports can share one mailbox."""

    @abstractmethod
    def send(self, peer: int, key: Key, header: Header, offset: int, payload: Payload, room: Callable[[], None]) -> bool:
        """Sends one chunk. The payload is copied before this returns.

        False when the lane to `peer` is full: nothing was sent, and `room` is called once (from any thread; it must not block)
        when sending is worth another try. First chunks (those at offset 0) arrive in the order in which they were sent.

        Raises:
            FerroError: the first cause, when the generation is broken or the transport closed.
        """

    @abstractmethod
    def grant(self, peer: int, key: Key, slot: int) -> None:
        """Allows `peer` to send the rest of its message `slot`."""

    @abstractmethod
    def probe(self, peer: int, key: Key, signature: str) -> None:
        """Asks `peer` how far it is in this operation. The answer arrives in the operation's box; about a recv, with the recvs
        that wait for `peer`, after the first chunks that `peer` has sent."""

    def busy_poll(self, peer: int, over: Callable[[], bool]) -> None:
        """Reads what arrives from `peer` on the calling thread, for a moment or until `over` is true.

        Called by a thread before it sleeps until something arrives from `peer`. Does nothing on lanes where being woken is
        cheaper.
        """
        return

    def traffic(self) -> dict[int, tuple[str, int]]:
        """Peer's world rank -> (kind of its lane, payload bytes sent to it). Empty where the transport does not count."""
        return {}

    def unreached(self) -> dict[int, str]:
        """World rank of each peer that has not answered since it was first dialled, a second ago or longer -> where and for how
        long, as text for explanations. Empty where nothing is dialled."""
        return {}

    def lost(self) -> dict[int, str]:
        """World rank of each peer whose link was lost -> why, as text for explanations. What that means the coordinator
        decides, unless it is away."""
        return {}

    def finish(self) -> None:  # noqa: B027  most have nothing to do before `close`
        """Takes nothing more to send, and lets goodbyes follow what was sent. Returns at once; `close` does it, too."""

    @abstractmethod
    def close(self, timeout: float, unawaited: Container[int] = ()) -> None:
        """Flushes what was sent, says goodbye to every peer and stops. Idempotent; takes at most `timeout` seconds.

        Args:
            unawaited: peers that it does not wait for, as long as they are in it.
        """
