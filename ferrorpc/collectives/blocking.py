"""Collectives over a backend's blocking send and recv, so that a third party needs to write nothing else.

The plans are the same. Sends run on helper threads, one for each peer and in order, since a backend's send may block until its
peer receives. Receives are blocking calls on the driver's thread, a moment at a time, so that it sees between them when the
generation ends. Every message has its own tag, made from the operation's key and the plan's slot. Asynchronous operations have
a thread each, so ranks may start them in different orders; sends and recvs of one peer and tag keep the order of the calls. The
messages carry no signatures, so ranks that call different operations are noticed only by messages that do not fit, or by the
deadline.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, Protocol

import numpy as np

from ferrorpc.arrays.numpy_kind import NUMPY
from ferrorpc.collectives.algorithms.plan import Fold, FoldUnder, Plan, Receive, Send
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.driver import WaitTimers
from ferrorpc.collectives.execution import Execution, Prepared
from ferrorpc.collectives.workspace import Rules, Workspace
from ferrorpc.errors import (
    BarrierTimeoutError,
    CodecError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    FerroError,
    GroupClosedError,
    LimitExceededError,
    UsageError,
)
from ferrorpc.generation_errors import ended_by, reason_of
from ferrorpc.guard import Guard, Parker
from ferrorpc.types import TensorSpec, dtype_of
from ferrorpc.wire.frames import Key

SLICE_SECONDS: Final = 0.25
"""How long a recv waits at a time: nothing can wake it when the generation ends."""

Array = np.ndarray[Any, Any]


class SendRecv(Protocol):
    """What this module needs of a backend: blocking send and recv between group ranks."""

    rank: int
    size: int

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """World rank of each group rank."""

    def send(self, data: Array, dst: int, tag: int = 0) -> None:
        """As `Backend.send`."""

    def recv(self, src: int, tag: int = 0, out: Array | None = None, timeout: float | None = None) -> Array:
        """As `Backend.recv`."""


def message_tag(key: Key, slot: int) -> int:
    """A tag that is not used again in one group for a long time, and never by callers, whose tags are smaller. Other groups use
    the same: a backend keeps the messages of its groups apart."""
    return 1 << 62 | (key.stream & 0xFFFF) << 46 | (key.number & 0x3FFFFFFF) << 16 | (slot & 0xFFFF)


def _failure_of_send(problem: Exception) -> Exception:
    """What a backend's send has raised, as the operation's failure. The group has checked the call, so where a lane refuses it
    that is no wrong call, which would concern this rank alone: a peer waits for the message."""
    if isinstance(problem, UsageError) and not isinstance(problem, GroupClosedError):
        return ended_by(reason_of(problem), problem.hint)
    return problem


class SenderThreads:
    """Sends arrays to each peer in order, on one thread each. The first failure is kept for the driver."""

    def __init__(self, backend: SendRecv, guard: Guard) -> None:
        self._backend = backend
        self._guard = guard
        self._lock = threading.Lock()
        self._queues: dict[int, deque[tuple[Array, int]]] = {}
        """What is still to be sent to each peer. A peer has an entry as long as its thread runs."""
        self.ended = guard.clock.parker()
        """Unparked at the end of each thread."""
        self.error: Exception | None = None

    def send(self, data: Array, peer: int, tag: int) -> None:
        """Queues one array, which must not change any more."""
        with self._lock:
            start = peer not in self._queues
            self._queues.setdefault(peer, deque()).append((data, tag))
        if start:
            try:
                self._guard.clock.start(lambda: self._run(peer), "ferrorpc-senders")
            except LimitExceededError:
                del self._queues[peer]  # as nobody will send it, nobody must wait for it
                raise

    def _run(self, peer: int) -> None:
        while True:
            with self._lock:
                if not self._queues[peer] or self.error is not None:
                    del self._queues[peer]
                    break
                data, tag = self._queues[peer].popleft()
            try:
                self._backend.send(data, peer, tag)
            except Exception as problem:  # noqa: BLE001  the driver raises it: a third party's send may raise anything
                self.error = _failure_of_send(problem)
        self.ended.unpark()

    def check(self) -> None:
        """Raises what stopped a thread."""
        if self.error is not None:
            raise self.error

    def peers(self) -> list[int]:
        """To whom a thread still sends."""
        with self._lock:
            return sorted(self._queues)


class Turns:
    """The order of one backend's sends and recvs. Those of one peer and tag are in a queue; its first is under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[Hashable, deque[Parker]] = {}

    def join(self, place: Hashable, turn: Parker) -> None:
        """Joins a queue, at its end."""
        with self._lock:
            self._queues.setdefault(place, deque()).append(turn)

    def is_first(self, place: Hashable, turn: Parker) -> bool:
        """Whether it is at the front of the queue. `turn` is unparked when it gets there."""
        return self._queues[place][0] is turn

    def leave(self, place: Hashable, turn: Parker) -> None:
        """Leaves the queue, at any place of it. Idempotent, and right as well where an interrupt kept it from joining."""
        with self._lock:
            queue = self._queues.get(place)
            if queue is None:
                return
            if turn in queue:
                queue.remove(turn)
            if queue:
                queue[0].unpark()
            else:
                del self._queues[place]


