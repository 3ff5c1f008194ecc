"""all_reduce in shared memory, in rank order: every rank folds the others' arrays where they lie.

Idea. A small array (`select` has the limit) is copied by every rank to its slot, and every rank folds all of them into its own
result: one wait. A large one is cut into chunks that fit the cache, and each chunk into a slice a rank: stage a chunk, fold
one's own slice of it, copy the others' slices. The ring holds two chunks, so that staging runs ahead of copying. An array that
lies in the segment already (`group.empty`) is not staged but read in place, which the others have done when they have folded
their last slices. A result written to such an array is copied from there, and the operation ends when the others have done so:
the caller may then write to it again. An array on a GPU is staged as its chunks arrive on the host, and a result for a GPU is
copied there chunk by chunk.

Source. The symmetric and the distributed form of DeepSpeed's all_reduce for CPUs (2024). Chunking, reading in place and the
fixed order of the fold are added here.

Cost, in bytes that a rank moves for n bytes on p ranks: one_shot n to stage and p n to fold; two_shot 2 n (p-1)/p to stage and
copy and n to fold; in registered memory n (p-1)/p to copy and n to fold. Memory beyond the arrays: the ring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from ferrorpc.collectives.algorithms.partition import slices
from ferrorpc.collectives.arena.arena import Arena
from ferrorpc.collectives.arena.control_blocks import (
    LEFT,
    REDUCED,
    RESULT,
    RING,
    SIGNATURE,
    SOURCE,
    STAGED,
    Array,
    Channel,
    Steps,
)
from ferrorpc.collectives.arena.execution import ArenaExecution, Outcome
from ferrorpc.collectives.arena.prepared import ArenaPrepared, Claim, fold_of
from ferrorpc.collectives.call import Call
from ferrorpc.collectives.device_transfers import DeviceTransfers, transfers_for
from ferrorpc.collectives.execution import Execution
from ferrorpc.guard import Guard
from ferrorpc.wire.frames import Key

CHUNK_BYTES: Final = 1 << 20
RING_CHUNKS: Final = 2

_Place: TypeAlias = tuple[Array, bool]
"""The elements of an array, or of a ring that its chunks come through, and whether it is a ring."""


class OneShot(ArenaPrepared):
    """The algorithm for small arrays. Caches views of all slots, so that a call creates none."""

    def __init__(self, arena: Arena, call: Call) -> None:
        super().__init__(arena, call)
        spec = call.inputs[0]
        self.specs = [spec]
        self._nbytes = spec.nbytes
        self._is_flat = len(spec.shape) == 1
        self._fold = fold_of(call, arena.size)
        self._views: dict[Channel, tuple[Array, list[Array]]] = {}

    def taken(self, peer: int) -> int:
        return self._nbytes

    def steps(self, claim: Claim, inputs: Sequence[Array], outputs: Sequence[Array] | None, found: list[Outcome]) -> Steps:
        channel, before, base = claim
        block, done, digest = channel.block, base | 1, self._digest
        checks_pending = False
        if not channel.is_free(before):
            yield from channel.enter(before)
        stage, sources = self._views.get(channel) or self._look(channel)
        source = inputs[0]
        stage[...] = source if self._is_flat else source.reshape(-1)
        if channel.signed != digest:
            checks_pending = self.publish_signature(channel, base)
        block[STAGED] = done
        for other in channel.others:
            while other[STAGED] < done:
                yield done
            if other[SIGNATURE] != digest:
                raise self.mismatch(channel, base)
        if checks_pending:
            channel.bank.settle()
        results = outputs or self.new_results()
        self._fold(sources, results[0] if self._is_flat else results[0].reshape(-1))
        block[LEFT] = done
        found.append((results, self.specs))

    def _look(self, channel: Channel) -> tuple[Array, list[Array]]:
        """Views of this rank's slot, and of all slots in rank order."""
        sources = [slot[: self._nbytes].view(self.specs[0].dtype.storage) for slot in channel.slots]
        found = self._views[channel] = sources[self.arena.rank], sources
        channel.viewers.add(self)
        return found

    def forget(self, channel: Channel) -> None:
        """Drops the views of a channel's slots."""
        self._views.pop(channel, None)


