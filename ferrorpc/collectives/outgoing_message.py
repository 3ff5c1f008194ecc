"""Sends one message chunk by chunk, as far as its data, the receiver's credit and the lane allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ferrorpc.transports.base import Transport
from ferrorpc.transports.credit import CHUNK_BYTES, EAGER_BYTES
from ferrorpc.transports.mailbox import Box
from ferrorpc.wire.codecs import Codec
from ferrorpc.wire.frames import Header, Key

CODED_VALUES: Final = CHUNK_BYTES // 4
"""Elements of a compressed message that travel together: a chunk's worth of float32."""

Array = np.ndarray[Any, Any]


class OutgoingMessage:
    """A message whose bytes are those of an array.

    Args:
        peer: world rank.
        values: the array, C-contiguous and one-dimensional. Each chunk is copied when it is sent.
    """

    __slots__ = ("_header", "_peer", "count", "done", "values")

    def __init__(self, peer: int, header: Header, values: Array) -> None:
        self._peer = peer
        self._header = header
        self.values = values
        self.count = values.size
        self.done = 0
        """Elements that have been sent."""

    def send(self, transport: Transport, key: Key, box: Box, bound: int, room: Callable[[], None]) -> bool:
        """Sends the next chunk, if all its elements are below `bound`. Returns False when it cannot be sent yet.

        Where the lane was full, `room` is called once it has room.
        """
        header = self._header
        if header.total == 0:
            return transport.send(self._peer, key, header, 0, None, room)
        first = self.done
        last = min(first + self._step(), self.count)
        if last > bound:
            return False
        offset = self._offset(first)
        if offset >= EAGER_BYTES and (self._peer, header.slot) not in box.granted:
            return False
        if not transport.send(self._peer, key, header, offset, self._chunk(first, last), room):
            return False
        self.done = last
        return True

    def progress(self, box: Box) -> str:
        """How much has been sent, as text; "" before the receiver has granted it, as that may not be there."""
        if (self._peer, self._header.slot) not in box.granted:
            return ""
        return f"{self._offset(self.done)} of {self._header.total} bytes are on their way"

    def _step(self) -> int:
        return CHUNK_BYTES // self.values.itemsize

    def _offset(self, first: int) -> int:
        return first * self.values.itemsize

    def _chunk(self, first: int, last: int) -> Array:
        return self.values[first:last].view(np.uint8)


class EncodedMessage(OutgoingMessage):
    """A compressed message: runs of CODED_VALUES elements, each encoded by itself.

    Args:
        encode: encodes elements [first, last) of the array.
    """

    __slots__ = ("_codec", "_encode", "_refused")

    def __init__(
        self,
        peer: int,
        header: Header,
        values: Array,
        codec: Codec,
        encode: Callable[[int, int], Array],
    ) -> None:
        super().__init__(peer, header, values)
        self._codec = codec
        self._encode = encode
        self._refused: tuple[int, Array] | None = None
        """The last chunk and its first element, so that a chunk which found no room is not encoded twice."""

    def _step(self) -> int:
        return CODED_VALUES

    def _offset(self, first: int) -> int:
        return self._codec.encoded_bytes(first)

    def _chunk(self, first: int, last: int) -> Array:
        refused = self._refused
        chunk = self._encode(first, last) if refused is None or refused[0] != first else refused[1]
        self._refused = first, chunk
        return chunk