class BlockingExecution(Execution):
    """The base of these executions. They block in `advance`, so there is nothing to probe and nothing to free."""

    def __init__(self, backend: SendRecv, guard: Guard, label: str, peers: Sequence[int]) -> None:
        self.guard = guard
        self.results: list[Array] = []
        self.specs: list[TensorSpec] = []
        self._backend = backend
        self._label = label
        self._peers = list(peers)
        """What it waits for, as group ranks: any of these at first, then one after the other, then those it still sends to."""
        self._timers: WaitTimers | None = None
        """Of the whole operation; None while it has not had to wait."""

    @property
    def label(self) -> str:
        return self._label

    def waiting_on(self) -> list[int]:
        return [self._backend.world_ranks[peer] for peer in self._peers]

    def probe(self) -> None:
        """Does nothing: a backend with only send and recv has no probes."""

    def explain(self) -> str:
        return f"{self._label} waits for ranks {self.waiting_on()}"

    def timeout_error(self) -> FerroError:
        return CollectiveTimeoutError(self.waiting_on(), f"after {self.guard.seconds:g} s, {self.explain()}")

    def finish(self) -> None:
        self._timers = None  # which know it: a cycle would keep its arrays

    def check(self) -> None:
        """Raises what ends its waits before their time."""
        self.guard.latch.check()

    def park_until(self, is_over: Callable[[], bool], parker: Parker) -> None:
        """Waits until `is_over`, the deadline, or `check` raises. `parker` is unparked when it may be over."""
        self._timers = self._timers or WaitTimers(self)
        ticket = self.guard.latch.watch(parker.unpark)
        try:
            while not is_over():
                self.check()
                if not parker.park(self._timers.due()):
                    self._timers.act()
        finally:
            self.guard.latch.forget(ticket)

    def receive(self, src: int, tag: int, out: Array | None = None) -> Array:
        """A blocking recv until the deadline, or until `check` raises."""
        guard, self._peers = self.guard, [src]
        while True:
            self.check()
            now = guard.clock.now()
            seconds = min(max(0.0, guard.deadline - now), SLICE_SECONDS)
            try:
                return self._backend.recv(src, tag, out=out, timeout=seconds)
            except TimeoutError as late:
                if late.errno is not None:  # the network's, such as ETIMEDOUT of a host that is gone: no end of this wait
                    raise self.timeout_error() from late
            self._timers = self._timers or WaitTimers(self)
            self._timers.act()
            guard.clock.parker().park(now + seconds)  # a backend that waits too briefly must not be asked all the time


class BlockingPrepared(Prepared):
    """A call with its plan, run over `backend.send` and `backend.recv`."""

    def __init__(self, backend: SendRecv, call: Call, plan: Plan) -> None:
        self.backend = backend
        self.call = call
        self.plan = plan
        self.rules = Rules(call, plan, plan.actions, backend.rank, backend.size)

    def start(self, key: Key, inputs: Sequence[Array], outputs: Sequence[Array] | None, guard: Guard) -> Execution:
        return BlockingCollective(self, key, inputs, outputs, guard)


