"""Runs plans over a transport: one execution is one plan on one rank, advanced as far as its messages have come.

Actions are done in order. A send goes chunk by chunk while it has credit and its lane has room; a receive or a fold consumes
chunks straight from the received bytes, in order of their offset. Nothing here blocks: see execution.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ferrorpc.collectives.algorithms.plan import Action, Fold, FoldUnder, Plan, Receive, Send
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.execution import Execution, Prepared
from ferrorpc.collectives.workspace import Rules, Workspace
from ferrorpc.errors import BarrierTimeoutError, CodecError, CollectiveTimeoutError, FerroError
from ferrorpc.guard import Guard
from ferrorpc.transports.base import Transport
from ferrorpc.transports.credit import CHUNK_BYTES, EAGER_CHUNKS
from ferrorpc.transports.mailbox import ABSENT, Box
from ferrorpc.types import TensorSpec
from ferrorpc.wire.frames import Frame, Header, Key

Array = np.ndarray[Any, Any]


class Outgoing:
    """One message on its way out, chunk by chunk."""

    __slots__ = ("_data", "_header", "_offset", "_peer")

    def __init__(self, peer: int, header: Header, data: Array) -> None:
        self._peer = peer
        self._header = header
        self._data = data
        self._offset = -1

    def advance(self, transport: Transport, key: Key, box: Box, wake: Callable[[], None]) -> bool:
        """Sends what credit and the lane permit. True when all of it has gone."""
        header, peer = self._header, self._peer
        if self._offset < 0:
            if header.total == 0:
                return transport.send(peer, key, header, 0, None, wake)
            self._offset = 0
        while self._offset < header.total:
            beyond_credit = self._offset >= EAGER_CHUNKS * CHUNK_BYTES
            if beyond_credit and (peer, header.slot) not in box.granted:
                return False
            chunk = self._data[self._offset : self._offset + CHUNK_BYTES]
            if not transport.send(peer, key, header, self._offset, chunk, wake):
                return False
            self._offset += chunk.size
        return True


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

    def start(self, key: Key, inputs: Sequence[Array], outputs: Sequence[Array] | None, guard: Guard) -> Execution:
        return PlanExecution(self, key, inputs, outputs, guard)


class PlanExecution(Execution):
    """One run of a prepared plan."""

    def __init__(
        self, prepared: PlanPrepared, key: Key, inputs: Sequence[Array], outputs: Sequence[Array] | None, guard: Guard
    ) -> None:
        self.guard = guard
        self.results: list[Array] = []
        self.specs: list[TensorSpec] = []
        self._prepared = prepared
        self._transport = prepared.transport
        self._key = key
        self._actions: tuple[Action, ...] = prepared.plan.actions
        self._index = 0
        self._workspace = Workspace(prepared.rules, inputs, outputs)
        self._box: Box | None = None
        self._outgoing: Outgoing | None = None
        self._expected = -1
        self._encoded: list[Frame] = []

    @property
    def label(self) -> str:
        return f"{self._prepared.signature} #{self._key.number}"

    def advance(self) -> bool:
        box = self._box
        if box is None:
            box = self._box = self._transport.mailbox.enter(self._key, self._prepared.signature, self.wake)
        while box.ungranted:
            source, slot = box.ungranted.popleft()
            self._transport.grant(source, self._key, slot)
        while self._index < len(self._actions):
            if not self._do(self._actions[self._index], box):
                return False
            self._index += 1
        self.results, self.specs = self._workspace.results
        return True

    def _do(self, action: Action, box: Box) -> bool:
        if isinstance(action, Send):
            return self._send(action, box)
        if isinstance(action, Receive | Fold | FoldUnder):
            return self._take(action, box)
        self._workspace.apply(action)
        return True

    def _send(self, action: Send, box: Box) -> bool:
        if self._outgoing is None:
            spec, data = self._workspace.outgoing(action.region)
            header = Header(action.slot, self._prepared.signature, spec.dtype, spec.shape, data.size)
            self._outgoing = Outgoing(self._prepared.ranks[action.peer], header, data)
        if not self._outgoing.advance(self._transport, self._key, box, self.wake):
            return False
        self._outgoing = None
        return True

    def _take(self, action: Receive | Fold | FoldUnder, box: Box) -> bool:
        queue = box.frames.get((self._prepared.ranks[action.peer], action.slot))
        while queue:
            frame = queue.popleft()
            header = frame.header
            spec = TensorSpec(header.dtype, header.shape)
            if self._expected < 0:
                self._workspace.expect(action, spec)
                self._expected = 0
            if frame.offset != self._expected:
                raise CodecError(f"{self.label}: chunk at byte {frame.offset} came where byte {self._expected} was due")
            self._consume(action, frame, spec)
            self._expected += len(frame.payload)
            if self._expected >= header.total:
                self._complete(action)
                return True
        return False

    def _consume(self, action: Receive | Fold | FoldUnder, frame: Frame, spec: TensorSpec) -> None:
        if self._prepared.rules.codec is not None:
            self._encoded.append(frame)
            return
        storage = spec.dtype.storage
        if len(frame.payload) % storage.itemsize:
            raise CodecError(f"{self.label}: a chunk of {len(frame.payload)} bytes holds no whole number of {spec.dtype.label}")
        data = np.frombuffer(frame.payload, storage)
        self._workspace.accept(action, spec, frame.offset // storage.itemsize, data)

    def _complete(self, action: Receive | Fold | FoldUnder) -> None:
        if self._encoded:
            message = np.frombuffer(b"".join(frame.payload for frame in self._encoded), np.uint8)
            self._encoded.clear()
            if message.size:
                self._workspace.accept_encoded(action, message)
        self._expected = -1

    def _due(self) -> list[int]:
        """World ranks of the messages still to come, and of the grant that is waited for."""
        box = self._box
        if box is None:
            return []
        ranks = self._prepared.ranks
        due: set[int] = set()
        for action in self._actions[self._index :]:
            if isinstance(action, Receive | Fold | FoldUnder) and not box.frames.get((ranks[action.peer], action.slot)):
                due.add(ranks[action.peer])
        if self._outgoing is not None:
            action = self._actions[self._index]
            if isinstance(action, Send):
                due.add(ranks[action.peer])
        return sorted(due)

    def waiting_on(self) -> list[int]:
        due = self._due()
        answers = self._box.answers if self._box is not None else {}
        guilty = [rank for rank in due if rank not in answers or answers[rank].standing == ABSENT]
        return guilty or due

    def probe(self) -> None:
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

    def finish(self) -> None:
        if self._box is not None:
            self._transport.mailbox.leave(self._key)
            self._box = None
