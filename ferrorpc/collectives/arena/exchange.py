"""Everything but all_reduce and barrier in shared memory: senders publish their parts, receivers read them.

Idea. Each rank that sends something publishes a *table* with an entry for each part: where it lies, dtype, shape. The parts
follow. If everything fits the channel's slot, it goes there; slots do not move and tables repeat, so nothing is computed again
in the next call. Otherwise it goes to the ring: small parts whole, large ones in *rounds*, a chunk of each part in every round.
The ring holds SLOTS chunks of a part, which stay in the processor's cache: an owner runs ahead of its readers by that many
rounds, then waits for them. What lies in the segment already (`group.empty`) is not staged but read in place, and the operation
then ends only when all readers have left. A receiver waits for the owners of its parts one by one, and copies or folds them.

Source. One-sided publication as in Open MPI's components for XPMEM. It is the shared-memory counterpart of the direct
algorithms in algorithms/direct.py, with the same results bit for bit. Rounds correspond to the chunks of the large all_reduce.

Cost, in bytes that a rank moves: what it sends once to stage (nothing in registered memory), what it receives once to copy or
fold. Memory beyond the arrays: the ring, about RING_BYTES (among dozens of ranks SLOTS small chunks for each).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from ferrorpc.collectives.arena.arena import Arena
from ferrorpc.collectives.arena.control_blocks import (
    CHUNK_BITS,
    LEFT,
    RING,
    SIGNATURE,
    SLOT_BYTES,
    SOURCE,
    STAGED,
    Array,
    Channel,
    Steps,
    words_of,
)
from ferrorpc.collectives.arena.execution import Outcome
from ferrorpc.collectives.arena.prepared import ArenaPrepared, Claim, fold_of
from ferrorpc.collectives.arena.signature_check import SignatureCheck
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.workspace import room_for
from ferrorpc.errors import CodecError
from ferrorpc.types import DType, TensorSpec
from ferrorpc.wire.frames import NDIM_MAX

RING_BYTES: Final = 1 << 20
"""The most that a rank publishes at once, all its parts together. Larger parts come in rounds, through as much memory."""
SLOTS: Final = 2
"""How many rounds an owner may be ahead of its readers."""
CHUNK_BYTES_MIN: Final = 16 << 10
"""A smaller chunk would cost more time to wait for than to copy."""
_PART_ROUNDS_MAX: Final = 1 << CHUNK_BITS - 2
_IN_ROUNDS: Final = 3 + NDIM_MAX
_ENTRY_WORDS: Final = _IN_ROUNDS + 1
"""Offset, dtype, number of dimensions, dimensions, whether the part comes in rounds."""
_ENTRY_BYTES: Final = _ENTRY_WORDS * 8
_ALIGNMENT: Final = 64
PARTS_MAX: Final = 1024
"""Parts of peers that a call caches: one for each rank and channel, and more where shapes differ or rings move."""


class _Part(NamedTuple):
    """One part, from one rank to another."""

    spec: TensorSpec
    length: int
    """Elements in all."""
    chunk: int
    """Elements of a round; all of them, and at least 1, where the part comes whole."""
    elements: Array
    """The elements, flat; in a ring SLOTS chunks of them."""
    whole: Array | None
    """The elements in the part's shape; None in a ring."""

    @property
    def rounds(self) -> int:
        """How many rounds it takes; 0 where it has no elements."""
        return -(-self.length // self.chunk)

    def bounds(self, number: int) -> tuple[int, int]:
        """The elements [first, last) of a round; none after the last one."""
        first = min(number * self.chunk, self.length)
        return first, min(first + self.chunk, self.length)

    def piece(self, first: int, last: int) -> Array:
        """Elements [first, last), of one round."""
        begin = first // self.chunk % SLOTS * self.chunk if self.whole is None else first
        return self.elements[begin : begin + last - first]


class _Place(NamedTuple):
    """The place of a part that has to be staged, as an offset in the slot or the ring."""

    item: int
    """Which of the call's parts."""
    offset: int
    nbytes: int
    chunk_bytes: int
    """Bytes of a round; 0 where the part comes whole."""


class _SlotLayout(NamedTuple):
    """The places of small parts in the slot of a channel."""

    start: int
    """Offset of the slot in this rank's segment."""
    table: memoryview[int]
    """The table with its offsets."""
    front: memoryview[int]
    """The memory of the table in the slot."""
    stages: list[tuple[int, Array]]
    """For each of the call's parts that is sent: its index, and its memory in the slot, in its shape."""


class Exchange(ArenaPrepared):
    """Moves, and the reductions that end on one rank each."""

    chunks = (1 << CHUNK_BITS) - 1
    """More than any number of rounds, which ranks that do not know the peers' shapes do not know."""

    def __init__(self, arena: Arena, call: Call) -> None:
        super().__init__(arena, call)
        rank = arena.rank
        self._readers, sources = self._partners()
        self._sends = bool(self._readers)
        self._reader_places = [reader - (reader > rank) for reader in self._readers if reader != rank]
        self._owner_places = [source - (source > rank) for source in sources if source != rank]
        self._own_place = sources.index(rank) if rank in sources else None
        # A rank compares the calls of those whose parts it reads with its own. The others must be checked otherwise.
        unread = [place for place in self._reader_places if place not in self._owner_places]
        self._check = SignatureCheck(unread, self._signed) if unread else None
        self._has_part_for_each = call.operation in (Operation.SCATTER, Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL)
        self._mine = rank if self._has_part_for_each else 0
        self._fold = fold_of(call, arena.size) if call.op is not None and sources else None
        if self._fold is not None:
            self.specs = [call.inputs[self._mine]]
        parts = max(arena.size - 1, 1) if self._has_part_for_each else 1
        self._chunk_bytes = max(RING_BYTES // (SLOTS * parts), CHUNK_BYTES_MIN) // _ALIGNMENT * _ALIGNMENT
        self._places, self._room_bytes = self._plan() if self._sends else ([], 0)
        self._fits_slot = self._room_bytes <= SLOT_BYTES and not any(place.chunk_bytes for place in self._places)
        self._slot_layouts: dict[Channel, _SlotLayout] = {}
        self._entry_offset = self._mine * _ENTRY_BYTES
        self._parts: dict[tuple[int, bytes], _Part] = {}
        self._table = self._describe()

    def _partners(self) -> tuple[Sequence[int], Sequence[int]]:
        """The ranks that read this rank's parts, and those whose parts it takes; itself is one where it keeps a part."""
        everyone, root = range(self.arena.size), self.call.root
        if root is None:
            return everyone, everyone
        is_root = root == self.arena.rank
        if self.call.operation in (Operation.BROADCAST, Operation.SCATTER):
            return everyone if is_root else (), (root,)
        return () if is_root else (root,), everyone if is_root else ()

    def _plan(self) -> tuple[list[_Place], int]:
        """The places of the parts for other ranks, behind the table; and the size of everything."""
        sizes = [spec.nbytes for spec in self.call.inputs]
        if self._has_part_for_each:
            sizes[self._mine] = 0
        is_large = sum(map(_padded, sizes)) > RING_BYTES
        offset, places = _padded(len(sizes) * _ENTRY_BYTES), []
        for item, nbytes in enumerate(sizes):
            if nbytes:
                chunk = self._chunk_of(nbytes)
                places.append(_Place(item, offset, nbytes, chunk if is_large and nbytes > chunk else 0))
                offset += SLOTS * places[-1].chunk_bytes or _padded(nbytes)
        return places, offset

    def _describe(self) -> memoryview[int]:
        """The table without the offsets, which differ from run to run."""
        table = np.zeros((len(self.call.inputs), _ENTRY_WORDS), np.int64)
        for entry, spec in zip(table, self.call.inputs, strict=True):
            entry[1], entry[2] = spec.dtype, len(spec.shape)
            entry[3 : 3 + len(spec.shape)] = spec.shape
        return words_of(table.reshape(-1).view(np.uint8))

    def _own_part(self, inputs: Sequence[Array]) -> _Part:
        """The part that this rank has for itself. Where it is large it is processed in the rounds of the other parts."""
        spec, whole = self.call.inputs[self._mine], inputs[self._mine]
        chunk = self._chunk_of(spec.nbytes) // spec.dtype.itemsize if spec.nbytes > RING_BYTES else max(whole.size, 1)
        return _Part(spec, whole.size, chunk, whole.reshape(-1), whole)

    def _chunk_of(self, nbytes: int) -> int:
        """Bytes of a round, for a part of `nbytes`: the same on all ranks."""
        return max(self._chunk_bytes, _padded(nbytes // _PART_ROUNDS_MAX))

    def taken(self, peer: int) -> int:
        if peer not in self._readers:
            return 0
        return self.call.inputs[peer if self._has_part_for_each else 0].nbytes

    def steps(self, claim: Claim, inputs: Sequence[Array], outputs: Sequence[Array] | None, found: list[Outcome]) -> Steps:
        channel, before, base = claim
        block, digest, done = channel.block, self._digest, base | self.chunks
        if not channel.is_free(before):
            yield from channel.enter(before)
        staged, must_stay = self._begin(channel, base, inputs)
        specs: list[TensorSpec] = []
        wholes: list[Array] = []
        in_rounds = bool(staged)
        for place in self._owner_places:
            owner = channel.others[place]
            while owner[STAGED] <= base:
                yield base + 1
            if owner[SIGNATURE] != digest:
                raise self.mismatch(channel, base)
            part = self._read(channel, place)
            specs.append(part.spec)
            if part.whole is None:
                in_rounds = True
            else:
                wholes.append(part.whole)
        if in_rounds:
            yield from self._take_in_rounds(channel, base, staged, inputs, outputs, found)
        else:
            found.append(self._take_whole(specs, wholes, inputs, outputs))
        block[STAGED] = block[LEFT] = done
        while not self._may_end(channel, done, must_stay):
            yield done
        if channel.bank.pending_checks:
            channel.bank.settle()

    def _begin(self, channel: Channel, base: int, inputs: Sequence[Array]) -> tuple[Sequence[tuple[Array, _Part]], bool]:
        """Publishes what this rank sends, and its call.

        Returns:
            The large parts with their sources, whose first round is staged; whether this rank must wait until peers have
            read its arrays.
        """
        staged: Sequence[tuple[Array, _Part]] = ()
        must_stay = False
        if self._sends and self._fits_slot:
            start, table, front, stages = self._slot_layouts.get(channel) or self._lay_out_slot(channel)
            front[:] = table
            for item, place in stages:
                place[...] = inputs[item]
            channel.block[SOURCE] = start
        elif self._sends:
            staged, must_stay = self._publish(channel, inputs)
        if channel.signed != self._digest:
            self.publish_signature(channel, base)
        if self._check is not None:
            self._check.note(channel, base)
        channel.block[STAGED] = base + 1
        return staged, must_stay

    def _take_whole(
        self, specs: list[TensorSpec], wholes: list[Array], inputs: Sequence[Array], outputs: Sequence[Array] | None
    ) -> Outcome:
        """Folds or copies parts of which all elements are here. `specs`, `wholes`: of the peers' parts."""
        if self._own_place is not None:
            specs.insert(self._own_place, self.call.inputs[self._mine])
            wholes.insert(self._own_place, inputs[self._mine])
        if self._fold is not None:
            results = outputs or self.new_results()
            self._fold([_flat(whole) for whole in wholes], _flat(results[0]))
            return results, self.specs
        if outputs is None:
            return [whole.copy() for whole in wholes], specs
        results = outputs
        for item, whole in enumerate(wholes):
            given = outputs[item]
            if given is whole:
                continue
            if given.shape == whole.shape and given.dtype == whole.dtype:
                given[...] = whole
            else:
                results = [*results[:item], whole.copy(), *results[item + 1 :]]
        return results, specs

    def _may_end(self, channel: Channel, done: int, must_stay: bool) -> bool:
        """Whether peers have read what must stay, and none has failed: what was read in place from a rank that failed meanwhile
        may not be what it brought."""
        for other in channel.others:  # noqa: SIM110  as in `Channel.is_free`
            if other[STAGED] < 0 or (must_stay and other[LEFT] < done):
                return False
        return True

    def _take_in_rounds(
        self,
        channel: Channel,
        base: int,
        staged: Sequence[tuple[Array, _Part]],
        inputs: Sequence[Array],
        outputs: Sequence[Array] | None,
        found: list[Outcome],
    ) -> Steps:
        """Stages and takes round after round. All ranks have staged the first already."""
        block = channel.block
        parts = [self._read(channel, place) for place in self._owner_places]
        if self._own_place is not None:
            parts.insert(self._own_place, self._own_part(inputs))
        specs = [part.spec for part in parts] if self._fold is None else self.specs
        results = [room_for(outputs, item, spec) for item, spec in enumerate(specs)]
        flat = [result.reshape(-1) for result in results]
        self._land(parts, flat, 0)
        for number in range(1, max(part.rounds for part in (*parts, *(part for _, part in staged)))):
            block[LEFT] = base + number
            if number >= SLOTS and staged:
                yield from channel.await_others(LEFT, base + number + 1 - SLOTS, self._reader_places)
            for source, part in staged:
                _stage(source, part, number)
            block[STAGED] = base + number + 1
            yield from channel.await_others(STAGED, base + number + 1, self._owner_places)
            self._land(parts, flat, number)
        found.append((results, specs))

    def _land(self, parts: Sequence[_Part], results: Sequence[Array], number: int) -> None:
        """Takes the elements of a round. A reduction has equal rounds from all ranks, except from those whose part is whole."""
        alike = None if self._fold is None else min(parts, key=lambda part: part.chunk).bounds(number)
        bounds = [alike or part.bounds(number) for part in parts]
        pieces = [part.piece(*each) for part, each in zip(parts, bounds, strict=True)]
        if self._fold is not None:
            self._fold(pieces, results[0][slice(*bounds[0])])
            return
        for result, piece, (first, last) in zip(results, pieces, bounds, strict=True):
            result[first:last] = piece

    def _publish(self, channel: Channel, inputs: Sequence[Array]) -> tuple[Sequence[tuple[Array, _Part]], bool]:
        """Publishes in the ring: the table, and of what peers cannot read in place small parts and the first round of large
        ones. Returns as `_begin`."""
        locate = channel.bank.control.host_peers.own.locate
        channel.widen(self._room_bytes)
        ring, start = channel.ring, channel.block[RING]
        table = words_of(ring[: len(self._table) * 8])
        table[:] = self._table
        staged, must_stay = [], False
        for item, offset, nbytes, chunk in self._places:
            source, entry = inputs[item].reshape(-1), item * _ENTRY_WORDS
            known = locate(source)
            if known is not None:
                table[entry], must_stay = known, True
                continue
            table[entry] = start + offset
            place = ring[offset : offset + (SLOTS * chunk or nbytes)].view(source.dtype)
            if chunk:
                table[entry + _IN_ROUNDS] = 1
                part = _Part(self.call.inputs[item], source.size, chunk // source.itemsize, place, None)
                staged.append((source, part))
                _stage(source, part, 0)
            else:
                place[...] = source
        channel.block[SOURCE] = start
        return staged, must_stay

    def _lay_out_slot(self, channel: Channel) -> _SlotLayout:
        """The layout of this call's small parts in the slot of a channel."""
        slot = channel.slots[self.arena.rank]
        start = channel.bank.control.host_peers.own.locate(slot)
        assert start is not None, "a slot lies in its rank's segment"
        table = words_of(np.array(self._table).view(np.uint8))
        stages = []
        for item, offset, nbytes, _ in self._places:
            spec = self.call.inputs[item]
            table[item * _ENTRY_WORDS] = start + offset
            stages.append((item, slot[offset : offset + nbytes].view(spec.dtype.storage).reshape(spec.shape)))
        found = self._slot_layouts[channel] = _SlotLayout(start, table, words_of(slot[: table.nbytes]), stages)
        channel.viewers.add(self)
        return found

    def forget(self, channel: Channel) -> None:
        """Drops the layout for a channel's slots, and the parts of peers: each of these is found again."""
        self._slot_layouts.pop(channel, None)
        self._parts.clear()

    def _read(self, channel: Channel, place: int) -> _Part:
        """The part of a peer for this rank, from the peer's table, or from the cache if the entry is a known one.

        Raises:
            CodecError: the entry is invalid.
        """
        start = channel.others[place][SOURCE] + self._entry_offset
        text = channel.memories[place][start : start + _ENTRY_BYTES].tobytes()
        return self._parts.get((place, text)) or self._learn(channel, place, start)

    def _learn(self, channel: Channel, place: int, start: int) -> _Part:
        """The part that an entry at an offset in a peer's segment describes. Raises CodecError if it is invalid."""
        text = self.part(channel, place, start, _ENTRY_BYTES).tobytes()
        offset, number, dimensions, *shape, in_rounds = memoryview(text).cast("q").tolist()
        try:
            dtype = DType(number)
        except ValueError:
            dimensions = -1
        shape = shape[:dimensions] if 0 <= dimensions <= NDIM_MAX else [-1]
        if min(shape, default=0) < 0:
            name = channel.bank.peers[place]
            raise CodecError(f"rank {name} describes its part of {self.signature} in a way that no rank does")
        spec, length = TensorSpec(dtype, tuple(shape)), math.prod(shape)
        if self._fold is not None and spec != self.specs[0]:
            raise CodecError(f"rank {channel.bank.peers[place]} brought {spec} to {self.signature}")
        nbytes = length * dtype.itemsize
        chunk = self._chunk_of(nbytes) if in_rounds else 0
        elements = self.part(channel, place, offset, SLOTS * chunk or nbytes).view(dtype.storage)
        if len(self._parts) >= PARTS_MAX:
            self._parts.clear()
        channel.viewers.add(self)
        found = self._parts[place, text] = _Part(
            spec, length, chunk // dtype.itemsize or max(length, 1), elements, None if chunk else elements.reshape(shape)
        )
        return found


def _flat(array: Array) -> Array:
    """The array itself if it has one dimension, because a view of it would cost as much as a copy of 1 KiB."""
    return array if array.ndim == 1 else array.reshape(-1)


def _stage(source: Array, part: _Part, number: int) -> None:
    """Stages the elements of a part that peers read in a round."""
    first, last = part.bounds(number)
    part.piece(first, last)[...] = source[first:last]


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
