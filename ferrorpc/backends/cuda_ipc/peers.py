"""The GPU memory and events that a rank shares, those of its peers that it has open, and how both end.

CUDA does not say what becomes of memory or events that their owner frees while others have them open. So a rank that has closed
those of the others says so in its control block, and frees its own once all others have said so, or after some time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ferrorpc.arrays.device import Device
from ferrorpc.backends.cuda_ipc.control_block import BASE, CLOSED, NAME, SLOTS, ControlBlock, events_of, got, left, sent, staged
from ferrorpc.backends.device.freeing import FREEING
from ferrorpc.errors import NcclError
from ferrorpc.guard import Clock

POLL_SECONDS: Final = 5e-3
ALIGN_BYTES: Final = 256
"""Slots are multiples, and have as much for each rank at least."""


class Own:
    """This rank's slab and events, which it writes into its control block.

    The slab, which is laid out alike on all ranks: SLOTS slots of `slot_bytes` that all ranks read, then SLOTS slots of
    `message_bytes` for each rank.

    Args:
        rank, size: this group rank, and how many there are.
        asked_bytes: the least size of a slot. Messages to single ranks share a quarter of it.
    """

    def __init__(self, device: Device, block: ControlBlock, rank: int, size: int, asked_bytes: int) -> None:
        self.rank = rank
        self.size = size
        self.slot_bytes = _rounded(max(asked_bytes, size * ALIGN_BYTES))
        self.message_bytes = _rounded(self.slot_bytes // 4 // size)
        self.words = block.words
        self._block = block
        self._device = device
        self._ipc = device.ipc
        self.base = 0
        self.events: list[int] = []

    def messages_begin(self, rank: int) -> int:
        """The offset in a slab of the slots for messages to a rank."""
        return SLOTS * (self.slot_bytes + rank * self.message_bytes)

    def put_up(self) -> None:
        """Allocates all of it.

        Raises:
            NcclError: the GPU lacks the memory, or cannot share it.
        """
        ipc, block, size_bytes = self._ipc, self._block, self.messages_begin(self.size)
        with self._device.beside_captures():
            try:
                self.base = ipc.allocate(size_bytes)
                block.set_slab(self.base, ipc.memory_handle(self.base))
                for number in range(events_of(self.size)):
                    self.events.append(ipc.new_event())
                    block.set_event(number, self.events[-1], ipc.event_handle(self.events[-1]))
            except ipc.error_class as problem:
                raise NcclError(f"cannot share {size_bytes >> 20} MiB of the GPU's memory: {problem}") from None

    def mark(self, stream: int) -> None:
        """Makes `settle` wait for everything that is in a stream now, such as reads with no event behind them."""
        self._ipc.record(self.events[sent(self.rank, 0)], stream)  # a spare one: no rank sends to itself

    def settle(self) -> None:
        """Blocks the host until the GPU has reached every event that this rank has recorded."""
        with self._device.beside_captures():
            for event in self.events:
                self._ipc.settle(event)

    def close(self) -> None:
        """Frees the slab and the events."""
        with self._device.beside_captures():
            for event in self.events:
                self._ipc.destroy_event(event)
            if self.base:
                self._ipc.free(self.base)


class Peer:
    """A peer's memory and events, as this rank has them open.

    Args:
        rank: group rank of the peer.
        own_rank: that of this one.
        is_here: whether it is a thread of this process: then its addresses are valid here, and nothing is opened.
    """

    def __init__(self, device: Device, block: ControlBlock, rank: int, own_rank: int, is_here: bool) -> None:
        self.rank = rank
        self.words = block.words
        self._name = block.words[NAME]
        self._own_rank = own_rank
        self._device = device
        self._ipc = device.ipc
        self._is_here = is_here
        self._block = block
        self.base = 0
        self._opened: list[int] = []
        """Events that were opened here."""

    def open(self) -> None:
        """Opens its memory and events.

        Raises:
            NcclError: they cannot be opened.
        """
        with self._device.beside_captures():
            try:
                self.base = self.words[BASE] if self._is_here else self._ipc.open_memory(self._block.handle())
                self.staged = [self._event(staged(slot, phase)) for slot in range(SLOTS) for phase in range(2)]
                self.left = [self._event(left(slot)) for slot in range(SLOTS)]
                self.sent = [self._event(sent(self._own_rank, slot)) for slot in range(SLOTS)]
                self.got = [self._event(got(self._own_rank, slot)) for slot in range(SLOTS)]
            except self._ipc.error_class as problem:
                raise NcclError(f"cannot open the GPU memory of group rank {self.rank}: {problem}") from None

    @property
    def has_closed(self) -> bool:
        """Whether it has closed this rank's memory. It has, too, where its control block is gone."""
        return bool(self.words[CLOSED]) or self.words[NAME] != self._name

    def _event(self, number: int) -> int:
        event, handle = self._block.event(number)
        if not self._is_here:
            event = self._ipc.open_event(handle)
            self._opened.append(event)
        return event

    def close(self) -> None:
        """Closes what was opened. The GPU must be past everything that this rank has queued on it."""
        if self._is_here:
            return
        with self._device.beside_captures():
            for event in self._opened:
                self._ipc.destroy_event(event)
            if self.base:
                self._ipc.close_memory(self.base)


def part(own: Own, peers: Sequence[Peer], clock: Clock, seconds: float) -> None:
    """Closes what the peers share. Frees what this rank shares once they have closed that, or after so many seconds.

    The GPU must be past everything that this rank has queued on it.
    """
    with FREEING.begun() as may_run:
        for peer in peers if may_run else ():
            peer.close()
    own.words[CLOSED] = 1
    until, parker = clock.now() + seconds, clock.parker()
    while not all(peer.has_closed for peer in peers) and clock.now() < until:
        parker.park(clock.now() + POLL_SECONDS)
    with FREEING.begun() as may_run:
        if may_run:
            own.close()


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
