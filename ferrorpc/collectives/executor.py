"""Runs plans over a transport: one execution runs one plan on one rank, as far as its messages have arrived.

Every action processes its region chunk by chunk, as far as the actions it depends on have come (dependencies.py). So the first
chunks of a slice are folded and sent on while later ones still arrive. A receive or a fold takes chunks straight from the
received bytes, in order of their offset. A send proceeds while it has credit and its lane has room. Nothing here blocks; the
thread that brings an event does the work (event_driven.py).

Cost: the work of an action on a chunk, and a look at the few actions that a finished chunk may have unblocked.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any, Final

import numpy as np

from ferrorpc.collectives.algorithms.plan import Fold, FoldUnder, Plan, Receive, Send
from ferrorpc.collectives.call import Call, Operation, overwritable
from ferrorpc.collectives.dependencies import UNBOUNDED, bound, dependencies_of
from ferrorpc.collectives.device_transfers import DeviceTransfers
from ferrorpc.collectives.event_driven import EventDrivenExecution
from ferrorpc.collectives.execution import Describe, deadline_error, describe_absent, hint_about
from ferrorpc.collectives.fusion import DownloadInput, Reduce, Task, UploadResult
from ferrorpc.collectives.outgoing_message import CODED_VALUES, EncodedMessage, OutgoingMessage
from ferrorpc.collectives.workspace import Rules, Workspace
from ferrorpc.errors import CodecError, FerroError
from ferrorpc.generation_errors import describe_lost_link
from ferrorpc.guard import Guard
from ferrorpc.transports.base import Transport
from ferrorpc.transports.mailbox import ABSENT, Box
from ferrorpc.types import DType
from ferrorpc.wire.codecs import Codec
from ferrorpc.wire.frames import Frame, Header, Key

Array = np.ndarray[Any, Any]
Take = Receive | Fold | FoldUnder

_LOCAL_ELEMENTS: Final = CODED_VALUES
"""Elements that an action without a message processes at a time; a multiple of a codec's blocks."""


class Layout:
    """A call's plan as one rank of a group runs it: its tasks, and how they depend on each other and on messages.

    Args:
        ranks: world rank of each group rank.
        rank: own group rank.
    """

    def __init__(
        self,
        transport: Transport,
        describe: Describe,
        call: Call,
        plan: Plan,
        rank: int,
        ranks: tuple[int, ...],
        tasks: tuple[Task, ...],
    ) -> None:
        self.transport = transport
        self.describe = describe
        self.signature = call.signature
        self.ranks = ranks
        self.tasks = tasks
        self.rules = Rules(call, plan, tasks, rank, len(ranks))
        self.own = overwritable(call.operation, rank)
        """The input whose memory the first result may be; None where none may."""
        self.steps = dependencies_of(tasks, self.own)
        self.sources = [_sources(task, ranks) for task in tasks]
        """For each task, the messages it awaits, as (world rank, slot)."""
        self.takers = {place: index for index, places in enumerate(self.sources) for place in places}
        """For each message, the index of the task that awaits it."""
        self.downloading = [index for index, task in enumerate(tasks) if isinstance(task, DownloadInput)]


