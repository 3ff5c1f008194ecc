"""Runs plans over a transport: one execution is one plan on one rank, advanced as far as its messages have come.

Every action goes through its region chunk by chunk, and as far as those it depends on have come (flow.py): while the first
chunks of a slice are folded in and sent on, later ones still arrive. A receive or a fold takes chunks straight from the
received bytes, in order of their offset; a send goes while it has credit and its lane has room. Nothing here blocks, and
whoever brings news does the work: see advancing.py.

Cost: what an action does with a chunk, and looking at the few actions that a finished chunk may have set free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from ferrorpc.collectives.advancing import Advancing
from ferrorpc.collectives.algorithms.plan import Fold, FoldUnder, Plan, Receive, Send
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.execution import Execution, Prepared
from ferrorpc.collectives.flow import FAR, bound, steps_of
from ferrorpc.collectives.outgoing import CODED_VALUES, Encoded, Outgoing
from ferrorpc.collectives.workspace import Rules, Workspace
from ferrorpc.errors import BarrierTimeoutError, CodecError, CollectiveTimeoutError, FerroError
from ferrorpc.guard import Guard
from ferrorpc.transports.base import Transport
from ferrorpc.transports.mailbox import ABSENT, Box
from ferrorpc.types import DType, TensorSpec
from ferrorpc.wire.frames import Frame, Header, Key

Array = np.ndarray[Any, Any]
Take = Receive | Fold | FoldUnder

_LOCAL_ELEMENTS: Final = CODED_VALUES
"""Elements that an action without a message does at a time; a multiple of a codec's blocks."""


