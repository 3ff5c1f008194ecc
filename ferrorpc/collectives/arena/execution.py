"""A running shared-memory operation. Nobody wakes it: its driver polls it (`Execution.polling`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ferrorpc.collectives.arena.arena import Arena
from ferrorpc.collectives.arena.control_blocks import LEFT, REDUCED, STAGED, Array, Channel, Steps
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.device_transfers import DeviceTransfers
from ferrorpc.collectives.execution import Execution, deadline_error, describe_absent, hint_about
from ferrorpc.errors import FerroError
from ferrorpc.generation_errors import describe_lost_link
from ferrorpc.guard import Guard
from ferrorpc.types import TensorSpec
from ferrorpc.wire.frames import Key

Outcome: TypeAlias = tuple[Sequence[Array], list[TensorSpec]]
"""Results and their specs."""


class ArenaExecution(Execution):
    """One run of a call.

    Args:
        steps: the operation.
        found: where it puts its outcome.
        transfers: copies its arrays where some are on a device.
    """

    def __init__(
        self,
        arena: Arena,
        call: Call,
        key: Key,
        channel: Channel,
        steps: Steps,
        guard: Guard,
        found: list[Outcome],
        transfers: DeviceTransfers | None = None,
    ) -> None:
        self.guard = guard
        self.transfers = transfers
        self.device = None if transfers is None else transfers.device
        self.results: list[Array] = []
        self.specs: list[TensorSpec] = []
        self.polling = arena.polling
        self._arena = arena
        self._call = call
        self._key = key
        self._channel = channel
        self._steps = steps
        self._found = found
        self._failure: BaseException | None = None
        self._complete = False
        self._reached = 0
        self._entered = False

    @property
    def queue(self) -> object:
        return self if self.transfers is not None else self._channel  # copies from a device begin before the operation

    @property
    def label(self) -> str:
        return f"{self._call.signature} #{self._key.number}"

    def begin_failed(self, error: BaseException) -> None:
        self._failure = error

    def advance(self) -> bool:
        if self._failure is not None:
            raise self._failure
        if self.transfers is None:
            return self._advance_on_host()
        over = self.transfers.advance(self, self._advance_on_host)
        self.position = self._reached + self.transfers.position
        return over

    def _advance_on_host(self) -> bool:
        if not self._complete:
            try:
                self.position = self._reached = next(self._steps)
            except StopIteration:
                results, self.specs = self._found[0]
                self.results = list(results)
                self._complete = True
        return self._complete

    def make_stream_wait(self) -> None:
        if self.transfers is not None:
            self.transfers.make_stream_wait()

    @property
    def _waits_for_own_gpu(self) -> bool:
        return self.transfers is not None and self.transfers.waits_for_gpu

    def waiting_on(self) -> list[int]:
        if self._waits_for_own_gpu:
            return []
        channel = self._channel
        peers = channel.bank.peers
        lost = self._arena.transport.lost().keys() & peers  # what they wrote last does not tell that they have ended
        return sorted({*(self._behind() if channel.others else channel.bank.unseen()), *lost}) or list(peers)

    def _behind(self) -> list[int]:
        """World ranks of the peers that have not come as far as this rank has and needs, else those behind the furthest one."""
        channel, needed = self._channel, self._reached
        peers = list(zip(channel.bank.peers, channel.others, strict=True))
        for word in (STAGED, REDUCED, LEFT):
            reached = min(channel.block[word], needed)
            behind = [peer for peer, other in peers if other[word] < reached]
            if behind:
                return behind
        furthest = max(other[STAGED] for _, other in peers)
        return [peer for peer, other in peers if other[STAGED] < furthest]

    def probe(self) -> None:
        """Probes over the lanes: a peer may be in a call that sends messages, or dead."""
        transport, signature = self._arena.transport, self._call.signature
        if not self._entered:
            self._entered = True
            transport.mailbox.enter(self._key, signature, self.wake)
        for peer in self.waiting_on():
            transport.probe(peer, self._key, signature)

    def explain(self) -> str:
        if self._waits_for_own_gpu:
            return f"{self.label} waits for this rank's own GPU"
        bank, lost = self._channel.bank, self._arena.transport.lost()
        parts = []
        for rank in self.waiting_on():
            ticket, signature = bank.latest(rank)
            if rank in lost:
                parts.append(f"rank {rank} ({describe_lost_link(lost[rank])})")
            elif ticket > self._key.number:
                parts.append(f"rank {rank} (is in it too)")
            else:
                parts.append(describe_absent(rank, signature, ticket - 1))
        return f"{self.label} waits for {', '.join(parts)}"

    def timeout_error(self) -> FerroError:
        is_barrier = self._call.operation is Operation.BARRIER
        hint = hint_about(self.waiting_on(), self._arena.transport)
        return deadline_error(self, self._arena.describe, barrier=is_barrier, hint=hint)

    def finish(self) -> None:
        self._failure = None  # its traceback refers to this execution: a reference cycle would keep the arrays alive
        self._steps.close()
        if not self._complete:
            self._channel.poison()
        if self._entered:
            self._entered = False
            self._arena.transport.mailbox.leave(self._key)
        if self.transfers is not None:
            self.transfers.finish()
