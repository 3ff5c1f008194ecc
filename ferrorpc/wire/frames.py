"""Tensor frames: one chunk of one message of one operation, and its bytes on the wire."""

from __future__ import annotations

from typing import NamedTuple

from ferrorpc.types import DType


class Key(NamedTuple):
    """One operation of one generation. Stale generations never get this far: the stream they come on is refused."""

    group: int
    stream: int
    number: int


class Header(NamedTuple):
    """What all chunks of one message have in common. Built once per prepared call and slot, used for every number."""

    slot: int
    """Which message of the operation: the plan's label, or the tag of send and recv."""
    signature: str
    dtype: DType
    shape: tuple[int, ...]
    total: int
    """Bytes of the whole message."""


class Frame:
    """One chunk as it arrived. `payload` is a read-only view of the bytes the network (or the sender) gave us."""

    __slots__ = ("header", "key", "offset", "payload", "source")

    def __init__(self, key: Key, source: int, header: Header, offset: int, payload: memoryview) -> None:
        self.key = key
        self.source = source
        self.header = header
        self.offset = offset
        self.payload = payload
