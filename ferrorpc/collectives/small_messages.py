"""Messages of one chunk without an execution: a send that its lane takes at once, a recv whose message is here or comes soon.

An execution, its driver and its deadline cost several times as much as such a message. So send and recv are tried here first.
What has to wait for anything takes the general path (point_to_point.py), which finds everything as if this had not been tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ferrorpc.arrays.device import is_host
from ferrorpc.collectives.driver import unexpected
from ferrorpc.collectives.point_to_point import SEND, SendQueues, label_of_recv, label_of_send
from ferrorpc.guard import Latch, wake_nobody
from ferrorpc.transports.base import Transport
from ferrorpc.transports.credit import CHUNK_BYTES
from ferrorpc.transports.point_to_point import PostedReceive
from ferrorpc.types import TensorSpec
from ferrorpc.wire.frames import POINT_TO_POINT, Frame, Header, Key

Array = np.ndarray[Any, Any]


class SmallMessages:
    """Those of one group.

    Args:
        transport: its lanes.
        group: its id.
        world_ranks: world rank of each group rank.
        queues: its sends that have not begun.
        latch: of the generation.
    """

    def __init__(
        self,
        transport: Transport,
        group: int,
        world_ranks: Sequence[int],
        queues: SendQueues,
        latch: Latch,
    ) -> None:
        self.transport = transport
        self.group = group
        self.world_ranks = world_ranks
        self.latch = latch
        self._queues = queues

    def send(self, data: Array, spec: TensorSpec, dst: int, tag: int) -> bool:
        """Sends an array to a group rank. False, and nothing was sent, where it must take the general path.

        Args:
            data: C-contiguous, in storage dtype; on the host or on a device.

        Raises:
            Exception: of the lane, or of a signal handler. Nobody knows whether it was sent.
        """
        if not is_host(data) or data.nbytes > CHUNK_BYTES:
            return False
        peer = self.world_ranks[dst]
        number = self._queues.number_at_once(peer, tag)
        if number == 0:
            return False
        header = Header(tag, SEND, spec.dtype, spec.shape, data.nbytes)
        payload = data.reshape(-1).view(np.uint8) if data.size else None
        return self.transport.send(peer, Key(self.group, POINT_TO_POINT, number), header, 0, payload, wake_nobody)

    def label_of_send(self, spec: TensorSpec, dst: int, tag: int) -> str:
        """The text for a send to a group rank."""
        return label_of_send(spec, self.world_ranks[dst], tag)


class SmallReceive(PostedReceive):
    """One recv from a group rank. Whoever gives it up, for whatever reason, calls `put_back`."""

    __slots__ = ("_mailbox", "_messages")

    def __init__(self, messages: SmallMessages, src: int, tag: int) -> None:
        super().__init__((messages.group, messages.world_ranks[src], tag), wake_nobody)
        self._messages = messages
        self._mailbox = messages.transport.mailbox

    def has_come(self, spec: TensorSpec | None) -> bool:
        """Whether all of the message is here, or comes within a moment, and is of this spec (None: of any)."""
        self._mailbox.post(self)
        if self.message is None:
            try:
                self._messages.transport.busy_poll(self.place[1], self._is_here)
            except Exception as error:
                self._messages.latch.end(unexpected(self.label, error))  # a message that was just read may be lost
                raise
        message = self.message
        if message is None or not message.frames:
            return False
        first, header = message.frames[0], message.header
        # An empty one may claim any shape: the general path sees to that.
        return 0 < len(first.payload) == header.total and (spec is None or spec == (header.dtype, header.shape))

    def _is_here(self) -> bool:
        """Whether all of the message that comes without a grant is here. To stop before would wake the reader for the rest."""
        message = self.message
        return message is not None and (message.needs_grant or message.frames.is_complete)

    @property
    def _frame(self) -> Frame:
        assert self.message is not None
        return self.message.frames[0]

    @property
    def spec(self) -> TensorSpec:
        """Dtype and shape of the message that has come."""
        return self._frame.header.spec

    def copy(self, out: Array | None) -> Array:
        """The elements of the message that has come, in storage dtype: in `out`, or in a new array."""
        header = self._frame.header
        found = np.ndarray(header.shape, header.dtype.storage, self._frame.payload)
        if out is None:
            return found.copy()
        out[...] = found
        return out

    @property
    def label(self) -> str:
        """Its text."""
        return label_of_recv(*self.place[1:])

    def take(self) -> None:
        """Takes the message: it is over."""
        self._mailbox.take(self)

    def put_back(self) -> None:
        """Leaves the message, taken or not, for the next recv."""
        self._mailbox.put_back(self)
