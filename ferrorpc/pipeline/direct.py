"""Arrays of stages on GPUs, from GPU to GPU, where the group's backend brings them so.

Idea. Two ranks in one direction are a subgroup of their own, whose broadcasts carry the arrays: so deadlines, peers that die
and what differs are told as of every collective. A broadcast has no tag; what is sent one way is matched by its order. That is
the order in which the sender sends, which the schedule tells, so the receiver follows it, whatever it needs first. A message by
the host lanes, with the tag of its wire, says of each what it is and how large.

Cost: a copy on the sender's GPU, since the stage may write to its arrays at once, and the way between the GPUs. The receiver's
GPU takes what comes once it has done what its stage was given before. Memory: for each way what a subgroup takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from ferrorpc.arrays.base import Kind
from ferrorpc.group import ProcessGroup
from ferrorpc.pipeline.messages import Message
from ferrorpc.pipeline.schedules.lowering import Way
from ferrorpc.pipeline.wire import Wire
from ferrorpc.types import DType
from ferrorpc.work import Work

PATIENCE_SECONDS: Final = 30 * 24 * 3600.0
"""Deadline of what is sent. A rank that waits does so with its own, shorter one."""
SENDER: Final = 0
"""Its rank in the subgroup."""

_lanes: Final[WeakKeyDictionary[ProcessGroup, dict[Way, ProcessGroup | None]]] = WeakKeyDictionary()
"""Those that a group has: as many on every rank, since ranks make their pipelines together."""


def lanes_of(group: ProcessGroup, ways: Iterable[Way], kinds: Iterable[Kind]) -> Mapping[Way, ProcessGroup]:
    """The subgroups for those ways that begin or end here and join two ranks whose stages are on GPUs. Collective.

    Args:
        ways: all of the pipeline's, the same on every rank.
        kinds: of this rank's stages.
    """
    if not group.capabilities.device_moves:
        return {}
    own = list(kinds)
    near = [bool(each[0]) for each in group.all_gather(np.array([bool(own) and all(kind.on_device for kind in own)]))]
    lanes = _lanes.setdefault(group, {})
    for way in sorted(set(ways)):
        if way not in lanes and near[way[0]] and near[way[1]]:
            lanes[way] = lane = group.subgroup(way)
            if lane is not None:  # NCCL connects two ranks at their first operation, for which both have to be there
                lane.broadcast(own[0].near.empty((1,), DType.UINT8), SENDER)
    return {way: lane for way, lane in lanes.items() if lane is not None and near[way[0]] and near[way[1]]}


class Incoming:
    """What comes one way in one step.

    Args:
        lane: the way's subgroup.
        order: everything that comes, as it is sent.
    """

    def __init__(self, lane: ProcessGroup, order: Iterable[Wire]) -> None:
        self._lane = lane
        self._order = deque(order)
        self._coming: dict[Wire, tuple[Message, Work[Any] | None]] = {}

    def reach(self, wire: Wire, kind: Kind, read: Callable[[Wire], Message]) -> tuple[Message, Work[Any] | None]:
        """Begins to receive everything up to a wire that has not been begun. The wire's message, and the bytes of its arrays,
        which are on their way; None where they are in the message.

        Args:
            kind: of this rank's arrays.
            read: waits for the message of a wire.
        """
        while wire not in self._coming:
            following = self._order.popleft()
            message = read(following)
            self._coming[following] = message, None if message.data is not None else self._begin(message, kind)
        return self._coming.pop(wire)

    def _begin(self, message: Message, kind: Kind) -> Work[Any]:
        place = kind.near.empty((message.form.end,), DType.UINT8)
        return self._lane.broadcast(None, SENDER, out=place, async_op=True, timeout=PATIENCE_SECONDS)


def send(lane: ProcessGroup, arrays: Any) -> Work[Any]:
    """Sends the bytes of arrays, which nobody writes to any more, on their way.

    They are the result, too: memory for another one would be made when the receiver has come, in order after whatever the
    current stream waits for by then.
    """
    return lane.broadcast(arrays, SENDER, out=arrays, async_op=True, timeout=PATIENCE_SECONDS)
