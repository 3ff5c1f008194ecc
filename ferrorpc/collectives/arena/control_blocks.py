"""Control blocks in shared memory, in which the ranks of one host tell each other how far they are. Only the owner writes one.

Every rank has a *control block* of words for each channel of each stream of each group, in its own segment. Peers map it for
reading and poll it. Progress words only grow, so a reader of an old value just waits a little longer. x86-64 keeps stores in
order, so a reader that sees a word sees everything that was written before it.

A *channel* runs one operation at a time. A stream has several; operation `number` uses channel `number % channels`. So
operations of different channels may overtake each other, and an operation waits until every rank has left the previous one on
its channel.

Idea. Single-writer flags whose values only grow, instead of states that are set and reset, as in Open MPI's xhc component
(Katevenis and Ploumidis, 2022) and MPICH's release-gather (Jain et al., 2018): nothing has to be reset after an operation.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, Protocol, TypeAlias
from weakref import WeakSet, WeakValueDictionary

import numpy as np

from ferrorpc.collectives.arena.calls import Calls
from ferrorpc.collectives.polling import Polling
from ferrorpc.errors import LimitExceededError
from ferrorpc.generation_errors import links_closed
from ferrorpc.transports.shared_memory.host_peers import HostPeers
from ferrorpc.transports.shared_memory.segment import CONTROL_OFFSET

Array: TypeAlias = np.ndarray[Any, Any]
Words: TypeAlias = "memoryview[int]"
Place: TypeAlias = tuple[Array, Array]
"""The control blocks of a stream's channels, and their slots."""
Steps: TypeAlias = Generator[int, None, None]
"""A running operation, or a part of one: yields while it has to wait, each time the progress of its rank."""

BLOCK_WORDS: Final = 16
"""Two cache lines, because processors fetch them in pairs."""
STAGED: Final = 0
"""How many chunks of the operation this rank has published; POISONED after a failure."""
REDUCED: Final = 1
"""Of how many chunks it has reduced its slice."""
LEFT: Final = 2
"""How many chunks it needs no longer."""
SIGNATURE: Final = 3
"""Hash of the signature of its current call."""
TEXT: Final = 4
"""Offset of that signature's text in its segment."""
RING: Final = 5
"""Offset of its ring, through which it passes what others cannot read in place."""
SOURCE: Final = 6
"""Offset of its array, or of the table of its parts; 0: its array comes through the ring."""
RESULT: Final = 7
"""Offset of its result; 0: it comes through the ring."""

NOTES: Final = (8, 11)
"""Offsets of the notes of calls that only send (`signature_check`): ticket, hash, offset of the signature's text."""

BLOCK_BYTES: Final = BLOCK_WORDS * 8
BLOCK_PAGE_BYTES: Final = 8 << 10
"""Control blocks are allocated in pages of at least this size."""
SLOT_BYTES: Final = 128 << 10
"""Every channel has a slot of this size for small arrays; it never moves."""

CHUNK_BITS: Final = 20
"""A progress word is ticket << CHUNK_BITS | chunks."""
POISONED: Final = -1
"""Less than any progress: a rank that waits for a failed one waits until it learns of the generation's end."""

DIRECTORY_ENTRIES: Final = 4096
"""At the front of a segment is the directory: a count, then entries of (group, stream, offsets of control blocks and slots)."""
_ENTRY_WORDS: Final = 4
_DIRECTORY_BYTES: Final = 8 * (1 + DIRECTORY_ENTRIES * _ENTRY_WORDS)
_TEXT_BYTES: Final = 4096
_NOTHING: Final[Array] = np.empty(0, np.uint8)


class Signature:
    """The signature of calls, in this rank's segment.

    Attributes:
        text: as ranks write it.
        digest: its hash.
        offset: of its text in the segment.
    """

    __slots__ = ("__weakref__", "_place", "digest", "offset", "text")

    def __init__(self, text: str, digest: int, offset: int, place: Array) -> None:
        self.text = text
        self.digest = digest
        self.offset = offset
        self._place = place

    def let_go(self) -> None:
        """Keeps its memory no longer."""
        self._place = _NOTHING


