"""A transport carries the frames of one generation between its ranks. Nothing here knows what a collective is.

Three nouns. A `Key` names one operation of the generation. A `Frame` is one chunk of one message of it, as it arrived
(both in wire/frames.py). A `Box` (mailbox.py) is where an operation's frames, grants and probe answers wait on the receiving
rank until the one driver of that operation takes them.

Credit: the first EAGER_CHUNKS chunks of each message may always go; the rest go once the receiver has granted it, which it
does when it has entered the operation. So what both sides have entered is never blocked by what one has, and memory is
bounded by eager chunks times operations in flight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ferrorpc.wire.frames import Header, Key

if TYPE_CHECKING:
    import numpy as np

    from ferrorpc.transports.mailbox import Mailbox

BROKEN_CLOSE_SECONDS: Final = 0.2
"""How long `close` may take in a broken generation: nothing has to be flushed, and some peer may be gone."""


class Transport(ABC):
    """The lanes from one rank to all others of its generation. Ranks are world ranks.

    Every method may be called from any thread, and none of them blocks; `busy_poll` may take a moment.
    """

    rank: int
    size: int
    mailbox: Mailbox
    """Where this rank's frames arrive; handed in at construction, so that one mailbox can serve several lanes."""

    @abstractmethod
    def send(
        self,
        peer: int,
        key: Key,
        header: Header,
        offset: int,
        payload: np.ndarray[Any, Any] | None,
        room: Callable[[], None],
    ) -> bool:
        """Sends one chunk (a contiguous uint8 array of at most CHUNK_BYTES, or None for an empty message).

        The payload is copied before this returns. False when the lane to `peer` is full: nothing was sent, and `room` is
        called once (from any thread; it must not block) when it makes sense to try again. First chunks (those at offset 0)
        arrive in the order in which they were sent.

        Raises:
            FerroError: the first cause, when the generation is broken or the transport closed.
        """

    @abstractmethod
    def grant(self, peer: int, key: Key, slot: int) -> None:
        """Tells `peer` that the rest of its message `slot` may come."""

    @abstractmethod
    def probe(self, peer: int, key: Key, signature: str) -> None:
        """Asks `peer` where it stands in this operation; the answer arrives in the operation's box."""

    def busy_poll(self, peer: int, over: Callable[[], bool]) -> None:
        """A thread is about to sleep until something comes from `peer`: where it is cheaper than to be woken, it reads that
        itself for a moment, or until `over`."""
        return

    def traffic(self) -> dict[int, tuple[str, int]]:
        """World rank of a peer -> (kind of its lane, payload bytes sent to it). Empty where nobody counts."""
        return {}

    @abstractmethod
    def close(self, timeout: float) -> None:
        """Flushes what was sent, says goodbye on every stream, stops. Idempotent; at most `timeout` seconds."""
