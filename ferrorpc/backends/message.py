"""The backend over transports: select an algorithm, build its plan, run the plan. Subclasses only choose the transport."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ferrorpc.arrays.kinds import NUMPY, spec_of, view, view_out
from ferrorpc.backends.base import Backend, Capabilities
from ferrorpc.collectives.algorithms.plan import Plan
from ferrorpc.collectives.arena import select as arena_select
from ferrorpc.collectives.arena.arena import Arena
from ferrorpc.collectives.arena.control_blocks import ControlBlocks
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.execution import Execution, Prepared
from ferrorpc.collectives.point_to_point import RecvExecution, SendExecution, SendQueues
from ferrorpc.collectives.prepared import PlanPrepared, prepare
from ferrorpc.collectives.progress import progress_of
from ferrorpc.collectives.ranks_and_tags import BACKEND_TAG_MAX, peer_of, tag_of
from ferrorpc.collectives.select import DEFAULT_TUNING, explain
from ferrorpc.collectives.small_messages import SmallMessages
from ferrorpc.collectives.tuning import Tuning
from ferrorpc.coordination.base import Session
from ferrorpc.errors import LimitExceededError
from ferrorpc.guard import Guard, seconds_of
from ferrorpc.transports.base import CLOSE_SECONDS, Transport
from ferrorpc.transports.closed_groups import Begun
from ferrorpc.types import TensorSpec
from ferrorpc.wire.frames import BARRIER_STREAM, Key
from ferrorpc.work import Work

Array = np.ndarray[Any, Any]


class MessageBackend(Backend):
    """Every operation as messages between ranks.

    Args:
        transport: the lanes of this generation.
        session: with the coordinator.
        timeout: default timeout of an operation, in seconds.
        ranks: world ranks of the group, in group order; None for the world.
        group_id: 0 for the world.
        control: this rank's control blocks, where its host shares memory. A group whose ranks are all there needs no messages.
        basis: what the selection of algorithms depends on, in this group.
    """

    def __init__(
        self,
        transport: Transport,
        session: Session,
        *,
        timeout: float = 60.0,
        ranks: Sequence[int] | None = None,
        group_id: int = 0,
        control: ControlBlocks | None = None,
        basis: Tuning = DEFAULT_TUNING,
    ) -> None:
        self.transport = transport
        self.session: Session = session
        self.latch = session.membership.latch
        self.clock = session.clock
        self.timeout = timeout
        self.group_id = group_id
        self.world_ranks = tuple(range(transport.size)) if ranks is None else tuple(ranks)
        self.size = len(self.world_ranks)
        self.rank = self.world_ranks.index(transport.rank)
        self.control = control
        self.basis = basis
        if control is not None and self.size > 1 and set(self.world_ranks) <= set(control.host_peers.ranks):
            self.arena = Arena(control, transport, group_id, self.world_ranks, session.described)
            transport.mailbox.register_lookup(group_id, self.arena.entered)
        self._send_queues = SendQueues()
        self.small_messages = SmallMessages(transport, group_id, self.world_ranks, self._send_queues, self.latch)
        self._barriers = itertools.count(1)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(device_arrays=True)

    def empty(self, spec: TensorSpec) -> Array:
        own = None if self.control is None else self.control.host_peers.own
        if own is not None and own.used_bytes + spec.nbytes <= own.size_bytes // 2:  # operations need the other half
            with suppress(LimitExceededError):  # there is room, but not in a row
                return own.empty(spec.shape, spec.dtype.storage)
        return super().empty(spec)

    def guard(self, timeout: float | None) -> Guard:
        """Deadline and latch of an operation that begins now. Raises UsageError."""
        return Guard(self.clock, self.latch, seconds_of(timeout, self.timeout))

    def prepare(self, call: Call) -> Prepared:
        in_memory = None if self.arena is None else arena_select.prepare(self.arena, self.basis.applied(call))
        return in_memory or self.prepare_as_messages(call)

    def prepare_as_messages(self, call: Call) -> Prepared:
        """As `prepare`, but not in shared memory: for calls that may begin later than calls that follow them."""
        return prepare(call, self.rank, self.size, self._run_plan, self.basis)

    def explain(self, call: Call) -> str:
        as_messages = explain(call, self.size, self.basis)
        shared = None if self.arena is None else arena_select.explain(self.basis.applied(call), self.size)
        return as_messages if shared is None else f"{shared}\nas messages it would be:\n{as_messages}"

    def _run_plan(self, call: Call, plan: Plan) -> Prepared:
        return PlanPrepared(self.transport, self.world_ranks, self.rank, call, plan, self.session.described)

    def start_send(self, data: Any, spec: TensorSpec, dst: int, tag: int, guard: Guard) -> Execution:
        return SendExecution(self.transport, self.group_id, self._send_queues, data, spec, self.world_ranks[dst], tag, guard)

    def start_recv(self, src: int, tag: int, out: Any, spec: TensorSpec | None, guard: Guard) -> Execution:
        return RecvExecution(self.transport, self.group_id, self.world_ranks[src], tag, out, spec, guard)

    def submit(self, execution: Execution, convert: Callable[[Execution], Any]) -> Work[Any]:
        """As `Backend.submit`. Its executions never block, so one thread interleaves those of all groups of the process."""
        return progress_of(self.clock).submit(execution, convert)

    def send(self, data: Any, dst: int, tag: int = 0) -> None:
        peer, tag, source = peer_of(dst, self.rank, self.size, "dst"), tag_of(tag, BACKEND_TAG_MAX), view(data)
        self.run(self.start_send(source.data, source.spec, peer, tag, self.guard(None)))

    def recv(self, src: int, tag: int = 0, out: Any = None, timeout: float | None = None) -> Array:
        peer, tag = peer_of(src, self.rank, self.size, "src"), tag_of(tag, BACKEND_TAG_MAX)
        place = None if out is None else view_out(out, spec_of(out))
        target, spec = (None, None) if place is None else (place.data, place.spec)
        execution = self.start_recv(peer, tag, target, spec, self.guard(timeout))
        found = self.run(execution)[0]  # this is `target` where there is one
        if place is None:
            return NUMPY.wrap(found, execution.specs[0])
        received: Array = place.commit()
        return received

    def barrier(self, timeout: float | None = None) -> None:
        guard = self.guard(timeout)
        key = Key(self.group_id, BARRIER_STREAM, next(self._barriers))
        self.run(self.prepare(Call(Operation.BARRIER)).start(key, [], None, guard))

    def retire(self, begun: Sequence[Begun], reason: str) -> None:
        self.transport.mailbox.retire(self.group_id, begun, reason)

    def split(self, ranks: Sequence[int], group_id: int) -> MessageBackend:
        """The subgroup of these group ranks, on the same lanes."""
        world = [self.world_ranks[rank] for rank in ranks]
        return _Subgroup(self, world, group_id)

    def close(self) -> None:
        try:
            self.transport.close(CLOSE_SECONDS)
        finally:
            if self.control is not None:
                self.control.close()


class _Subgroup(MessageBackend):
    """Part of a world, on the world's lanes: closing it frees nothing."""

    def __init__(self, parent: MessageBackend, world: Sequence[int], group_id: int) -> None:
        super().__init__(
            parent.transport,
            parent.session,
            timeout=parent.timeout,
            ranks=world,
            group_id=group_id,
            control=parent.control,
            basis=parent.basis.among([parent.world_ranks.index(rank) for rank in world]),
        )
        self.name = parent.name  # type: ignore[misc]

    def close(self) -> None:
        """Frees what only this group's operations used. The lanes belong to the world."""
        if self.arena is not None:
            self.arena.close()
