"""The GPU memory and events that a rank shares, and those of its peers that it has open."""

from __future__ import annotations

from ferrorpc.arrays.device import Device
from ferrorpc.backends.cuda_ipc.control_block import BASE, SLOTS, ControlBlock, events_of, got, left, sent, staged
from ferrorpc.errors import NcclError


class Own:
    """This rank's slab and events, which it writes into its control block.

    The slab: SLOTS slots of `slot_bytes` that all ranks read, then SLOTS slots of `message_bytes` for each rank.

    Raises:
        NcclError: the GPU lacks the memory, or cannot share it.
    """

    def __init__(self, device: Device, block: ControlBlock, size: int, slot_bytes: int, message_bytes: int) -> None:
        self.words = block.words
        self._device = device
        self._ipc = ipc = device.ipc
        self.base = 0
        self.events: list[int] = []
        size_bytes = SLOTS * (slot_bytes + size * message_bytes)
        with device.here():
            try:
                self.base = ipc.allocate(size_bytes)
                block.set_slab(self.base, ipc.memory_handle(self.base))
                for number in range(events_of(size)):
                    self.events.append(ipc.new_event())
                    block.set_event(number, self.events[-1], ipc.event_handle(self.events[-1]))
            except ipc.error_class as problem:
                self.close()
                raise NcclError(f"cannot share {size_bytes >> 20} MiB of the GPU's memory: {problem}") from None

    def settle(self) -> None:
        """Blocks the host until the GPU has reached every event that this rank has recorded."""
        with self._device.here():
            for event in self.events:
                self._ipc.settle(event)

    def close(self) -> None:
        """Frees the slab and the events."""
        with self._device.here():
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

    Raises:
        NcclError: its memory cannot be opened.
    """

    def __init__(self, device: Device, block: ControlBlock, rank: int, own_rank: int, is_here: bool) -> None:
        self.rank = rank
        self.words = block.words
        self._device = device
        self._ipc = ipc = device.ipc
        self._is_here = is_here
        self._block = block
        self.base = 0
        self._opened: list[int] = []
        """Events that were opened here."""
        with device.here():
            try:
                self.base = block.words[BASE] if is_here else ipc.open_memory(block.handle())
                self.staged = [self._event(staged(slot, phase)) for slot in range(SLOTS) for phase in range(2)]
                self.left = [self._event(left(slot)) for slot in range(SLOTS)]
                self.sent = [self._event(sent(own_rank, slot)) for slot in range(SLOTS)]
                self.got = [self._event(got(own_rank, slot)) for slot in range(SLOTS)]
            except ipc.error_class as problem:
                self.close()
                raise NcclError(f"cannot open the GPU memory of group rank {rank}: {problem}") from None

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
        with self._device.here():
            for event in self._opened:
                self._ipc.destroy_event(event)
            if self.base:
                self._ipc.close_memory(self.base)
