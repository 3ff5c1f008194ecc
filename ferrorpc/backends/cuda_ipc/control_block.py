"""The layout of a rank's control block: 64-bit words in shared host memory, which every rank reads and only the owner writes.

A control block holds the address and the IPC handle of the rank's slab and of its events, and how far the rank has come.
Progress words only grow. Each is written after the event that belongs to it was recorded: a stream that waits for an event
which was never recorded does not wait at all, so a reader waits for the event only once it has seen the word.
"""

from __future__ import annotations

import secrets
from typing import Final

import numpy as np

from ferrorpc.arrays.cupy_ipc import HANDLE_BYTES
from ferrorpc.collectives.arena.control_blocks import Array, Words, words_of

SLOTS: Final = 2
"""How many rounds a rank may be ahead of the ranks that read its slab."""

CLOSED: Final = 0
"""1 once the rank has closed everything that it had open of the others."""
BASE: Final = 1
"""The slab's address in its owner's process."""
HANDLE: Final = 2
STAGED: Final = 10
"""In rounds of all ranks: 2 * round + 1 once the rank's part is in its slab, one more once its slice of the result is."""
DIGEST: Final = 11
"""One word for each slot: the digest of the operation whose data is in it."""
LEFT: Final = 13
"""How many rounds of all ranks this rank has finished reading."""
NAME: Final = 14
"""A number that no other control block has: memory that was given back may be another one's."""
_FIRST_PAIR: Final = 16
_PAIR_WORDS: Final = 4
_SENT, _GOT, _BYTES = 0, 1, 2
_HANDLE_WORDS: Final = HANDLE_BYTES // 8
_EVENT_WORDS: Final = 1 + _HANDLE_WORDS
_COMMON_EVENTS: Final = 3 * SLOTS


def block_bytes(size: int) -> int:
    """The size of a control block in a group of so many ranks."""
    return 8 * (_events_from(size) + events_of(size) * _EVENT_WORDS)


def events_of(size: int) -> int:
    """How many events a rank has in a group of so many ranks."""
    return _COMMON_EVENTS + size * 2 * SLOTS


def _events_from(size: int) -> int:
    return _FIRST_PAIR + size * _PAIR_WORDS


class ControlBlock:
    """The control block of this rank or of a peer.

    Args:
        memory: its bytes; writable only for its owner.
    """

    def __init__(self, memory: Array, size: int) -> None:
        self.words: Words = words_of(memory)
        self._events = _events_from(size)

    def name(self) -> None:
        """Gives it its NAME."""
        self.words[NAME] = secrets.randbits(63)

    def handle(self) -> bytes:
        """The IPC handle of the slab."""
        return _bytes_of(self.words[HANDLE : HANDLE + _HANDLE_WORDS])

    def event(self, number: int) -> tuple[int, bytes]:
        """An event as its owner's process knows it, and the IPC handle with which others open it."""
        start = self._events + number * _EVENT_WORDS
        return self.words[start], _bytes_of(self.words[start + 1 : start + _EVENT_WORDS])

    def set_slab(self, base: int, handle: bytes) -> None:
        """Writes the slab's address and IPC handle."""
        self.words[BASE] = base
        self.words[HANDLE : HANDLE + _HANDLE_WORDS] = _words_of_bytes(handle)

    def set_event(self, number: int, event: int, handle: bytes) -> None:
        """Writes an event and its IPC handle."""
        start = self._events + number * _EVENT_WORDS
        self.words[start] = event
        self.words[start + 1 : start + _EVENT_WORDS] = _words_of_bytes(handle)


def staged(slot: int, phase: int) -> int:
    """The number of the event recorded when a slot is complete: phase 0 the rank's part, 1 its slice of the result."""
    return 2 * slot + phase


def left(slot: int) -> int:
    """The number of the event recorded when the rank has read that slot of the others."""
    return 2 * SLOTS + slot


def sent(rank: int, slot: int) -> int:
    """The number of the event recorded when a message to `rank` is complete."""
    return _COMMON_EVENTS + rank * 2 * SLOTS + slot


def got(rank: int, slot: int) -> int:
    """The number of the event recorded when a message from `rank` was read."""
    return _COMMON_EVENTS + (rank * 2 + 1) * SLOTS + slot


def sent_word(rank: int) -> int:
    """The index of the word that counts the messages sent to `rank`."""
    return _FIRST_PAIR + rank * _PAIR_WORDS + _SENT


def got_word(rank: int) -> int:
    """The index of the word that counts the messages read from `rank`."""
    return _FIRST_PAIR + rank * _PAIR_WORDS + _GOT


def bytes_word(rank: int, slot: int) -> int:
    """The index of the word that holds the size in bytes of the whole send to which the message in that slot belongs."""
    return _FIRST_PAIR + rank * _PAIR_WORDS + _BYTES + slot


def _bytes_of(words: Words) -> bytes:
    return np.array(words, np.int64).tobytes()


def _words_of_bytes(data: bytes) -> Words:
    return memoryview(data).cast("q")
