"""The base of the shared-memory algorithms: a call prepared for a group whose ranks all share memory."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from ferrorpc.arrays.device import is_host
from ferrorpc.collectives.arena.arena import Arena
from ferrorpc.collectives.arena.control_blocks import CHUNK_BITS, POISONED, SIGNATURE, STAGED, TEXT, Array, Bank, Channel, Steps
from ferrorpc.collectives.arena.execution import ArenaExecution, Outcome
from ferrorpc.collectives.arena.signature_check import mismatch
from ferrorpc.collectives.call import Call
from ferrorpc.collectives.device_transfers import DeviceTransfers, transfers_for
from ferrorpc.collectives.execution import Execution, Prepared
from ferrorpc.errors import CodecError, CollectiveMismatchError, UsageError
from ferrorpc.generation_errors import links_closed
from ferrorpc.guard import Guard
from ferrorpc.kernels.reduction import kernel
from ferrorpc.types import TensorSpec
from ferrorpc.wire.frames import Key

Claim: TypeAlias = tuple[Channel, int, int]
"""The place of an operation: its channel, the value of LEFT at the end of the previous operation there, and the start value of
its own progress words."""


class ArenaPrepared(Prepared):
    """A prepared call of one group. Subclasses are the algorithms.

    Attributes:
        chunks: the final value of LEFT.
        signature: of the call.
    """

    chunks = 1
    runs = 0
    """How many times it was run. Bytes are computed from that, since counting them costs every operation time."""

    def __init__(self, arena: Arena, call: Call) -> None:
        self.arena = arena
        self.call = call
        self.signature = call.signature
        self._signed = arena.control.sign(self.signature)
        self._digest = self._signed.digest
        arena.control.calls.add(self)
        self.specs: list[TensorSpec] = []

    @abstractmethod
    def taken(self, peer: int) -> int:
        """Payload bytes that group rank `peer` reads from this rank's memory in one run."""

    def given_bytes(self) -> dict[int, int]:
        """World rank of a peer -> bytes it has read in all runs so far."""
        if not self.runs:
            return {}
        arena = self.arena
        return {rank: self.runs * self.taken(peer) for peer, rank in enumerate(arena.ranks) if peer != arena.rank}

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.runs and not is_finalizing():  # then modules may be gone, and nobody asks any more
            self.arena.control.calls.forget(self)

    @abstractmethod
    def steps(self, claim: Claim, inputs: Sequence[Array], outputs: Sequence[Array] | None, found: list[Outcome]) -> Steps:
        """The operation on one rank.

        Args:
            inputs: C-contiguous arrays in storage dtypes.
            outputs: arrays for results, used where they fit; None for new arrays.
            found: gets the outcome. A generator that returned it would need a fifth of a microsecond for that.
        """

    def claim(self, bank: Bank, number: int) -> Claim:
        """Claims the channel of an operation.

        Raises:
            UsageError: a later operation has claimed it already, so the ranks' order would differ.
            GroupClosedError: the group was closed.
        """
        channels = bank.channels
        if not channels:
            raise links_closed(self.arena.control.rank)
        channel = channels[number % len(channels)]
        base = number + 1 << CHUNK_BITS
        before, last = channel.last, base | self.chunks
        if last <= before:
            raise UsageError(
                f"operation {number} of this stream starts after operation {(before >> CHUNK_BITS) - 1} of the same channel",
                hint=f"start operations with equal number % {len(channels)} in ascending order, each once",
            )
        channel.last = last
        self.runs += 1
        return channel, before, base

    def start(self, key: Key, inputs: Sequence[Any], outputs: Sequence[Any] | None, guard: Guard) -> Execution:
        transfers = transfers_for(inputs, None, 0)
        if outputs is not None and not all(map(is_host, outputs)):
            outputs = None
        claim = self.claim(self.arena.bank(key.stream), key.number)
        found: list[Outcome] = []
        steps = self.steps(claim, inputs if transfers is None else transfers.inputs, outputs, found)
        if transfers is not None:
            steps = _after_downloads(transfers, steps)
        return ArenaExecution(self.arena, self.call, key, claim[0], steps, guard, found, transfers)

    def new_results(self) -> list[Array]:
        """Arrays for results whose specs follow from the call."""
        return [np.empty(spec.shape, spec.dtype.storage) for spec in self.specs]

    def publish_signature(self, channel: Channel, base: int) -> bool:
        """Publishes the call's signature in the control block. After `enter`, and before STAGED is raised.

        Args:
            base: of the operation's progress words.

        Returns:
            Whether checks of earlier calls are pending. An operation that waits for every peer settles them then.

        Raises:
            CollectiveMismatchError: a peer was in another call than this rank in an earlier operation.
        """
        if channel.signed == self._digest:
            return False
        channel.signed_by = base >> CHUNK_BITS
        channel.block[SIGNATURE], channel.block[TEXT] = self._digest, self._signed.offset
        channel.signed, channel.signatures[TEXT] = self._digest, self._signed
        if channel.bank.pending_checks:
            channel.bank.settle()
        return bool(channel.bank.pending_checks)

    def compare(self, channel: Channel, base: int) -> None:
        """Raises CollectiveMismatchError if a peer that has staged is in another call."""
        digest = self._digest
        for other in channel.others:
            if other[SIGNATURE] != digest:
                raise self.mismatch(channel, base)

    def part(self, channel: Channel, peer: int, offset: int, nbytes: int) -> Array:
        """Bytes of a peer's segment. `peer`: its place among the others.

        Raises:
            CodecError: they are outside of the segment.
        """
        memory = channel.memories[peer]
        if offset < 0 or offset + nbytes > memory.size:
            name = channel.bank.peers[peer]
            raise CodecError(f"rank {name} says that its part of {self.signature} lies at {offset}, outside its memory")
        return memory[offset : offset + nbytes]

    def mismatch(self, channel: Channel, base: int) -> CollectiveMismatchError:
        """The mismatch error of this operation. A peer that has not come yet is left out: its control block is older.

        Args:
            base: of this operation's progress words. The channel may have a later operation already, which waits.
        """
        control, ticket = self.arena.control, base >> CHUNK_BITS
        signatures = {control.rank: self.signature}
        for peer, other in zip(channel.bank.peers, channel.others, strict=True):
            is_behind = POISONED < other[STAGED] < ticket << CHUNK_BITS
            if other[SIGNATURE] != self._digest and not is_behind:
                signatures[peer] = control.read_text(peer, other[TEXT])
        return mismatch(signatures, ticket - 1)


def _after_downloads(transfers: DeviceTransfers, steps: Steps) -> Steps:
    """An operation that begins once all of its inputs are on the host."""
    while not transfers.has_all_inputs:
        yield transfers.position
    yield from steps


def fold_of(call: Call, size: int) -> Callable[[Sequence[Array], Array], None]:
    """The kernel that folds the arrays of all ranks, in rank order, into one."""
    assert call.op is not None, f"{call.signature} reduces nothing"
    return kernel(call.op, call.inputs[0].dtype, size).reduce