class ControlBlocks:
    """This rank's control blocks, and access to those of its peers. One per generation.

    Control blocks, and the signatures that they name, stay where they are until the end of the generation, so that a peer never
    reads anything else in their place. All else of a stream that has ended on this rank is freed when the next stream opens,
    once its peers have left it too. `close` lets go of everything.

    Attributes:
        host_peers: the ranks, and their segments.
        rank: own world rank.
    """

    def __init__(self, host_peers: HostPeers) -> None:
        self.host_peers = host_peers
        self.rank = host_peers.rank
        self.polling = Polling(len(host_peers.ranks))
        self._lock = threading.Lock()
        self._closed = False
        self._banks: dict[tuple[int, int], Bank] = {}
        self._opened_by: dict[int, dict[tuple[int, int], tuple[int, int]]] = {}
        """Rank -> (group, stream) -> offsets, as far as its directory was read. That only grows, and names no stream twice."""
        self._over: deque[Bank] = deque()
        self._pages: list[Array] = []
        self._unused = _NOTHING, 0
        """The rest of the newest page, and its offset."""
        self._named: set[Signature] = set()
        """What the control blocks of streams that have ended name."""
        self._signatures: WeakValueDictionary[str, Signature] = WeakValueDictionary()
        self.calls = Calls()

    def bank(self, group: int, stream: int, ranks: Sequence[int], channels: int) -> Bank:
        """The channels of one stream of a group of world ranks, in group order; the same object for the same stream.

        Raises:
            LimitExceededError: there is no room for another stream.
            GroupClosedError: after `close`.
        """
        found = self._banks.get((group, stream))
        if found is not None:
            return found
        with self._lock:
            self._check_open()
            found = self._banks.get((group, stream))
            if found is None:
                self._free_ended()
                found = Bank(self, (group, stream), ranks, channels, self._open(group, stream, channels))
                self._banks[group, stream] = found
        return found

    def opened(self, group: int, stream: int) -> Bank | None:
        """The channels of a stream that this rank has opened and not freed."""
        return self._banks.get((group, stream))

    def streams_of(self, group: int) -> list[int]:
        """The streams of a group that this rank has opened and not freed."""
        return [stream for opened, stream in list(self._banks) if opened == group]

    def let_go(self, group: int, stream: int) -> None:
        """This rank starts nothing more there. Takes no lock, because a finaliser may run at any point of any thread."""
        bank = self._banks.get((group, stream))
        if bank is not None:
            self._over.append(bank)

    def close(self) -> None:
        """Lets go of all shared memory but what operations in flight here still use. Nothing begins afterwards. Idempotent.

        Whoever keeps a closed group, or a call that was prepared for it, keeps none of its memory.
        """
        self.host_peers.own.close()  # it would reuse what is freed here, although peers may still read it
        with self._lock:
            self._closed = True
            for bank in self._banks.values():
                bank.close()
            for signature in list(self._signatures.values()):
                signature.let_go()
            self._pages.clear()
            self._unused = _NOTHING, 0

    def _check_open(self) -> None:
        if self._closed:
            raise links_closed(self.rank)

    def _free_ended(self) -> None:
        for _ in range(len(self._over)):
            bank = self._over.popleft()
            if not bank.is_unused():
                self._over.append(bank)
                continue
            self._named.update(*[channel.signatures.values() for channel in bank.channels])
            bank.free()
            self._banks.pop(bank.stream, None)  # only now: `close` finds one whose end was interrupted

    def _open(self, group: int, stream: int, channels: int) -> Place:
        directory = directory_of(self.host_peers.memory(self.rank))
        count = directory[0]
        if count == DIRECTORY_ENTRIES:
            raise LimitExceededError(
                f"rank {self.rank} has opened {count} streams and subgroups in this generation, and there is room for no more",
                hint="keep subgroups and streams instead of making new ones",
            )
        slots_offset, slots = self.allocate(channels * SLOT_BYTES)
        blocks_offset, blocks = self._new_blocks(channels * BLOCK_BYTES)
        entry = 1 + count * _ENTRY_WORDS
        for word, value in enumerate((_signed(group), stream, blocks_offset, slots_offset)):
            directory[entry + word] = value
        directory[0] = count + 1
        return blocks, slots

    def _new_blocks(self, nbytes: int) -> tuple[int, Array]:
        """Zeros in this rank's segment, until the end of the generation: their offset and bytes."""
        page, offset = self._unused
        if page.size < nbytes:
            offset, page = self.allocate(max(nbytes, BLOCK_PAGE_BYTES))
            self._pages.append(page)
        self._unused = page[nbytes:], offset + nbytes
        blocks = page[:nbytes]
        blocks[:] = 0
        return offset, blocks

    def allocate(self, nbytes: int) -> tuple[int, Array]:
        """New memory in this rank's segment: its offset and bytes, free again when nothing refers to them any more."""
        place = self.host_peers.own.empty((nbytes,), np.dtype(np.uint8))
        offset = self.host_peers.own.locate(place)
        assert offset is not None, "a segment finds what it has just given"
        return offset, place

    def find(self, rank: int, stream: tuple[int, int], channels: int) -> Place | None:
        """Control blocks and slots of another rank's (group, stream); None while it has not opened it."""
        memory, known = self.host_peers.memory(rank), self._opened_by.setdefault(rank, {})
        directory = directory_of(memory)
        for number in range(len(known), min(directory[0], DIRECTORY_ENTRIES)):
            entry = 1 + number * _ENTRY_WORDS
            group, opened, blocks, slots = directory[entry : entry + _ENTRY_WORDS]
            known[group, opened] = blocks, slots
        place = known.get((_signed(stream[0]), stream[1]))
        if place is None:
            return None
        blocks, slots = place
        return memory[blocks : blocks + channels * BLOCK_BYTES], memory[slots : slots + channels * SLOT_BYTES]

    def sign(self, text: str) -> Signature:
        """A signature that peers can read, as long as somebody holds what this returns. Raises GroupClosedError."""
        with self._lock:
            self._check_open()
            found = self._signatures.get(text)
            if found is None:
                raw = text.encode()[:_TEXT_BYTES]
                offset, place = self.allocate(8 + len(raw))
                place[:8].view(np.int64)[0] = len(raw)
                place[8 : 8 + len(raw)] = np.frombuffer(raw, np.uint8)
                digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
                found = self._signatures[text] = Signature(text, digest, offset, place)
        return found

    def read_text(self, rank: int, offset: int) -> str:
        """The text of another rank's signature."""
        memory = self.host_peers.memory(rank)
        if offset % 8 or not 0 < offset <= memory.size - 8:
            return "an operation that it does not name"
        length = min(max(int(memory[offset : offset + 8].view(np.int64)[0]), 0), _TEXT_BYTES)
        return bytes(memory[offset + 8 : offset + 8 + length]).decode(errors="replace")


