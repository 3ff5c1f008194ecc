"""Checks the ranks, tags and numbers that callers pass."""

from __future__ import annotations

from typing import Any, Final

from ferrorpc.errors import InvalidRankError, SelfSendError, UsageError
from ferrorpc.types import integer_of

TAG_MAX: Final = (1 << 62) - 1
"""The largest tag of callers. Larger ones belong to collectives that run over a backend's send and recv (blocking.py)."""
BACKEND_TAG_MAX: Final = (1 << 63) - 1
"""The largest tag of a backend's own send and recv."""
NUMBER_MAX: Final = (1 << 42) - 1
"""The largest number of a stream's operation. Progress words have room for no more (arena/control_blocks.py)."""


def rank_of(rank: Any, size: int, what: str) -> int:
    """A rank of a group of `size`. Raises InvalidRankError."""
    found = integer_of(rank)
    if not 0 <= found < size:
        raise InvalidRankError(f"{what} is {rank!r}, but this group has ranks 0 to {size - 1}")
    return found


def peer_of(peer: Any, own: int, size: int, what: str) -> int:
    """The other rank of a send or recv. Raises InvalidRankError or SelfSendError."""
    found = rank_of(peer, size, what)
    if found == own:
        raise SelfSendError(f"{what} is {found}, which is this rank itself")
    return found


def number_of(number: Any) -> int:
    """The number of a stream's operation. Raises UsageError."""
    found = integer_of(number)
    if not 0 <= found <= NUMBER_MAX:
        raise UsageError(f"number={number!r} is no integer from 0 to {NUMBER_MAX}", hint="count the stream's operations from 0")
    return found


def tag_of(tag: Any, largest: int = TAG_MAX) -> int:
    """The tag of a send or recv. Raises UsageError."""
    found = integer_of(tag)
    if not 0 <= found <= largest:
        reach = largest.bit_length()
        raise UsageError(f"tag={tag!r} is no integer from 0 to 2^{reach} - 1", hint="leave it out, or count from 0")
    return found