def _sources(task: Task, ranks: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    if isinstance(task, Reduce):
        return tuple((ranks[message.peer], message.slot) for message in task.messages)
    return ((ranks[task.peer], task.slot),) if isinstance(task, Take) else ()


class PlanExecution(EventDrivenExecution):
    """One run of a prepared plan.

    Args:
        workspace: the arrays.
    """

    def __init__(
        self, layout: Layout, key: Key, workspace: Workspace, guard: Guard, transfers: DeviceTransfers | None = None
    ) -> None:
        super().__init__(guard, transfers)
        self._layout = layout
        self._transport = layout.transport
        count = len(layout.tasks)
        self._key = key
        self._workspace = workspace
        self._box: Box | None = None
        self._done = [0] * count
        """How many elements of its region each task has done; UNBOUNDED once it is complete."""
        self._left = count
        self._ready = deque(range(count))
        """Indices of tasks that may make progress."""
        self._room = False
        """Whether a lane that was full has room again."""
        self._credit = 0
        """How many grants there were when sends were last tried after a grant."""
        self._outgoing: dict[int, OutgoingMessage] = {}

    @property
    def label(self) -> str:
        return f"{self._layout.signature} #{self._key.number}"

    def step(self) -> bool:
        box = self._entered()
        ready, done, steps = self._ready, self._done, self._layout.steps
        while self._left and (ready or self._collect(box)):
            index = ready.popleft()
            if done[index] == UNBOUNDED or not self._do(index, box):
                continue
            ready.extend(steps[index].wakes)
            if done[index] == UNBOUNDED:
                self._left -= 1
            else:
                ready.append(index)
        if self._left:
            return False
        self.results, self.specs = self._workspace.results
        return True

    def _entered(self) -> Box:
        """Its box in the mailbox. Raises CollectiveMismatchError where a message of a different call has arrived."""
        if self._box is None:
            layout = self._layout
            self._box = self._transport.mailbox.enter(self._key, layout.signature, self.notify, layout.takers)
        if self._box.refused is not None:
            raise self._box.refused.again()
        return self._box

    def _collect(self, box: Box) -> bool:
        """Grants credit, and finds the tasks that events concern. Returns whether there are any."""
        while box.ungranted:
            source, slot = box.ungranted.popleft()
            self._transport.grant(source, self._key, slot)
        takers, ready = self._layout.takers, self._ready
        while box.arrivals:
            index = takers.get(box.arrivals.popleft())
            if index is not None:
                ready.append(index)
        if self._room or len(box.granted) != self._credit:
            self._room, self._credit = False, len(box.granted)
            ready.extend(self._outgoing)
        if self.transfers is not None and self.transfers.has_new_input:
            self.transfers.has_new_input = False
            ready.extend(self._layout.downloading)
        return bool(ready)

    def _do(self, index: int, box: Box) -> bool:
        """Does one chunk of a task. Returns False when it has to wait."""
        waits = self._layout.steps[index].waits
        limit = bound(waits, self._done) if waits else UNBOUNDED
        if limit <= 0:
            return False
        task = self._layout.tasks[index]
        if isinstance(task, Send):
            return self._send(index, task, box, limit)
        if isinstance(task, Take):
            return self._take(index, task, box, limit)
        if isinstance(task, Reduce):
            return self._reduce(index, task, box, limit)
        if isinstance(task, DownloadInput | UploadResult):
            return self._transfer(index, task, limit)
        return self._compute(index, limit)

    def _transfer(self, index: int, task: DownloadInput | UploadResult, limit: int) -> bool:
        """Records what has been copied from a device, or allows copies to a device."""
        transfers, first = self.transfers, self._done[index]
        assert transfers is not None, "who has such tasks has transfers"
        if isinstance(task, DownloadInput):
            self._done[index] = transfers.downloaded(task.region.item)
            return self._done[index] > first
        count = self._workspace.elements(task)
        last = min(limit, count)
        if first < last:
            start, data = task.region.start, self._workspace.array(task.region)
            transfers.allow_upload(task.region.item, data, start + first, start + last)
        self._done[index] = UNBOUNDED if last == count else last
        return self._done[index] > first

    def _send(self, index: int, action: Send, box: Box, limit: int) -> bool:
        outgoing = self._outgoing.get(index)
        if outgoing is None:
            outgoing = self._outgoing[index] = self._message(index, action)
        if not outgoing.send(self._transport, self._key, box, limit, self._has_room):
            return False
        if outgoing.done == outgoing.count:
            del self._outgoing[index]
            self._done[index] = UNBOUNDED
        else:
            self._done[index] = outgoing.done
        return True

    def _message(self, index: int, action: Send) -> OutgoingMessage:
        layout = self._layout
        spec, values = self._workspace.outgoing(action.region)
        peer, codec = layout.ranks[action.peer], layout.rules.codec
        if codec is None or not values.size:
            header = Header(action.slot, layout.signature, spec.dtype, spec.shape, values.nbytes)
            return OutgoingMessage(peer, header, values)
        total = codec.encoded_bytes(values.size)
        header = Header(action.slot, layout.signature, DType.UINT8, (total,), total)
        return self._encoded(index, peer, header, values, codec)

    def _encoded(self, index: int, peer: int, header: Header, values: Any, codec: Codec) -> EncodedMessage:
        """A message in the codec's bytes."""
        return EncodedMessage(peer, header, values, codec, partial(self._workspace.encoded, index))

    def _has_room(self) -> None:
        # Left to the driver, which has nothing else to do: the lane's writer, which calls this, should write.
        self._room = True
        self.wake()

    def _take(self, index: int, task: Take, box: Box, limit: int) -> bool:
        """The next chunk of a message."""
        queue = box.frames.get(self._layout.sources[index][0])
        if not queue:
            return False
        frame = queue[0]
        first = self._done[index]
        if first == 0:
            self._workspace.expect(task.region, frame.header.spec)
        start, last = self._extent(task, frame)
        if last > limit or (first < last and not self._is_usable(index, frame)):
            return False
        queue.popleft()
        if first < last:
            self._workspace.accept(task, first, self._part(frame, start, last, first, last))
        self._done[index] = UNBOUNDED if frame.offset + len(frame.payload) == frame.header.total else last
        return True

    def _reduce(self, index: int, task: Reduce, box: Box, limit: int) -> bool:
        """The next elements of a reduction: those for which a chunk of every message is here."""
        queues = [box.frames.get(place) for place in self._layout.sources[index]]
        frames = [queue[0] for queue in queues if queue]
        if len(frames) < len(queues):
            return False
        first = self._done[index]
        if first == 0:
            for frame in frames:
                self._workspace.expect(task.region, frame.header.spec)
        extents = [self._extent(task, frame) for frame in frames]
        last = min(extent[1] for extent in extents)
        if last > limit or not all(self._is_usable(index, frame) for frame in frames):
            return False
        parts = []
        for frame, queue, (start, end) in zip(frames, queues, extents, strict=True):
            parts.append(self._part(frame, start, end, first, last))
            if end == last and queue:
                queue.popleft()
        self._workspace.reduce(task, parts, first, last)
        self._done[index] = UNBOUNDED if last == self._workspace.elements(task) else last
        return True

    def _extent(self, task: Take | Reduce, frame: Frame) -> tuple[int, int]:
        """The elements of its message that a chunk holds, as [first, last)."""
        size_bytes, codec = len(frame.payload), self._layout.rules.codec
        if codec is None or not size_bytes:
            itemsize = frame.header.dtype.itemsize
            if size_bytes % itemsize:
                raise CodecError(
                    f"{self.label}: a chunk of {size_bytes} bytes holds no whole number of {frame.header.dtype.label}"
                )
            return frame.offset // itemsize, (frame.offset + size_bytes) // itemsize
        start = frame.offset // codec.encoded_bytes(CODED_VALUES) * CODED_VALUES
        count = min(CODED_VALUES, self._workspace.elements(task) - start)
        if codec.encoded_bytes(count) != size_bytes:
            raise CodecError(f"{self.label}: a chunk of {size_bytes} bytes came where {count} values as {codec.name} were due")
        return start, start + count

    def _is_usable(self, index: int, frame: Frame) -> bool:
        """Whether a chunk is where task `index` can use it."""
        return True

    def _part(self, frame: Frame, start: int, end: int, first: int, last: int) -> Array:
        """Elements [first, last) of a chunk that holds [start, end): a view of the received bytes, or decoded from them."""
        codec = self._layout.rules.codec
        if codec is None:
            values = np.frombuffer(frame.payload, frame.header.dtype.storage)
        else:
            values = codec.decode(np.frombuffer(frame.payload, np.uint8), end - start)
        return values[first - start : last - start]

    def _compute(self, index: int, limit: int) -> bool:
        """The next elements of a task that needs no message: as many as a chunk holds, or all that are left."""
        count, first = self._workspace.elements(self._layout.tasks[index]), self._done[index]
        last = min(first + _LOCAL_ELEMENTS, count)
        if last > limit:
            return False
        self._workspace.apply(index, first, last)
        self._done[index] = UNBOUNDED if last == count else last
        return True

    def _due(self) -> list[int]:
        """World ranks of the messages, grants and lanes that it waits for."""
        box = self._box
        if box is None:
            return []
        layout = self._layout
        due = set()
        for index, task in enumerate(layout.tasks):
            if self._done[index] == UNBOUNDED:
                continue
            if index in self._outgoing and isinstance(task, Send):
                due.add(layout.ranks[task.peer])
            due.update(rank for rank, slot in layout.sources[index] if not box.frames.get((rank, slot)))
        return sorted(due)

    def waiting_on(self) -> list[int]:
        due = self._due()
        answers = self._box.answers if self._box is not None else {}
        lost, under_way = self._transport.lost(), self._under_way()
        absent = [rank for rank in due if rank not in answers or answers[rank].standing == ABSENT]
        guilty = [rank for rank in due if rank in lost or (rank in absent and rank not in under_way)]
        return guilty or due

    def _under_way(self) -> dict[int, str]:
        """World rank of each peer whose data flows -> how much has gone or come, as text.

        Such a peer is in the operation, whatever it answered before: it is not asked while messages still come.
        """
        box, found = self._box, dict[int, str]()
        if box is None:
            return found
        for index, task in enumerate(self._layout.tasks):
            outgoing = self._outgoing.get(index)
            progress = "" if outgoing is None else outgoing.progress(box)
            if progress and isinstance(task, Send):
                found[self._layout.ranks[task.peer]] = progress
        for place in self._layout.takers:
            queue = box.frames.get(place)
            if queue is not None and not queue.is_complete:
                found[place[0]] = queue.progress
        return found

    def probe(self) -> None:
        if self.moved():
            return
        for peer in self._due():
            self._transport.probe(peer, self._key, self._layout.signature)

    def explain(self) -> str:
        answers = self._box.answers if self._box is not None else {}
        unreached, lost, under_way = self._transport.unreached(), self._transport.lost(), self._under_way()
        parts = []
        for rank in self.waiting_on():
            answer = answers.get(rank)
            if rank in lost:
                parts.append(f"rank {rank} ({describe_lost_link(lost[rank])})")
            elif rank in under_way:
                parts.append(f"rank {rank} ({under_way[rank]})")
            elif answer is None:
                parts.append(f"rank {rank} ({unreached.get(rank, 'no answer yet')})")
            elif answer.standing == ABSENT:
                parts.append(describe_absent(rank, answer.last_signature, answer.last_number))
            else:
                parts.append(f"rank {rank} (is in it too)")
        if self.waits_for_own_gpu:
            parts.append("this rank's own GPU")
        return f"{self.label} waits for {', '.join(parts) or 'its turn on this rank'}"

    def timeout_error(self) -> FerroError:
        is_barrier = self._layout.rules.call.operation is Operation.BARRIER
        hint = hint_about(self.waiting_on(), self._transport, under_way=self._under_way())
        return deadline_error(self, self._layout.describe, barrier=is_barrier, hint=hint)

    def leave(self) -> None:
        if self._box is not None:
            self._transport.mailbox.leave(self._key)
            # Without this reference cycle its arrays are freed at once.
            self._box = None