class Viewer(Protocol):
    """A prepared call that caches views of shared memory."""

    def forget(self, channel: Channel) -> None:
        """Drops those that it needs for this channel."""


class Bank:
    """The channels of one stream.

    Attributes:
        control: this rank's control blocks.
        stream: its group and number.
        peers: world ranks of the others, in group order.
        channels: in order; none after `close`.
        pending_checks: `SignatureCheck.settle` of the operations whose calls have not been compared with those of all peers
            yet, by the start value of their progress words.
    """

    def __init__(
        self, control: ControlBlocks, stream: tuple[int, int], ranks: Sequence[int], channels: int, own: Place
    ) -> None:
        self.control = control
        self.stream = stream
        self.peers = tuple(rank for rank in ranks if rank != control.rank)
        memories = [control.host_peers.memory(peer) for peer in self.peers]
        self.channels = [Channel(self, number, memories, _block(own, number)) for number in range(channels)]
        self.pending_checks: dict[int, Callable[[], bool]] = {}
        self._ranks = tuple(ranks)
        self._places = {control.rank: own}

    def close(self) -> None:
        """Lets go of its memory, which operations in flight keep until they end."""
        for channel in self.channels:
            channel.forget_views()
        self.channels, self._places = [], {}
        self.pending_checks.clear()

    def meet(self) -> Steps:
        """Waits until every peer has opened this stream, then gives the channels the control blocks and slots of all ranks."""
        places, channels = self._places, self.channels  # `close` leaves these as they are
        while not self._has_found_all(places, len(channels)):
            yield 0
        for channel in channels:
            channel.slots = [_slot(places[rank], channel.number) for rank in self._ranks]
            channel.others = [_block(places[peer], channel.number) for peer in self.peers]

    def _has_found_all(self, places: dict[int, Place], channels: int) -> bool:
        """Looks for all peers that have not been seen here, and not just for the first, so that others are not blamed."""
        for peer in self.unseen():
            place = self.control.find(peer, self.stream, channels)
            if place is not None:
                places[peer] = place
        return len(places) == len(self._ranks)

    def unseen(self) -> list[int]:
        """World ranks of the peers that have not opened this stream, as far as this rank has looked."""
        return [peer for peer in self.peers if peer not in self._places]

    def is_unused(self) -> bool:
        """Whether no rank is in an operation of this stream any more.

        Peers read nothing of a channel that this rank has never used except its control block, which stays.
        """
        return all(channel.last == 0 or channel.is_free(channel.last) for channel in self.channels)

    def free(self) -> None:
        """Frees slots and rings at once, also where somebody keeps a channel."""
        for channel in self.channels:
            channel.slots, channel.ring = [], _NOTHING
        self.close()

    def settle(self) -> None:
        """Compares with the peers that have come so far. If checks remain, the stream's next operations settle them.

        Raises:
            CollectiveMismatchError: a peer was in another call.
        """
        for base in list(self.pending_checks):  # another thread may add to them or remove some
            settle = self.pending_checks.get(base)
            if settle is not None and settle():
                self.pending_checks.pop(base, None)
        if self.pending_checks:
            for channel in self.channels:
                channel.signed = 0

    def latest(self, peer: int) -> tuple[int, str]:
        """Ticket and signature of the operation that a peer has entered last; (0, "") before its first."""
        place, channels = self._places.get(peer), self.channels
        if place is None or not channels:
            return 0, ""
        block = max((_block(place, channel.number) for channel in channels), key=lambda block: block[STAGED])
        ticket = block[STAGED] >> CHUNK_BITS
        return (ticket, self.control.read_text(peer, block[TEXT])) if ticket > 0 else (0, "")


