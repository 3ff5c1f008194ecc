"""Everything but all_reduce in shared memory: those who have something for others lay it out, those who need it read it.

Idea. Each rank that brings something puts a *table* into its ring, one entry for each part: where it lies, dtype, shape. The
parts follow. Small ones are there as a whole. Large ones come in *rounds*, a chunk of each part in every round: the ring has
SLOTS chunks of a part, which stay in the processor's cache, so an owner is ahead of its readers by that many rounds and then
waits for them. What lies in the segment already (`group.empty`) is not staged but read in place, and the operation then ends
only when all readers have left. Whoever needs parts waits for their owners one by one, and copies or folds what there is.

Source. One-sided publication as in Open MPI's components for XPMEM; the message-free counterpart of the direct algorithms in
algorithms/direct.py, with the same results bit for bit. Rounds are to it what chunks are to the large all_reduce.

Cost, in bytes that a rank moves: what it brings to others once to stage (not at all in registered memory), what it needs
once to copy or fold. Memory beyond the arrays: the ring, about RING_BYTES (among dozens of ranks SLOTS small chunks for each).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Final, NamedTuple

import numpy as np

from ferrorpc.collectives.arena.arena import Arena
from ferrorpc.collectives.arena.board import CHUNK_BITS, LEFT, RING, SIGNATURE, SOURCE, STAGED, Array, Channel, Wait
from ferrorpc.collectives.arena.doubts import UnreadCalls
from ferrorpc.collectives.arena.execution import Steps
from ferrorpc.collectives.arena.prepared import ArenaPrepared, fold_of
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.errors import CodecError
from ferrorpc.types import DType, TensorSpec

RING_BYTES: Final = 1 << 20
"""What a rank lays out as a whole, all its parts together. More comes in rounds, through as much memory."""
SLOTS: Final = 2
"""Rounds that an owner may be ahead of its readers."""
CHUNK_BYTES_MIN: Final = 16 << 10
"""A smaller chunk would cost more time to wait for than to copy."""
_PART_ROUNDS_MAX: Final = 1 << CHUNK_BITS - 2
_MAX_DIMENSIONS: Final = 32
_IN_ROUNDS: Final = 3 + _MAX_DIMENSIONS
_ENTRY_WORDS: Final = _IN_ROUNDS + 1
"""Offset, dtype, number of dimensions, dimensions, whether the part comes in rounds."""
_ALIGNMENT: Final = 64


class _Part(NamedTuple):
    """One part, on its way from one rank to another."""

    spec: TensorSpec
    length: int
    """Elements in all."""
    elements: Array
    """The elements, flat; in a ring SLOTS chunks of them."""
    chunk: int
    """Elements that come in a round."""
    in_ring: bool

    @property
    def rounds(self) -> int:
        """How many it takes; none where it has no elements."""
        return -(-self.length // self.chunk)

    def bounds(self, number: int) -> tuple[int, int]:
        """The elements [first, last) that come in a round; none after the last one."""
        first = min(number * self.chunk, self.length)
        return first, min(first + self.chunk, self.length)

    def piece(self, first: int, last: int) -> Array:
        """Elements [first, last), of one round."""
        begin = first // self.chunk % SLOTS * self.chunk if self.in_ring else first
        return self.elements[begin : begin + last - first]


class Exchange(ArenaPrepared):
    """Moves, and the reductions that end on one rank each."""

    chunks = (1 << CHUNK_BITS) - 1
    """More than any rounds: how many there are is not known to ranks that do not know the others' shapes."""

    def __init__(self, arena: Arena, call: Call) -> None:
        super().__init__(arena, call)
        rank, root, operation = arena.rank, call.root, call.operation
        to_root = operation in (Operation.GATHER, Operation.REDUCE)
        from_root = operation in (Operation.BROADCAST, Operation.SCATTER)
        self._brings = rank == root if from_root else not (to_root and rank == root)
        self._sources: tuple[int, ...] = tuple(range(arena.size))
        if from_root and root is not None:
            self._sources = (root,)
        elif to_root and rank != root:
            self._sources = ()
        self._unread = self._peers_that_none_reads(from_root)
        self._has_part_for_each = operation in (Operation.SCATTER, Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL)
        self._mine = rank if self._has_part_for_each else 0
        self._fold = fold_of(call, arena.size) if call.op is not None and self._sources else None
        if self._fold is not None:
            self.specs = [call.inputs[self._mine]]
        readers = (root,) if to_root and root is not None else range(arena.size)
        self._readers: frozenset[int] = frozenset(readers if self._brings else ())
        self._reader_places = [reader - (reader > rank) for reader in self._readers if reader != rank]
        self._owner_places = [source - (source > rank) for source in self._sources if source != rank]
        parts = max(arena.size - 1, 1) if self._has_part_for_each else 1
        self._chunk_bytes = max(RING_BYTES // (SLOTS * parts), CHUNK_BYTES_MIN) // _ALIGNMENT * _ALIGNMENT

    def _peers_that_none_reads(self, from_root: bool) -> frozenset[int]:
        """Whose call this rank must compare with its own some other way than by reading what they brought: their places.

        Each rank compares with the root that it knows, so all agree if the roots do.
        """
        rank, root = self.arena.rank, self.call.root
        if root is None or (root == rank) != from_root:
            return frozenset()
        return frozenset(range(self.arena.size - 1)) if from_root else frozenset((root - (root > rank),))

    def taken(self, peer: int) -> int:
        if peer not in self._readers:
            return 0
        spec = self.call.inputs[peer if self._has_part_for_each else 0]
        return math.prod(spec.shape) * spec.dtype.itemsize

    def steps(
        self, channel: Channel, before: int, base: int, inputs: Sequence[Array], outputs: Sequence[Array] | None
    ) -> Steps:
        line, done = channel.line, base | self.chunks
        yield from channel.enter(before)
        staged, must_stay = self._lay_out(channel, inputs) if self._brings else ([], False)
        self.sign(channel)
        bank = channel.bank
        if self._unread:
            signed = self._digest, self._text
            bank.doubts.append(UnreadCalls(channel, self._unread, base, signed, self.signature))
        yield from self._stage(channel, base, staged, 0)
        found: list[_Part] = []
        for source in self._sources:
            if source == self.arena.rank:
                found.append(self._own(inputs[self._mine]))
            else:
                found.append((yield from self._find(channel, source, base)))
        results, specs = self._results(found, outputs)
        flat = [result.reshape(-1) for result in results]
        self._land(found, flat, 0)
        for number in range(1, max([part.rounds for _, part in staged] + [part.rounds for part in found], default=0)):
            line[LEFT] = base + number
            yield from self._stage(channel, base, staged, number)
            yield from _await(channel, self._owner_places, STAGED, base + number + 1)
            self._land(found, flat, number)
        line[STAGED] = line[LEFT] = done
        if must_stay:
            yield from channel.await_others(LEFT, done)
        # What was read in place from a rank that failed meanwhile may not be what it brought: its line says so.
        yield from channel.await_others(STAGED, 0)
        if bank.doubts:
            bank.settle()
        return results, specs

    def _stage(self, channel: Channel, base: int, staged: Sequence[tuple[Array, _Part]], number: int) -> Wait:
        """Lays out what others read in a round, once they have read what lay there before."""
        if number >= SLOTS and staged:
            yield from _await(channel, self._reader_places, LEFT, base + number + 1 - SLOTS)
        for source, part in staged:
            first, last = part.bounds(number)
            if first < last:
                part.piece(first, last)[...] = source[first:last]
        channel.line[STAGED] = base + number + 1

    def _results(self, found: Sequence[_Part], outputs: Sequence[Array] | None) -> tuple[list[Array], list[TensorSpec]]:
        """Where the results go, and what they are: one, or one for each part."""
        specs = self.specs if self._fold is not None else [part.spec for part in found]
        return [self.room_for(item, spec, outputs) for item, spec in enumerate(specs)], specs

    def _land(self, found: Sequence[_Part], results: Sequence[Array], number: int) -> None:
        """Takes what came in a round: folds all of it into the one result, or copies each."""
        if self._fold is not None:
            first, last = min(found, key=lambda part: part.chunk).bounds(number)
            self._fold([part.piece(first, last) for part in found], results[0][first:last])
            return
        for result, part in zip(results, found, strict=True):
            first, last = part.bounds(number)
            if first < last:
                result[first:last] = part.piece(first, last)

    def _find(self, channel: Channel, source: int, base: int) -> Generator[int, None, _Part]:
        """What group rank `source` has for this one, once it has laid it out."""
        other = source - (source > self.arena.rank)
        line = channel.others[other]
        while line[STAGED] <= base:
            yield base + 1
        if line[SIGNATURE] != self._digest:
            raise self.mismatch(channel, base)
        return self._read(channel, other)

    def _own(self, array: Array) -> _Part:
        """What this rank has for itself: as it is, but in the rounds of others' parts, while the cache knows it."""
        spec, size = self.call.inputs[self._mine], array.nbytes
        chunk = self._chunk_of(size) // array.itemsize if size > RING_BYTES else max(array.size, 1)
        return _Part(spec, array.size, array.reshape(-1), chunk, in_ring=False)

    def _chunk_of(self, nbytes: int) -> int:
        """Bytes that come in a round of a part of so many: the same for all ranks."""
        return max(self._chunk_bytes, _padded(nbytes // _PART_ROUNDS_MAX))

    def _lay_out(self, channel: Channel, inputs: Sequence[Array]) -> tuple[list[tuple[Array, _Part]], bool]:
        """Puts the table into the ring, with room for what others cannot read in place.

        Returns:
            What has to be copied, and where to; whether this rank must wait until others have read its arrays.
        """
        locate = channel.bank.board.memory.own.locate
        skipped = self._mine if self._has_part_for_each else None
        sizes = [0 if item == skipped else part.nbytes for item, part in enumerate(inputs)]
        registered = [locate(part) if size else None for part, size in zip(inputs, sizes, strict=True)]
        copied = [size if known is None else 0 for size, known in zip(sizes, registered, strict=True)]
        is_large = sum(map(_padded, copied)) > RING_BYTES
        chunks = [self._chunk_of(size) if is_large and size > self._chunk_of(size) else 0 for size in copied]
        rooms = [SLOTS * chunk or _padded(size) for size, chunk in zip(copied, chunks, strict=True)]
        place = _padded(len(inputs) * _ENTRY_WORDS * 8)
        channel.widen(place + sum(rooms))
        ring, ring_offset = channel.ring, channel.line[RING]
        table = ring[: len(inputs) * _ENTRY_WORDS * 8].view(np.int64).reshape(-1, _ENTRY_WORDS)
        staged = []
        for item, (entry, part, spec) in enumerate(zip(table, inputs, self.call.inputs, strict=True)):
            known, chunk = registered[item], chunks[item]
            entry[0] = ring_offset + place if known is None else known
            entry[1], entry[2] = spec.dtype, len(spec.shape)
            entry[3 : 3 + len(spec.shape)] = spec.shape
            entry[_IN_ROUNDS] = chunk > 0
            if copied[item]:
                elements = ring[place : place + (SLOTS * chunk or part.nbytes)].view(part.dtype)
                to = _Part(spec, part.size, elements, chunk // part.itemsize or part.size, chunk > 0)
                staged.append((part.reshape(-1), to))
                place += rooms[item]
        channel.line[SOURCE] = ring_offset
        return staged, any(registered)

    def _read(self, channel: Channel, other: int) -> _Part:
        """The part of another rank that is for this one, as its table says.

        Raises:
            CodecError: it says what cannot be.
        """
        start = channel.others[other][SOURCE] + self._mine * _ENTRY_WORDS * 8
        words = self.part(channel, other, start, _ENTRY_WORDS * 8).view(np.int64).tolist()
        offset, number, dimensions, *shape, in_rounds = words
        try:
            dtype = DType(number)
        except ValueError:
            dimensions = -1
        shape = shape[:dimensions] if 0 <= dimensions <= _MAX_DIMENSIONS else [-1]
        if min(shape, default=0) < 0:
            name = channel.bank.peers[other]
            raise CodecError(f"rank {name} describes its part of {self.signature} in a way that no rank does")
        spec, count = TensorSpec(dtype, tuple(shape)), math.prod(shape)
        if self._fold is not None and spec != self.specs[0]:
            raise CodecError(f"rank {channel.bank.peers[other]} brought {spec} to {self.signature}")
        chunk = self._chunk_of(count * dtype.itemsize) if in_rounds else 0
        data = self.part(channel, other, offset, SLOTS * chunk or count * dtype.itemsize)
        return _Part(spec, count, data.view(dtype.storage), chunk // dtype.itemsize or max(count, 1), chunk > 0)


def _await(channel: Channel, places: Sequence[int], word: int, goal: int) -> Wait:
    """Waits until this word of these peers has come so far."""
    for place in places:
        line = channel.others[place]
        while line[word] < goal:
            yield goal


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
