"""The shared-memory operations of one group: the channels they run on, and the answers to peers' probes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ferrorpc.collectives.arena.control_blocks import CHUNK_BITS, STAGED, TEXT, Bank, ControlBlocks
from ferrorpc.collectives.execution import Describe
from ferrorpc.transports.base import Transport
from ferrorpc.transports.mailbox import CallRecord
from ferrorpc.wire.frames import Key

PROGRAM_CHANNELS: Final = 4
"""Operations in program order that may be in flight at once; the next waits for the oldest."""


class Arena:
    """Shared-memory operations of one group, all of whose ranks share a host.

    Args:
        control: this rank's control in this generation.
        transport: lanes to the same ranks, over which peers that it waits for are probed.
        group: the group's id.
        ranks: world rank of each group rank.
    """

    def __init__(
        self, control: ControlBlocks, transport: Transport, group: int, ranks: Sequence[int], describe: Describe
    ) -> None:
        self.control = control
        self.transport = transport
        self.describe = describe
        self.polling = control.polling
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.rank = self.ranks.index(control.rank)
        self._group = group
        self._channels: dict[int, int] = {}
        """Of streams that are not opened yet, where it is not PROGRAM_CHANNELS."""

    def open_stream(self, stream: int, channels: int) -> None:
        """Sets the number of channels of a stream, before its first operation. The default is PROGRAM_CHANNELS."""
        self._channels[stream] = channels

    def let_go(self, stream: int) -> None:
        """This rank starts no operation of the stream any more; its memory is freed later. A finaliser may call it."""
        self._channels.pop(stream, None)
        self.control.let_go(self._group, stream)

    def close(self) -> None:
        """This rank starts no operation of this group any more."""
        for stream in self.control.streams_of(self._group):
            self.let_go(stream)

    def bank(self, stream: int) -> Bank:
        """The channels of a stream."""
        return self.control.bank(self._group, stream, self.ranks, self._channels.get(stream, PROGRAM_CHANNELS))

    def entered(self, key: Key) -> CallRecord:
        """The answer to a peer's probe: this rank's call with that key, and the last one it entered.

        A call is known until the next one on its channel, which does not begin before every rank has left it.
        """
        bank = self.control.opened(self._group, key.stream)
        channels = None if bank is None else bank.channels
        if bank is None or not channels:
            return CallRecord(None, 0, "")
        number, signature = bank.latest(self.control.rank)
        channel = channels[key.number % len(channels)]
        offset, ticket = channel.block[TEXT], key.number + 1
        known = channel.block[STAGED] >> CHUNK_BITS == ticket >= channel.signed_by
        text = self.control.read_text(self.control.rank, offset) if known else None
        return CallRecord(text, max(number - 1, 0), signature)