class PlanPrepared(Prepared):
    """A call with its plan, for one group on one transport.

    Args:
        ranks: world rank of each group rank.
        rank: own group rank.
        describe: what is known of world ranks, in words; asked only when a deadline has passed.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int],
        rank: int,
        call: Call,
        plan: Plan,
        describe: Callable[[list[int]], str],
    ) -> None:
        self.transport = transport
        self.describe = describe
        self.ranks = tuple(ranks)
        self.call = call
        self.plan = plan
        self.signature = call.signature
        self.rules = Rules(call, plan, rank, len(self.ranks))
        self.steps = steps_of(plan, call.operation, rank)
        self.takers = {
            (self.ranks[action.peer], action.slot): index
            for index, action in enumerate(plan.actions)
            if isinstance(action, Take)
        }
        """Which action awaits message (world rank, slot)."""

    def start(self, key: Key, inputs: Sequence[Array], outputs: Sequence[Array] | None, guard: Guard) -> Execution:
        return PlanExecution(self, key, inputs, outputs, guard)


class PlanExecution(Advancing):
    """One run of a prepared plan."""

    def __init__(
        self, prepared: PlanPrepared, key: Key, inputs: Sequence[Array], outputs: Sequence[Array] | None, guard: Guard
    ) -> None:
        super().__init__(guard)
        count = len(prepared.plan.actions)
        self._prepared = prepared
        self._transport = prepared.transport
        self._key = key
        self._actions = prepared.plan.actions
        self._steps = prepared.steps
        self._workspace = Workspace(prepared.rules, inputs, outputs)
        self._box: Box | None = None
        self._done = [0] * count
        """How many elements of its region each action has done; FAR once it is complete."""
        self._left = count
        self._ready = deque(range(count))
        """Actions to look at."""
        self._room: deque[int] = deque()
        """Sends whose lanes have room again."""
        self._credit = 0
        """Grants that were there when sends were last looked at for that."""
        self._outgoing: dict[int, Outgoing] = {}
        self._received: dict[int, int] = {}
        """Bytes that have come of each message that has begun."""

    @property
    def label(self) -> str:
        return f"{self._prepared.signature} #{self._key.number}"

    def step(self) -> bool:
        box = self._box
        if box is None:
            box = self._box = self._transport.mailbox.enter(self._key, self._prepared.signature, self.poke)
        ready, done, steps = self._ready, self._done, self._steps
        while self._left and (ready or self._collect(box)):
            index = ready.popleft()
            if done[index] == FAR or not self._do(index, box):
                continue
            ready.extend(steps[index].wakes)
            if done[index] == FAR:
                self._left -= 1
            else:
                ready.append(index)
        if self._left:
            return False
        self.results, self.specs = self._workspace.results
        return True

    def _collect(self, box: Box) -> bool:
        """Gives what grants are asked for, and finds the actions for which there is news. False when there is none."""
        while box.ungranted:
            source, slot = box.ungranted.popleft()
            self._transport.grant(source, self._key, slot)
        takers, ready = self._prepared.takers, self._ready
        while box.news:
            index = takers.get(box.news.popleft())
            if index is not None:
                ready.append(index)
        while self._room:
            ready.append(self._room.popleft())
        if len(box.granted) != self._credit:
            self._credit = len(box.granted)
            ready.extend(self._outgoing)
        return bool(ready)

    def _do(self, index: int, box: Box) -> bool:
        """Does one chunk of an action; False when it has to wait."""
        waits, _, fence = self._steps[index]
        limit = bound(waits, self._done) if waits else FAR
        if limit <= 0 or (fence and limit != FAR):
            return False
        action = self._actions[index]
        if isinstance(action, Send):
            return self._send(index, action, box, limit)
        if isinstance(action, Take):
            return self._take(index, action, box, limit)
        return self._compute(index, limit)

    def _send(self, index: int, action: Send, box: Box, limit: int) -> bool:
        outgoing = self._outgoing.get(index)
        if outgoing is None:
            outgoing = self._outgoing[index] = self._message(index, action)
        if not outgoing.send(self._transport, self._key, box, limit):
            return False
        if outgoing.done == outgoing.count:
            del self._outgoing[index]
            self._done[index] = FAR
        else:
            self._done[index] = outgoing.done
        return True

    def _message(self, index: int, action: Send) -> Outgoing:
        prepared, workspace = self._prepared, self._workspace
        spec, values = workspace.outgoing(action.region)
        peer, room, codec = prepared.ranks[action.peer], partial(self._has_room, index), prepared.rules.codec
        if codec is None or not values.size:
            header = Header(action.slot, prepared.signature, spec.dtype, spec.shape, values.nbytes)
            return Outgoing(peer, header, values, room)
        total = codec.encoded_bytes(values.size)
        header = Header(action.slot, prepared.signature, DType.UINT8, (total,), total)
        return Encoded(peer, header, values, room, codec, partial(workspace.encoded, index))

    def _has_room(self, index: int) -> None:
        self._room.append(index)
        self.poke()

    def _take(self, index: int, action: Take, box: Box, limit: int) -> bool:
        queue = box.frames.get((self._prepared.ranks[action.peer], action.slot))
        if not queue:
            return False
        frame = queue[0]
        header = frame.header
        spec = TensorSpec(header.dtype, header.shape)
        received = self._received.get(index)
        if received is None:
            self._workspace.expect(action, spec)
            received = 0
        if frame.offset != received:
            raise CodecError(f"{self.label}: chunk at byte {frame.offset} came where byte {received} was due")
        first = self._done[index]
        last = first + self._elements(action, frame, first, spec)
        if last > limit:
            return False
        queue.popleft()
        self._accept(action, frame, first, last, spec)
        self._received[index] = received + len(frame.payload)
        self._done[index] = FAR if self._received[index] >= header.total else last
        return True

    def _elements(self, action: Take, frame: Frame, first: int, spec: TensorSpec) -> int:
        """How many elements a chunk holds that begins with element `first`."""
        size_bytes = len(frame.payload)
        codec = self._prepared.rules.codec
        if codec is None or not size_bytes:
            count, rest = divmod(size_bytes, spec.dtype.itemsize)
            if rest:
                raise CodecError(f"{self.label}: a chunk of {size_bytes} bytes holds no whole number of {spec.dtype.label}")
            return count
        count = min(CODED_VALUES, self._workspace.elements(action) - first)
        if codec.encoded_bytes(count) != size_bytes:
            raise CodecError(f"{self.label}: a chunk of {size_bytes} bytes came where {count} values as {codec.name} were due")
        return count

    def _accept(self, action: Take, frame: Frame, first: int, last: int, spec: TensorSpec) -> None:
        if first == last:
            return
        if self._prepared.rules.codec is None:
            self._workspace.accept(action, spec, first, np.frombuffer(frame.payload, spec.dtype.storage))
        else:
            self._workspace.accept_encoded(action, first, last - first, np.frombuffer(frame.payload, np.uint8))

    def _compute(self, index: int, limit: int) -> bool:
        """The next elements of an action that needs no message: as many as a chunk holds, or all that are left."""
        action = self._actions[index]
        count, first = self._workspace.elements(action), self._done[index]
        last = min(first + _LOCAL_ELEMENTS, count)
        if last > limit:
            return False
        self._workspace.apply(index, first, last)
        self._done[index] = FAR if last == count else last
        return True

    def _due(self) -> list[int]:
        """World ranks of the messages still to come, and of the grants and lanes that are waited for."""
        box = self._box
        if box is None:
            return []
        ranks = self._prepared.ranks
        due = set()
        for index, action in enumerate(self._actions):
            if not isinstance(action, Send | Take) or self._done[index] == FAR:
                continue
            come = (
                index not in self._outgoing if isinstance(action, Send) else box.frames.get((ranks[action.peer], action.slot))
            )
            if not come:
                due.add(ranks[action.peer])
        return sorted(due)

    def waiting_on(self) -> list[int]:
        due = self._due()
        answers = self._box.answers if self._box is not None else {}
        guilty = [rank for rank in due if rank not in answers or answers[rank].standing == ABSENT]
        return guilty or due

    def probe(self) -> None:
        if self.moved():
            return
        for peer in self._due():
            self._transport.probe(peer, self._key, self._prepared.signature)

    def explain(self) -> str:
        answers = self._box.answers if self._box is not None else {}
        parts = []
        for rank in self.waiting_on():
            answer = answers.get(rank)
            if answer is None:
                parts.append(f"rank {rank} (no answer yet)")
            elif answer.standing == ABSENT:
                last = (
                    f"last entered {answer.last_signature} #{answer.last_number}"
                    if answer.last_number
                    else "entered nothing yet"
                )
                parts.append(f"rank {rank} (not there yet: {last})")
            else:
                parts.append(f"rank {rank} (is in it too)")
        return f"{self.label} waits for {', '.join(parts) or 'its own lane'}"

    def timeout_error(self) -> FerroError:
        waiting = self.waiting_on()
        known = self._prepared.describe(waiting)
        text = f"{self.label} was not complete after {self.guard.seconds:g} s: {self.explain()}" + (
            f"; {known}" if known else ""
        )
        if self._prepared.call.operation is Operation.BARRIER:
            return BarrierTimeoutError(waiting, text)
        return CollectiveTimeoutError(waiting, text)

    def leave(self) -> None:
        if self._box is not None:
            self._transport.mailbox.leave(self._key)