class TwoShot(ArenaPrepared):
    """The algorithm for large arrays."""

    def __init__(self, arena: Arena, call: Call) -> None:
        super().__init__(arena, call)
        spec = call.inputs[0]
        self.specs = [spec]
        self.storage = spec.dtype.storage
        self.count = math.prod(spec.shape)
        self.chunk = CHUNK_BYTES // spec.dtype.itemsize
        self.fold = fold_of(call, arena.size)
        self.chunks = -(-self.count // self.chunk)

    def taken(self, peer: int) -> int:
        """The slice of this rank's array that the peer folds, and the slice that this rank has folded."""
        cuts = slices(self.count, self.arena.size)
        return sum(last - first for first, last in (cuts[peer], cuts[self.arena.rank])) * self.storage.itemsize

    def start(self, key: Key, inputs: Sequence[Any], outputs: Sequence[Any] | None, guard: Guard) -> Execution:
        transfers = transfers_for(inputs, outputs, 1, in_place=0)
        if transfers is None:
            return super().start(key, inputs, outputs, guard)
        place = transfers.host_memory(0, self.specs[0])
        here = [each for each in transfers.outputs or () if each is not None] if place is None else [place]
        claim = self.claim(self.arena.bank(key.stream), key.number)
        found: list[Outcome] = []
        steps = self.steps(claim, transfers.inputs, here, found, transfers)
        return ArenaExecution(self.arena, self.call, key, claim[0], steps, guard, found, transfers)

    def steps(
        self,
        claim: Claim,
        inputs: Sequence[Array],
        outputs: Sequence[Array] | None,
        found: list[Outcome],
        transfers: DeviceTransfers | None = None,
    ) -> Steps:
        channel, before, base = claim
        yield from channel.enter(before)
        results = outputs or self.new_results()
        run = _TwoShotRun(self, channel, inputs[0].reshape(-1), results[0].reshape(-1))
        block, chunks = channel.block, self.chunks
        self.publish_signature(channel, base)
        yield from self._wait_for_input(transfers, 0)
        staged = block[STAGED] = base + (chunks if run.source_offset else run.stage(0))
        for chunk in range(chunks):
            passed = base + chunk + 1
            yield from channel.await_others(STAGED, passed)
            if not chunk:
                self.compare(channel, base)
                run.look()
            run.reduce(chunk)
            block[REDUCED] = passed
            if staged == passed < base + chunks:
                if chunk:
                    yield from channel.await_others(LEFT, passed - 1)
                yield from self._wait_for_input(transfers, chunk + 1)
                staged = block[STAGED] = base + run.stage(chunk + 1)
            yield from channel.await_others(REDUCED, passed)
            run.copy(chunk)
            block[LEFT] = passed
            if transfers is not None:
                transfers.allow_upload(0, results[0], chunk * self.chunk, min((chunk + 1) * self.chunk, self.count))
        if run.result_offset:
            yield from channel.await_others(LEFT, base + chunks)
        # What was read in place from a rank that failed meanwhile may not be what it brought: its control block says so.
        yield from channel.await_others(STAGED, base + chunks)
        found.append((results, self.specs))

    def _wait_for_input(self, transfers: DeviceTransfers | None, chunk: int) -> Steps:
        """Waits until a chunk has been copied from a device."""
        while transfers is not None and transfers.downloaded(0) < min((chunk + 1) * self.chunk, self.count):
            yield transfers.position


class _TwoShotRun:
    """The memory of one operation.

    Attributes:
        source_offset: offset of this rank's array in its segment; 0 where it has to be staged.
        result_offset: offset of this rank's result; 0 where it goes through the ring.
    """

    def __init__(self, prepared: TwoShot, channel: Channel, source: Array, result: Array) -> None:
        locate = channel.bank.control.host_peers.own.locate
        self.source_offset, self.result_offset = locate(source) or 0, locate(result) or 0
        if not (self.source_offset and self.result_offset):
            channel.widen(RING_CHUNKS * CHUNK_BYTES)
        channel.block[SOURCE], channel.block[RESULT] = self.source_offset, self.result_offset
        self._prepared = prepared
        self._channel = channel
        self._rank = prepared.arena.rank
        self._source, self._result = (source, False), (result, False)
        self._ring = channel.ring.view(prepared.storage), True
        self._sources: list[_Place] = []
        self._results: list[_Place] = []

    def look(self) -> None:
        """Finds the arrays of the peers, once they have staged."""
        channel, prepared = self._channel, self._prepared
        for peer, block in enumerate(channel.others):
            for places, offset in ((self._sources, block[SOURCE]), (self._results, block[RESULT])):
                nbytes = prepared.count * prepared.storage.itemsize if offset else RING_CHUNKS * CHUNK_BYTES
                memory = prepared.part(channel, peer, offset or block[RING], nbytes)
                places.append((memory.view(prepared.storage), not offset))
        self._sources.insert(self._rank, self._source)

    def stage(self, chunk: int) -> int:
        """Copies to the ring what peers read of a chunk. Returns how many chunks are staged now."""
        source, ring = self._elements(self._source, chunk), self._elements(self._ring, chunk)
        for rank, (first, last) in enumerate(self._cuts(chunk)):
            if rank != self._rank:
                ring[first:last] = source[first:last]
        return chunk + 1

    def reduce(self, chunk: int) -> None:
        """Folds this rank's slice of a chunk, and puts it where the peers read it."""
        first, last = self._cuts(chunk)[self._rank]
        sources = [self._elements(place, chunk)[first:last] for place in self._sources]
        result = self._elements(self._result, chunk)[first:last]
        if self.result_offset:
            self._prepared.fold(sources, result)
        else:
            shared = self._elements(self._ring, chunk)[first:last]
            self._prepared.fold(sources, shared)
            result[...] = shared

    def copy(self, chunk: int) -> None:
        """Copies the slices that the peers have folded."""
        result, cuts = self._elements(self._result, chunk), self._cuts(chunk)
        del cuts[self._rank]
        for place, (first, last) in zip(self._results, cuts, strict=True):
            result[first:last] = self._elements(place, chunk)[first:last]

    def _cuts(self, chunk: int) -> list[tuple[int, int]]:
        """Each rank's slice of a chunk, counted from its first element."""
        prepared = self._prepared
        return slices(min(prepared.chunk, prepared.count - chunk * prepared.chunk), prepared.arena.size)

    def _elements(self, place: _Place, chunk: int) -> Array:
        """The elements from the first one of a chunk on."""
        elements, is_ring = place
        return elements[(chunk % RING_CHUNKS if is_ring else chunk) * self._prepared.chunk :]
