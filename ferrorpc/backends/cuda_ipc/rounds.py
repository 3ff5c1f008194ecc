"""How ranks pass bytes through each other's GPU memory: in rounds of all ranks, and as messages between two.

Idea. A rank copies its data into a slot of its slab, records an event in its stream, and then writes a word in its control
block. A reader sees the word, makes its own stream wait for the event, and reads the slot. It records an event when it has read
the slot, and writes a word too; the slot is used again after that. The host waits only for words and the GPU only for events,
and no kernel spins. So ranks whose processes take turns on one GPU do not block each other.

A rank that is killed takes with it what its GPU has not reached. A stream that waits for such an event waits for ever, which no
call ends, so its process has to (`Ending`).

All waits here are generators, which yield while a word has not been written yet.

Cost, of the GPU's memory: data is written once, and read once by each rank that needs it; SLOTS slots a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from ferrorpc.arrays.cupy_ipc import CupyIpc
from ferrorpc.backends.cuda_ipc import control_block
from ferrorpc.backends.cuda_ipc.control_block import DIGEST, LEFT, SLOTS, STAGED
from ferrorpc.backends.cuda_ipc.peers import Own, Peer

Waits: TypeAlias = Iterator[None]


class Rounds:
    """The rounds of a group. Every rank takes part in every round."""

    def __init__(self, ipc: CupyIpc, own: Own, peers: Sequence[Peer]) -> None:
        self.slot_bytes = own.slot_bytes
        self._ipc = ipc
        self._own = own
        self._peers = peers
        self._round = 0
        self._digest = 0
        self._streams = [0] * SLOTS
        """The stream of the latest round in each slot."""

    @property
    def offset(self) -> int:
        """The offset of this round's slot in every rank's slab."""
        return self._round % SLOTS * self.slot_bytes

    def begin(self, stream: int, digest: int) -> Waits:
        """Returns once this rank may queue writes to its slot in that stream, where all of the round is. Peers know the
        operation by its digest."""
        slot, needed = self._round % SLOTS, self._round - SLOTS + 1
        if needed > 0:
            for peer in self._peers:
                while peer.words[LEFT] < needed:
                    yield
                self._ipc.wait(stream, peer.left[slot])
            if stream != self._streams[slot]:  # in which this rank may still read its own slot
                self._ipc.wait(stream, self._own.events[control_block.left(slot)])
        self._streams[slot], self._digest = stream, digest

    def publish(self, phase: int = 0) -> None:
        """Makes what the stream has written to the slot readable: phase 0 this rank's part, 1 its slice of the result."""
        slot = self._round % SLOTS
        self._ipc.record(self._own.events[control_block.staged(slot, phase)], self._streams[slot])
        self._own.words[DIGEST + slot] = self._digest
        self._own.words[STAGED] = 2 * self._round + 1 + phase

    def gather(self, phase: int = 0, peers: Iterable[Peer] | None = None) -> Waits:
        """Returns once the stream may read what the peers (None: all of them) have published.

        It waits without a deadline for a peer that is in another operation: the operation's probes find and report that.
        """
        slot, needed = self._round % SLOTS, 2 * self._round + 1 + phase
        for peer in self._peers if peers is None else peers:
            while peer.words[STAGED] < needed or peer.words[DIGEST + slot] != self._digest:
                yield
            self._ipc.wait(self._streams[slot], peer.staged[2 * slot + phase])

    def leave(self) -> None:
        """Ends the round on this rank, which has queued all its reads."""
        slot = self._round % SLOTS
        self._ipc.record(self._own.events[control_block.left(slot)], self._streams[slot])
        self._round += 1
        self._own.words[LEFT] = self._round


class Messages:
    """The messages between this rank and a peer, in order in each direction."""

    def __init__(self, ipc: CupyIpc, own: Own, peer: Peer) -> None:
        self._ipc = ipc
        self._own = own
        self._peer = peer
        self._rank = own.rank
        self._to = own.base + own.messages_begin(peer.rank)
        self._from = peer.base + own.messages_begin(own.rank)
        self._message_bytes = own.message_bytes
        self._sent = self._got = 0

    def send(self, source: int, size_bytes: int, stream: int) -> Waits:
        """Returns once all of it is queued to be copied into slots."""
        peer, words = self._peer, self._own.words
        for first in range(0, size_bytes, self._message_bytes):
            slot, needed = self._sent % SLOTS, self._sent - SLOTS + 1
            if needed > 0:
                while peer.words[control_block.got_word(self._rank)] < needed:
                    yield
                self._ipc.wait(stream, peer.got[slot])
            part_bytes = min(self._message_bytes, size_bytes - first)
            self._ipc.copy(self._to + slot * self._message_bytes, source + first, part_bytes, stream)
            self._ipc.record(self._own.events[control_block.sent(peer.rank, slot)], stream)
            self._sent += 1
            words[control_block.bytes_word(peer.rank, slot)] = size_bytes
            words[control_block.sent_word(peer.rank)] = self._sent

    def recv(self, target: int, size_bytes: int, stream: int) -> Waits:
        """Returns once all of it is queued to be copied to `target`. It waits without a deadline for one of that size."""
        peer = self._peer
        for first in range(0, size_bytes, self._message_bytes):
            slot = self._got % SLOTS
            while (
                peer.words[control_block.sent_word(self._rank)] <= self._got
                or peer.words[control_block.bytes_word(self._rank, slot)] != size_bytes
            ):
                yield
            self._ipc.wait(stream, peer.sent[slot])
            part_bytes = min(self._message_bytes, size_bytes - first)
            self._ipc.copy(target + first, self._from + slot * self._message_bytes, part_bytes, stream)
            self._ipc.record(self._own.events[control_block.got(peer.rank, slot)], stream)
            self._got += 1
            self._own.words[control_block.got_word(peer.rank)] = self._got