class BlockingCollective(BlockingExecution):
    """One run of a plan."""

    def __init__(
        self, prepared: BlockingPrepared, key: Key, inputs: Sequence[Array], outputs: Sequence[Array] | None, guard: Guard
    ) -> None:
        actions, rules = prepared.plan.actions, prepared.rules
        peers = {action.peer for action in actions if isinstance(action, Receive | Fold | FoldUnder)}
        super().__init__(prepared.backend, guard, f"{prepared.call.signature} #{key.number}", sorted(peers))
        self._actions = actions
        self._is_barrier = prepared.call.operation is Operation.BARRIER
        self._codec = rules.codec
        self._storages: set[np.dtype[Any]] | None = None
        """The dtypes of messages of a reduction; None if they may have any."""
        if rules.codec is not None:
            self._storages = {np.dtype(np.uint8)}
        elif rules.kernel is not None:
            self._storages = {rules.dtype.storage, rules.work_storage}
        self._key = key
        self._workspace = Workspace(rules, inputs, outputs)
        self._senders = SenderThreads(self._backend, guard)

    def check(self) -> None:
        super().check()
        self._senders.check()

    def timeout_error(self) -> FerroError:
        late = super().timeout_error()
        return BarrierTimeoutError(self.waiting_on(), late.message) if self._is_barrier else late

    def advance(self) -> bool:
        for index, action in enumerate(self._actions):
            self._senders.check()
            if isinstance(action, Send):
                self._senders.send(self._message(index, action), action.peer, message_tag(self._key, action.slot))
            elif isinstance(action, Receive | Fold | FoldUnder):
                self._take(action)
            else:
                self._workspace.apply(index, 0, self._workspace.elements(action))
        self.park_until(self._all_sent, self._senders.ended)
        self._senders.check()
        self.results, self.specs = self._workspace.results
        return True

    def _all_sent(self) -> bool:
        self._peers = self._senders.peers()
        return not self._peers

    def _message(self, index: int, action: Send) -> Array:
        """The contents of a send, as an array that does not change any more."""
        spec, values = self._workspace.outgoing(action.region)
        if self._codec is not None and values.size:
            return self._workspace.encoded(index, 0, values.size)
        return NUMPY.typed(values.copy().reshape(spec.shape), spec)

    def _take(self, action: Receive | Fold | FoldUnder) -> None:
        data = self.receive(action.peer, message_tag(self._key, action.slot))
        spec = TensorSpec(dtype_of(data.dtype), data.shape)
        self._check_fits(action, spec)
        flat = np.ascontiguousarray(data).reshape(-1).view(spec.dtype.storage)
        if self._codec is not None and flat.size:
            flat = self._codec.decode(flat, self._workspace.elements(action))
        self._workspace.accept(action, 0, flat)

    def _check_fits(self, action: Receive | Fold | FoldUnder, spec: TensorSpec) -> None:
        """Raises CollectiveMismatchError if this message cannot be part of this operation."""
        fits = spec.shape == (0,) or self._storages is None or spec.dtype.storage in self._storages
        if fits:
            try:
                self._workspace.expect(action.region, spec)
            except CodecError:
                fits = False
        if not fits:
            ranks = self._backend.world_ranks
            sent = f"another operation, which sends {spec}"
            raise CollectiveMismatchError({ranks[self._backend.rank]: self._label, ranks[action.peer]: sent})


class BlockingMessage(BlockingExecution):
    """The base of a blocking send and a blocking recv. `turns`: of its backend."""

    def __init__(self, backend: SendRecv, turns: Turns, guard: Guard, label: str, peer: int, tag: int) -> None:
        super().__init__(backend, guard, label, [peer])
        self._peer = peer
        self._tag = tag
        self._turns = turns
        self._place = type(self), peer, tag
        self._turn: Parker | None = None

    def queue_up(self) -> None:
        """Takes its place behind those that were called before. Its driver calls this on the caller's thread."""
        self._turn = self.guard.clock.parker()
        self._turns.join(self._place, self._turn)

    def await_turn(self) -> None:
        """Waits until those that were called before are over."""
        turn = self._turn
        if not (turn is None or self._turns.is_first(self._place, turn)):
            self.park_until(lambda: self._turns.is_first(self._place, turn), turn)

    def finish(self) -> None:
        super().finish()
        if self._turn is not None:
            self._turns.leave(self._place, self._turn)
            self._turn = None


class BlockingSend(BlockingMessage):
    """One blocking send."""

    def __init__(
        self, backend: SendRecv, turns: Turns, data: Array, spec: TensorSpec, dst: int, tag: int, guard: Guard
    ) -> None:
        label = f"send({spec} to rank {backend.world_ranks[dst]}, tag={tag})"
        super().__init__(backend, turns, guard, label, dst, tag)
        self._data = NUMPY.typed(data, spec)

    def advance(self) -> bool:
        self.await_turn()
        try:
            self._backend.send(self._data, self._peer, self._tag)
        except UsageError as refusal:
            raise _failure_of_send(refusal) from None
        return True


class BlockingRecv(BlockingMessage):
    """One blocking recv."""

    timeout_breaks = False

    def __init__(
        self, backend: SendRecv, turns: Turns, src: int, tag: int, out: Array | None, spec: TensorSpec | None, guard: Guard
    ) -> None:
        label = f"recv(from rank {backend.world_ranks[src]}, tag={tag})"
        super().__init__(backend, turns, guard, label, src, tag)
        self._out = out if out is None or spec is None else NUMPY.typed(out, spec)

    def advance(self) -> bool:
        self.await_turn()
        data = self.receive(self._peer, self._tag, self._out)
        if not isinstance(data, np.ndarray):
            text = f"{self.label}: {type(self._backend).__name__}.recv() has returned a {type(data).__name__}, not an array"
            raise FerroError(text, hint="return the array, also where out= is given")
        spec = TensorSpec(dtype_of(data.dtype), data.shape)
        self.results, self.specs = [data.view(spec.dtype.storage)], [spec]
        return True
