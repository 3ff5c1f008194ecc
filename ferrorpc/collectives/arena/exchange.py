"""Everything but all_reduce in shared memory: those who have something for others lay it out, those who need it read it.

Idea. Each rank that brings something puts a *table* into its ring, one entry for each part: where it lies, dtype, shape. The
parts themselves follow, unless they lie in the segment already (`group.empty`): those are read in place, and the operation
then ends only when all readers have left. Whoever needs parts waits for their owners one by one, and copies or folds them.
Otherwise owners never wait for readers: the ring is used again only a few operations later.

Source. One-sided publication as in Open MPI's components for XPMEM; the message-free counterpart of the direct algorithms in
algorithms/direct.py, with the same results bit for bit.

Cost, in bytes that a rank moves: what it brings to others once to stage (not at all in registered memory), what it needs
once to copy or fold. Memory beyond the arrays: what is staged.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Final

import numpy as np

from ferrorpc.collectives.arena.arena import Arena
from ferrorpc.collectives.arena.board import LEFT, RING, SIGNATURE, SOURCE, STAGED, Array, Channel
from ferrorpc.collectives.arena.doubts import UnreadCalls
from ferrorpc.collectives.arena.execution import Steps
from ferrorpc.collectives.arena.prepared import ArenaPrepared, fold_of
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.errors import CodecError
from ferrorpc.types import DType, TensorSpec

KEPT_RING_BYTES: Final = 2 << 20
"""A larger ring is freed at the end of its operation, which then waits for its readers."""
_MAX_DIMENSIONS: Final = 32
_ENTRY_WORDS: Final = 3 + _MAX_DIMENSIONS
"""Offset, dtype, number of dimensions, dimensions."""
_ALIGNMENT: Final = 64


class Barrier(ArenaPrepared):
    """Nobody leaves before everyone has entered: a word from each."""

    def taken(self, peer: int) -> int:
        return 0

    def steps(
        self, channel: Channel, before: int, base: int, inputs: Sequence[Array], outputs: Sequence[Array] | None
    ) -> Steps:
        line, done, digest = channel.line, base | 1, self._digest
        in_doubt = False
        if channel.signed != digest or not channel.is_free(before):
            yield from channel.enter(before)
            in_doubt = self.sign(channel)
        line[STAGED] = done
        for other in channel.others:
            while other[STAGED] < done:
                yield done
            if other[SIGNATURE] != digest:
                raise self.mismatch(channel, base)
        if in_doubt:
            channel.bank.settle()
        line[LEFT] = done
        return None


class Exchange(ArenaPrepared):
    """Moves, and the reductions that end on one rank each."""

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
        self._readers = frozenset((root,) if to_root else range(arena.size)) if self._brings else frozenset()

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
        line, done = channel.line, base | 1
        yield from channel.enter(before)
        must_stay = self._brings and self._lay_out(channel, inputs)
        self.sign(channel)
        bank = channel.bank
        if self._unread:
            signed = self._digest, self._text
            bank.doubts.append(UnreadCalls(channel, self._unread, base, signed, self.signature))
        line[STAGED] = done
        found: list[tuple[Array, TensorSpec]] = []
        for source in self._sources:
            if source == self.arena.rank:
                found.append((inputs[self._mine], self.call.inputs[self._mine]))
            else:
                found.append((yield from self._find(channel, source, done)))
        landed = self._land(found, outputs)
        line[LEFT] = done
        if must_stay:
            yield from channel.await_others(LEFT, done)
            if channel.ring.size > KEPT_RING_BYTES:
                channel.ring = np.empty(0, np.uint8)
        # What was read in place from a rank that failed meanwhile may not be what it brought: its line says so.
        yield from channel.await_others(STAGED, 0)
        if bank.doubts:
            bank.settle()
        return landed

    def _find(self, channel: Channel, source: int, done: int) -> Generator[int, None, tuple[Array, TensorSpec]]:
        """What group rank `source` has for this one, where it lies, once it has laid it out."""
        other = source - (source > self.arena.rank)
        line = channel.others[other]
        while line[STAGED] < done:
            yield done
        if line[SIGNATURE] != self._digest:
            raise self.mismatch(channel, done)
        return self._read(channel, other)

    def _land(
        self, found: Sequence[tuple[Array, TensorSpec]], outputs: Sequence[Array] | None
    ) -> tuple[list[Array], list[TensorSpec]]:
        """The results: everything that was found folded into one, or a copy of each."""
        if self._fold is not None:
            results = self.room(outputs)
            self._fold([part.reshape(-1) for part, _ in found], results[0].reshape(-1))
            return results, self.specs
        specs = [spec for _, spec in found]
        results = [self.room_for(item, spec, outputs) for item, spec in enumerate(specs)]
        for result, (part, _) in zip(results, found, strict=True):
            if result is not part:
                result[...] = part
        return results, specs

    def _lay_out(self, channel: Channel, inputs: Sequence[Array]) -> bool:
        """Puts the table, and the parts that others cannot read in place, into the ring.

        Returns:
            Whether this rank must wait until they have been read.
        """
        locate = channel.bank.board.memory.own.locate
        skipped = self._mine if self._has_part_for_each else None
        nbytes = [0 if item == skipped else part.nbytes for item, part in enumerate(inputs)]
        registered = [locate(part) if size else None for part, size in zip(inputs, nbytes, strict=True)]
        place = _padded(len(inputs) * _ENTRY_WORDS * 8)
        channel.widen(place + sum(_padded(size) for size, known in zip(nbytes, registered, strict=True) if known is None))
        ring, ring_offset = channel.ring, channel.line[RING]
        table = ring[: len(inputs) * _ENTRY_WORDS * 8].view(np.int64).reshape(-1, _ENTRY_WORDS)
        for entry, part, spec, size, known in zip(table, inputs, self.call.inputs, nbytes, registered, strict=True):
            entry[0] = ring_offset + place if known is None else known
            entry[1], entry[2] = spec.dtype, len(spec.shape)
            entry[3 : 3 + len(spec.shape)] = spec.shape
            if size and known is None:
                ring[place : place + size].view(part.dtype)[...] = part.reshape(-1)
                place += _padded(size)
        channel.line[SOURCE] = ring_offset
        return any(registered) or ring.size > KEPT_RING_BYTES

    def _read(self, channel: Channel, other: int) -> tuple[Array, TensorSpec]:
        """The part of another rank that is for this one, where it lies, and what it says it is.

        Raises:
            CodecError: it says what cannot be.
        """
        start = channel.others[other][SOURCE] + self._mine * _ENTRY_WORDS * 8
        offset, number, dimensions, *shape = self.part(channel, other, start, _ENTRY_WORDS * 8).view(np.int64).tolist()
        try:
            dtype = DType(number)
        except ValueError:
            dimensions = -1
        shape = shape[:dimensions] if 0 <= dimensions <= _MAX_DIMENSIONS else [-1]
        if min(shape, default=0) < 0:
            name = channel.bank.peers[other]
            raise CodecError(f"rank {name} describes its part of {self.signature} in a way that no rank does")
        spec = TensorSpec(dtype, tuple(shape))
        if self._fold is not None and spec != self.specs[0]:
            raise CodecError(f"rank {channel.bank.peers[other]} brought {spec} to {self.signature}")
        data = self.part(channel, other, offset, math.prod(shape) * dtype.itemsize)
        return data.view(dtype.storage).reshape(spec.shape), spec


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
