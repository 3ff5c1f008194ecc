"""Ranks that share memory, all in one thread: their operations are advanced in turns that a seed decides."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import numpy as np

from ferrorpc.collectives.arena.arena import Arena
from ferrorpc.collectives.arena.control_blocks import Bank, ControlBlocks
from ferrorpc.collectives.arena.execution import Outcome
from ferrorpc.collectives.arena.prepared import ArenaPrepared
from ferrorpc.collectives.arena.select import prepare
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.transports.shared_memory.segment import NONCE_BYTES, Segment, map_peer
from ferrorpc.types import DType, ReduceOp, TensorSpec

Array = np.ndarray
SEGMENT_BYTES = 64 << 20


class SharedMemory:
    """One rank's view of the segments of all, as neighbours have it: only its own can be written."""

    def __init__(self, rank: int, segments: Sequence[Segment], nonce: bytes) -> None:
        self.rank = rank
        self.ranks = tuple(range(len(segments)))
        self.own = segments[rank]
        self._memories = []
        for peer, segment in enumerate(segments):
            if peer == rank:
                self._memories.append(segment.memory)
                continue
            descriptor = segment.read_only_descriptor()
            self._memories.append(map_peer(descriptor, segment.size_bytes, nonce))
            os.close(descriptor)

    def memory(self, rank: int) -> Array:
        return self._memories[rank]


class Running:
    """One rank's part of an operation."""

    def __init__(self, prepared: ArenaPrepared, bank: Bank, number: int, inputs, outputs=None) -> None:
        self.prepared = prepared
        claim = prepared.claim(bank, number)
        self.channel = claim[0]
        self.found: list[Outcome] = []
        self.steps = prepared.steps(claim, inputs, outputs, self.found)
        self.results: list[Array] | None = None
        self.specs = None
        self.error: BaseException | None = None

    @property
    def over(self) -> bool:
        return self.results is not None or self.error is not None

    def advance(self) -> None:
        if self.over:
            return
        try:
            next(self.steps)
        except StopIteration:
            self.results, self.specs = self.found[0]
        except Exception as error:
            self.error = error


class SharedWorld:
    """`size` ranks. A context manager: leaving it closes the segments."""

    def __init__(self, size: int, seed: int = 0) -> None:
        nonce = bytes(range(NONCE_BYTES))
        self.size = size
        self.chance = random.Random(seed)
        self.segments = [Segment(f"test-{rank}", nonce, SEGMENT_BYTES) for rank in range(size)]
        self.memories = [SharedMemory(rank, self.segments, nonce) for rank in range(size)]
        controls = [ControlBlocks(memory) for memory in self.memories]
        self.arenas = [Arena(control, None, 0, range(size), lambda ranks: "") for control in controls]
        self.number = 0

    def __enter__(self) -> SharedWorld:
        return self

    def __exit__(self, *_: object) -> None:
        for segment in self.segments:
            segment.close()

    def begin(self, rank: int, call: Call, inputs, outputs=None, *, number: int, stream: int = 0) -> Running:
        """Starts one rank's part of operation `number`."""
        prepared = prepare(self.arenas[rank], call)
        assert prepared is not None
        return Running(prepared, self.arenas[rank].bank(stream), number, inputs, outputs)

    def advance(self, running: Sequence[Running], limit: int = 100_000) -> bool:
        """Advances operations in random turns until all are over; False when they are not after so many."""
        left = [part for part in running if not part.over]
        for _ in range(limit):
            if not left:
                return True
            part = self.chance.choice(left)
            part.advance()
            if part.over:
                left.remove(part)
        return False

    def run(self, calls: Sequence[Call], inputs, outputs=None) -> list[list[Array]]:
        """The next operation in program order on every rank; each rank's results."""
        self.number += 1
        running = [
            self.begin(rank, call, inputs[rank], outputs and outputs[rank], number=self.number)
            for rank, call in enumerate(calls)
        ]
        assert self.advance(running), "the operation never ends"
        for part in running:
            if part.error is not None:
                raise part.error
        return [part.results for part in running]


def own(world: SharedWorld, rank: int, array: Array) -> Array:
    """The array in its rank's shared memory."""
    place = world.memories[rank].own.empty(array.shape, array.dtype)
    place[...] = array
    return place


def all_reduce_call(dtype: DType, count: int, op: ReduceOp = ReduceOp.SUM) -> Call:
    return Call(Operation.ALL_REDUCE, (TensorSpec(dtype, (count,)),), op)
