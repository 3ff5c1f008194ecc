"""send and recv as executions, over a transport with a mailbox."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ferrorpc.collectives.execution import Execution
from ferrorpc.collectives.executor import Outgoing
from ferrorpc.errors import CodecError, CollectiveTimeoutError, FerroError, TensorMismatchError
from ferrorpc.guard import Guard
from ferrorpc.transports.base import Transport
from ferrorpc.transports.mailbox import Box
from ferrorpc.transports.pairwise import Message, Post
from ferrorpc.types import TensorSpec
from ferrorpc.wire.frames import POINT_TO_POINT, Header, Key

Array = np.ndarray[Any, Any]


class SendNumbers:
    """Numbers messages by (target, tag) in the order of the calls, from 1."""

    def __init__(self) -> None:
        self._counters: dict[tuple[int, int], itertools.count[int]] = {}

    def next(self, target: int, tag: int) -> int:
        """The number of the next message to this target with this tag."""
        return next(self._counters.setdefault((target, tag), itertools.count(1)))


class SendExecution(Execution):
    """One send. `peer` is a world rank."""

    def __init__(
        self, transport: Transport, group: int, number: int, data: Array, spec: TensorSpec, peer: int, tag: int, guard: Guard
    ) -> None:
        self.guard = guard
        self.results: list[Array] = []
        self.specs: list[TensorSpec] = []
        self._transport = transport
        self._key = Key(group, POINT_TO_POINT, number)
        self._peer = peer
        self._tag = tag
        self._box = Box()
        raw = data.reshape(-1).view(np.uint8)
        self._outgoing = Outgoing(peer, Header(tag, "send", spec.dtype, spec.shape, raw.size), raw)
        self._registered = False
        self._label = f"send({spec} to rank {peer}, tag={tag})"

    @property
    def label(self) -> str:
        return self._label

    def advance(self) -> bool:
        if not self._registered:
            self._registered = True
            self._box.wake = self.wake
            self._transport.mailbox.start_sending(self._key, self._peer, self._tag, self._box)
        return self._outgoing.advance(self._transport, self._key, self._box, self.wake)

    def waiting_on(self) -> list[int]:
        return [self._peer]

    def probe(self) -> None:
        """Nothing to ask: a receiver that has not called recv yet is not in an operation."""

    def explain(self) -> str:
        return f"{self._label} waits for rank {self._peer} to call recv(src={self._transport.rank}, tag={self._tag})"

    def timeout_error(self) -> FerroError:
        return CollectiveTimeoutError([self._peer], f"after {self.guard.seconds:g} s, {self.explain()}")

    def finish(self) -> None:
        self._transport.mailbox.stop_sending(self._key, self._peer, self._tag)


class RecvExecution(Execution):
    """One recv. `peer` is a world rank. A timeout, or an `out` that does not fit, leaves the message for the next recv."""

    timeout_breaks = False

    def __init__(
        self, transport: Transport, group: int, peer: int, tag: int, out: Array | None, spec: TensorSpec | None, guard: Guard
    ) -> None:
        self.guard = guard
        self.results: list[Array] = []
        self.specs: list[TensorSpec] = []
        self._transport = transport
        self._group = group
        self._peer = peer
        self._tag = tag
        self._out = out
        self._spec = spec
        self._taken = False
        self._label = f"recv(from rank {peer}, tag={tag})"
        self._post = Post(self._woken)
        transport.mailbox.post(group, peer, tag, self._post)

    def _woken(self) -> None:
        wake = getattr(self, "wake", None)
        if wake is not None:
            wake()

    @property
    def label(self) -> str:
        return self._label

    def advance(self) -> bool:
        message = self._post.message
        if message is None:
            return False
        header = message.frames[0].header
        spec = TensorSpec(header.dtype, header.shape)
        if self._spec is not None and spec != self._spec:
            raise TensorMismatchError(
                f"rank {self._peer} sent {spec} with tag {self._tag}, but out is {self._spec}",
                hint="call recv without out=, or with a matching one: the message still waits",
            )
        if message.needs_grant:
            message.needs_grant = False
            self._transport.grant(self._peer, Key(self._group, POINT_TO_POINT, self._post.number), self._tag)
        if not message.complete:
            return False
        self._take(message, spec)
        return True

    def _take(self, message: Message, spec: TensorSpec) -> None:
        out = np.empty(spec.shape, spec.dtype.storage) if self._out is None else self._out
        raw = out.reshape(-1).view(np.uint8)
        for frame in message.frames:
            if frame.offset + len(frame.payload) > raw.size:
                raise CodecError(f"{self._label}: a chunk lies beyond the {raw.size} bytes of {spec}")
            raw[frame.offset : frame.offset + len(frame.payload)] = frame.payload
        self._transport.mailbox.take(self._group, self._peer, self._tag, self._post)
        self._taken = True
        self.results, self.specs = [out], [spec]

    def waiting_on(self) -> list[int]:
        return [self._peer]

    def probe(self) -> None:
        """Asks for an operation that cannot exist: a peer that is gone shows on its lane."""
        self._transport.probe(self._peer, Key(self._group, POINT_TO_POINT, 0), self._label)

    def explain(self) -> str:
        return f"{self._label} waits for rank {self._peer} to call send(dst={self._transport.rank}, tag={self._tag})"

    def timeout_error(self) -> FerroError:
        return CollectiveTimeoutError(
            [self._peer],
            f"after {self.guard.seconds:g} s, {self.explain()}",
            hint="call recv again: nothing was lost and the group goes on",
        )

    def finish(self) -> None:
        if not self._taken:
            self._taken = True
            self._transport.mailbox.unpost(self._group, self._peer, self._tag, self._post)
