"""Lanes that carry the arrays of stages from GPU to GPU, for group backends that can move them directly.

A lane is a subgroup of two ranks for one direction, and its broadcasts carry the arrays. So deadlines, dead peers and
mismatches are handled as for every collective. A broadcast has no tag: broadcasts on a lane are matched by their order, which
is the order in which the sender sends. The schedule tells the receiver that order, and the receiver follows it, whichever array
it needs first. For each transfer a tagged message on the host lanes says what the arrays are and how large.

Cost: one copy on the sender's GPU, because the stage may overwrite its arrays at once, and the copy between the GPUs. The
receiver's GPU receives once it has finished what its stage launched before. Memory: each lane takes what a subgroup takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from ferrorpc.arrays.base import Kind
from ferrorpc.group import ProcessGroup
from ferrorpc.pipeline.messages import Message
from ferrorpc.pipeline.schedules.lowering import Link
from ferrorpc.pipeline.transfers import Transfer
from ferrorpc.types import DType
from ferrorpc.work import Work

SEND_SECONDS: Final = 30 * 24 * 3600.0
"""The deadline of a send. The end of its step waits for it with a shorter one, and so does its receiver."""
SENDER: Final = 0
"""The sender's rank in the subgroup."""

_lanes: Final[WeakKeyDictionary[ProcessGroup, dict[Link, ProcessGroup | None]]] = WeakKeyDictionary()
"""The lanes of each group. They are the same on every rank, because ranks make their pipelines together."""


def open_lanes(group: ProcessGroup, links: Iterable[Link], kinds: Sequence[Kind]) -> Mapping[Link, ProcessGroup]:
    """The lanes for those links of this rank that join two ranks whose stages are on GPUs. Collective.

    Args:
        links: all links of the pipeline, the same on every rank.
        kinds: the array kinds of this rank's stages.
    """
    if not group.capabilities.device_moves:
        return {}
    on_gpu = [bool(each[0]) for each in group.all_gather(np.array([all(kind.on_device for kind in kinds)]))]
    lanes = _lanes.setdefault(group, {})
    for link in sorted(links):
        if link not in lanes and on_gpu[link[0]] and on_gpu[link[1]]:
            lanes[link] = lane = group.subgroup(link)
            if lane is not None:  # NCCL connects two ranks at their first operation, which needs both of them
                lane.broadcast(kinds[0].device_kind.empty((1,), DType.UINT8), SENDER)
    return {link: lane for link, lane in lanes.items() if lane is not None and on_gpu[link[0]] and on_gpu[link[1]]}


class LaneReceiver:
    """Receives on one lane during one step.

    Args:
        lane: the subgroup.
        order: all transfers on the lane, in the order in which they are sent.
    """

    def __init__(self, lane: ProcessGroup, order: Iterable[Transfer]) -> None:
        self._lane = lane
        self._order = deque(order)
        self._begun: dict[Transfer, tuple[Message, Work[Any] | None]] = {}

    def begin(
        self, transfer: Transfer, kind: Kind, read: Callable[[Transfer], Message], seconds: float
    ) -> tuple[Message, Work[Any] | None]:
        """Begins to receive everything that is sent up to and including a transfer.

        Args:
            kind: of this rank's arrays.
            read: waits for the message of a transfer.
            seconds: until the GPU has to have received each, however busy it is.

        Returns:
            The message of the transfer, and the receive of its arrays' bytes; None where the message has them itself.
        """
        while transfer not in self._begun:
            following = self._order.popleft()
            message = read(following)
            self._begun[following] = message, None if message.data is not None else self._receive(message, kind, seconds)
        return self._begun.pop(transfer)

    def _receive(self, message: Message, kind: Kind, seconds: float) -> Work[Any]:
        out = kind.device_kind.empty((message.layout.end,), DType.UINT8)
        return self._lane.broadcast(None, SENDER, out=out, async_op=True, timeout=seconds)


def send(lane: ProcessGroup, arrays: Any) -> Work[Any]:
    """Sends the bytes of arrays, which must not be written to any more.

    `out` is the same memory: other memory would be allocated only when the receiver has arrived, in order behind whatever the
    current stream waits for by then.
    """
    return lane.broadcast(arrays, SENDER, out=arrays, async_op=True, timeout=SEND_SECONDS)
