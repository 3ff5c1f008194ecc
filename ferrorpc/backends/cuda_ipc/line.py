"""What ranks of one host tell each other about their GPU memory: words in shared memory that only their owner writes.

Every rank has a *line* in its segment: where its slab lies and by which handle others open it, the same of its events, and how
far it is. Progress words only grow, and are written after what they speak of was queued on the GPU: a mark that was not yet
recorded is one that nobody waits for, so whoever sees the word may rely on the mark.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ferrorpc.arrays.cupy_sharing import HANDLE_BYTES
from ferrorpc.collectives.arena.board import Array, Words, words_of

SLOTS: Final = 2
"""How many rounds a rank may be ahead of those who read what it lays out."""

CLOSED: Final = 0
"""It has nothing of the others open any more."""
BASE: Final = 1
"""Where its slab begins, in its own process."""
HANDLE: Final = 2
STAGED: Final = 10
"""Rounds with everyone: 2 * round + 1 once its part is laid out, one more once its slice of the result is."""
DIGEST: Final = 11
"""Of each slot: what operation is in it."""
LEFT: Final = 13
"""Rounds with everyone that it needs nothing more of."""
_FIRST_PAIR: Final = 16
_PAIR_WORDS: Final = 4
_SENT, _GOT, _BYTES = 0, 1, 2
_HANDLE_WORDS: Final = HANDLE_BYTES // 8
_EVENT_WORDS: Final = 1 + _HANDLE_WORDS
_COMMON_EVENTS: Final = 3 * SLOTS


def line_bytes(size: int) -> int:
    """Of a line in a world of so many ranks."""
    return 8 * (_events_from(size) + events_of(size) * _EVENT_WORDS)


def events_of(size: int) -> int:
    """How many a rank has."""
    return _COMMON_EVENTS + size * 2 * SLOTS


def _events_from(size: int) -> int:
    return _FIRST_PAIR + size * _PAIR_WORDS


class Line:
    """One rank's line, one's own or a peer's.

    Args:
        memory: its bytes; writable only to their owner.
    """

    def __init__(self, memory: Array, size: int) -> None:
        self.words: Words = words_of(memory)
        self._events = _events_from(size)

    def handle(self) -> bytes:
        """Of the slab."""
        return _bytes_of(self.words[HANDLE : HANDLE + _HANDLE_WORDS])

    def event(self, number: int) -> tuple[int, bytes]:
        """An event in its owner's process, and the handle by which others open it."""
        start = self._events + number * _EVENT_WORDS
        return self.words[start], _bytes_of(self.words[start + 1 : start + _EVENT_WORDS])

    def introduce(self, base: int, handle: bytes) -> None:
        """Writes where the slab is."""
        self.words[BASE] = base
        self.words[HANDLE : HANDLE + _HANDLE_WORDS] = _words_of_bytes(handle)

    def introduce_event(self, number: int, event: int, handle: bytes) -> None:
        """Writes which event it is."""
        start = self._events + number * _EVENT_WORDS
        self.words[start] = event
        self.words[start + 1 : start + _EVENT_WORDS] = _words_of_bytes(handle)


def staged(slot: int, phase: int) -> int:
    """The number of the event after which what a rank has laid out in a slot is there: its part, or its slice of the result."""
    return 2 * slot + phase


def left(slot: int) -> int:
    """That after which it has read what others have laid out there."""
    return 2 * SLOTS + slot


def sent(rank: int, slot: int) -> int:
    """That after which a message to `rank` is there."""
    return _COMMON_EVENTS + rank * 2 * SLOTS + slot


def got(rank: int, slot: int) -> int:
    """That after which a message from `rank` was read."""
    return _COMMON_EVENTS + (rank * 2 + 1) * SLOTS + slot


def sent_word(rank: int) -> int:
    """Where it stands how many messages have gone to `rank`."""
    return _FIRST_PAIR + rank * _PAIR_WORDS + _SENT


def got_word(rank: int) -> int:
    """Where it stands how many messages from `rank` were read."""
    return _FIRST_PAIR + rank * _PAIR_WORDS + _GOT


def bytes_word(rank: int, slot: int) -> int:
    """Where it stands how many bytes the send has in all of which the message to `rank` in that slot is part."""
    return _FIRST_PAIR + rank * _PAIR_WORDS + _BYTES + slot


def _bytes_of(words: Words) -> bytes:
    return np.array(words, np.int64).tobytes()


def _words_of_bytes(data: bytes) -> Words:
    return memoryview(data).cast("q")
