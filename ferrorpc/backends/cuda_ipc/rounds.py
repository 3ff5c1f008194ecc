"""How ranks pass bytes through each other's GPU memory: everyone's part to everyone, and messages between two.

Idea. Each rank lays out what it has in a slot of its slab, marks that in its stream, and then says so in its line. Whoever
needs it sees the word, lets its own stream wait for the mark, and reads. It marks when it has read, and says so; the slot is
taken again after that. The host waits for words only, the GPU for marks only, and no kernel ever waits: so ranks that take
turns on one GPU do not hold each other up.

All waits here are generators: they yield where a word has not come yet.

Cost, of the GPU's memory: what is laid out is written once and read once by each who needs it; SLOTS slots a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from ferrorpc.arrays.cupy_sharing import CupySharing
from ferrorpc.backends.cuda_ipc import line
from ferrorpc.backends.cuda_ipc.line import DIGEST, LEFT, SLOTS, STAGED
from ferrorpc.backends.cuda_ipc.peers import Own, Peer

Waits: TypeAlias = Iterator[None]


class Rounds:
    """What all ranks of a group do in step: every one of them takes part in every round."""

    def __init__(self, sharing: CupySharing, own: Own, peers: Sequence[Peer], slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._sharing = sharing
        self._own = own
        self._peers = peers
        self._round = 0

    @property
    def offset(self) -> int:
        """Where the slot of this round begins in every rank's slab."""
        return self._round % SLOTS * self.slot_bytes

    def begin(self, stream: int) -> Waits:
        """Returns once this rank may write into its slot, in that stream."""
        slot, needed = self._round % SLOTS, self._round - SLOTS + 1
        if needed > 0:
            for peer in self._peers:
                while peer.words[LEFT] < needed:
                    yield
                self._sharing.wait(stream, peer.left[slot])

    def lay_out(self, stream: int, digest: int, phase: int = 0) -> None:
        """What the stream has written into the slot is for the others: phase 0 this rank's part, 1 its slice of the result."""
        slot = self._round % SLOTS
        self._sharing.record(self._own.events[line.staged(slot, phase)], stream)
        self._own.words[DIGEST + slot] = digest
        self._own.words[STAGED] = 2 * self._round + 1 + phase

    def gather(self, stream: int, digest: int, phase: int = 0, peers: Iterable[Peer] | None = None) -> Waits:
        """Returns once what peers (all of them) have laid out may be read in that stream.

        One that is in another operation is waited for, for ever: those who wait ask it, and say what is wrong.
        """
        slot, needed = self._round % SLOTS, 2 * self._round + 1 + phase
        for peer in self._peers if peers is None else peers:
            while peer.words[STAGED] < needed or peer.words[DIGEST + slot] != digest:
                yield
            self._sharing.wait(stream, peer.staged[2 * slot + phase])

    def leave(self, stream: int) -> None:
        """This rank needs nothing more of the round."""
        slot = self._round % SLOTS
        self._sharing.record(self._own.events[line.left(slot)], stream)
        self._round += 1
        self._own.words[LEFT] = self._round


class Messages:
    """What goes between this rank and one other, in either direction, in order.

    Args:
        rank: this group rank.
        begin_bytes: where in a slab its slots for the messages to a rank begin, by that rank.
        message_bytes: what goes at a time.
    """

    def __init__(
        self,
        sharing: CupySharing,
        own: Own,
        peer: Peer,
        rank: int,
        begin_bytes: Callable[[int], int],
        message_bytes: int,
    ) -> None:
        self._sharing = sharing
        self._own = own
        self._peer = peer
        self._rank = rank
        self._to = own.base + begin_bytes(peer.rank)
        self._from = peer.base + begin_bytes(rank)
        self._message_bytes = message_bytes
        self._sent = self._got = 0

    def send(self, source: int, size_bytes: int, stream: int) -> Waits:
        """Returns once all of it is laid out, in that stream's order."""
        peer, words = self._peer, self._own.words
        for first in range(0, size_bytes, self._message_bytes):
            slot, needed = self._sent % SLOTS, self._sent - SLOTS + 1
            if needed > 0:
                while peer.words[line.got_word(self._rank)] < needed:
                    yield
                self._sharing.wait(stream, peer.got[slot])
            part_bytes = min(self._message_bytes, size_bytes - first)
            self._sharing.copy(self._to + slot * self._message_bytes, source + first, part_bytes, stream)
            self._sharing.record(self._own.events[line.sent(peer.rank, slot)], stream)
            self._sent += 1
            words[line.bytes_word(peer.rank, slot)] = size_bytes
            words[line.sent_word(peer.rank)] = self._sent

    def recv(self, target: int, size_bytes: int, stream: int) -> Waits:
        """Returns once all of it is on its way to its place, in that stream. One of another size is waited for, for ever."""
        peer = self._peer
        for first in range(0, size_bytes, self._message_bytes):
            slot = self._got % SLOTS
            while (
                peer.words[line.sent_word(self._rank)] <= self._got
                or peer.words[line.bytes_word(self._rank, slot)] != size_bytes
            ):
                yield
            self._sharing.wait(stream, peer.sent[slot])
            part_bytes = min(self._message_bytes, size_bytes - first)
            self._sharing.copy(target + first, self._from + slot * self._message_bytes, part_bytes, stream)
            self._sharing.record(self._own.events[line.got(peer.rank, slot)], stream)
            self._got += 1
            self._own.words[line.got_word(peer.rank)] = self._got
