"""Reassembly of a message from chunks that arrive over several streams and may be out of order."""

from __future__ import annotations

from collections import deque

from ferrorpc.errors import CodecError
from ferrorpc.wire.frames import Frame, Header


class ReassemblyQueue(deque[Frame]):
    """The chunks of one message that have arrived without a gap and were not taken yet, in order of their offsets.

    One thread at a time may `put`; another may take from the left at the same time.
    """

    __slots__ = ("_began", "_early", "_end", "_received", "header")

    def __init__(self, header: Header) -> None:
        super().__init__()
        self.header = header
        """The message's header, from the first chunk that arrived."""
        self._end = 0
        """Bytes that have arrived without a gap."""
        self._early: dict[int, Frame] = {}
        """Chunks after the first gap, by offset."""
        self._began = False
        self._received = 0
        """All bytes that have arrived."""

    @property
    def progress(self) -> str:
        """How much of the message has arrived, as text."""
        return f"{self._received} of {self.header.total} bytes have come"

    @property
    def is_complete(self) -> bool:
        """Whether all of the message has arrived, taken or not."""
        return self._began and self._received >= self.header.total

    def put(self, frame: Frame) -> None:
        """Adds a chunk that has arrived.

        Raises:
            CodecError: it describes another message, or some of its bytes arrived before. So never more than one message is
                kept, and none is waited for in vain.
        """
        if frame.header != self.header:
            raise CodecError(
                f"rank {frame.source} sent a chunk at byte {frame.offset} of a message of {frame.header.total} bytes of shape "
                f"{frame.header.shape}, which began as one of {self.header.total} of shape {self.header.shape}"
            )
        offset, size_bytes = frame.offset, len(frame.payload)
        self._received += size_bytes
        if (
            offset < self._end
            or offset in self._early
            or self._received > self.header.total
            or (self._began and not size_bytes)
        ):
            raise self._repeated(frame)
        self._began = True
        if offset > self._end:
            self._early[offset] = frame
        else:
            self.append(frame)
            self._end = offset + size_bytes
            while self._early and (following := self._early.pop(self._end, None)) is not None:
                self.append(following)
                self._end += len(following.payload)
        if self._end < self.header.total == self._received:  # as many bytes as the message has, and yet a gap
            raise self._repeated(frame)

    def _repeated(self, frame: Frame) -> CodecError:
        return CodecError(
            f"rank {frame.source} sent byte {frame.offset} of a message of {self.header.total} bytes twice: "
            f"{self.header.signature or 'send'} #{frame.key.number}"
        )