class Channel:
    """One rank's side of one channel.

    Attributes:
        bank: the channels of its stream.
        memories: the peers' segments, in the order of `bank.peers`.
        block: this rank's control block.
        others: the peers' control blocks, in the order of `bank.peers`; empty until all have opened the stream.
        slots: the memory of all ranks for small arrays, in group order; empty until then, too.
        last: the value of LEFT at the end of the latest operation started here.
        signed: the hash in the control block; 0: the next operation must publish its own, and settle pending checks.
        signed_by: the ticket of the operation that has published, or is about to publish, what it names.
        signatures: what this rank's control block names: the current call's, and those of its notes.
        noted: how many notes of calls this rank has made.
        ring: this rank's memory for what others cannot read in place.
        viewers: prepared calls that cache views of `slots` or `memories`.
    """

    __slots__ = (
        "bank",
        "block",
        "last",
        "memories",
        "noted",
        "number",
        "others",
        "ring",
        "signatures",
        "signed",
        "signed_by",
        "slots",
        "viewers",
    )

    def __init__(self, bank: Bank, number: int, memories: Sequence[Array], block: Words) -> None:
        self.bank = bank
        self.number = number
        self.memories = memories
        self.block = block
        self.others: list[Words] = []
        self.slots: list[Array] = []
        self.last = 0
        self.signed = 0
        self.signed_by = 0
        self.signatures: dict[int, Signature] = {}
        self.noted = 0
        self.ring = _NOTHING
        self.viewers: WeakSet[Viewer] = WeakSet()

    def is_free(self, before: int) -> bool:
        """Whether every rank, this one included, has left the operation that ended with this value of LEFT."""
        if self.block[LEFT] < before or not self.others:
            return False
        for other in self.others:  # noqa: SIM110  a generator for all() would cost every operation as much as its flags
            if other[LEFT] < before:
                return False
        return True

    def enter(self, before: int) -> Steps:
        """Waits until the channel is free."""
        if not self.others:
            yield from self.bank.meet()
        while not self.is_free(before):
            yield before

    def await_others(self, word: int, goal: int, places: Sequence[int] | None = None) -> Steps:
        """Waits until this word of all other ranks, or of those at these places among them, has reached `goal`."""
        for other in self.others if places is None else [self.others[place] for place in places]:
            while other[word] < goal:
                yield goal

    def widen(self, nbytes: int) -> None:
        """Makes the ring at least `nbytes` large. Only after `enter`."""
        if self.ring.size < nbytes:
            offset, self.ring = self.bank.control.allocate(nbytes)
            self.block[RING] = offset

    def forget_views(self) -> None:
        """Makes prepared calls drop what they cache."""
        for viewer in list(self.viewers):
            viewer.forget(self)

    def poison(self) -> None:
        """This rank's operation failed: what it published may change from now on, so peers must not use it."""
        self.block[STAGED] = POISONED


def _block(place: Place, channel: int) -> Words:
    return words_of(place[0][channel * BLOCK_BYTES : (channel + 1) * BLOCK_BYTES])


def _slot(place: Place, channel: int) -> Array:
    return place[1][channel * SLOT_BYTES : (channel + 1) * SLOT_BYTES]


def words_of(data: Array) -> Words:
    """Bytes as 64-bit words."""
    return memoryview(data.data).cast("q")


def directory_of(memory: Array) -> Words:
    """The directory in a segment."""
    return words_of(memory[CONTROL_OFFSET : CONTROL_OFFSET + _DIRECTORY_BYTES])


def _signed(group: int) -> int:
    """A group's id, which is an unsigned number of 64 bits, as a word."""
    return group - (1 << 64) if group >= 1 << 63 else group
