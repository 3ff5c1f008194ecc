"""A backend performs operations for one group of ranks. This is the extension point of ferrorpc.

A backend that has only `send`, `recv` and `barrier` gets every collective: `prepare` runs the plans over them. A backend with
something faster overrides `prepare`. All backends pass one contract suite (`ferrorpc.testing.contract`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NoReturn

import numpy as np

from ferrorpc.collectives.arena.arena import Arena
from ferrorpc.collectives.blocking import BlockingMessage, BlockingPrepared, BlockingRecv, BlockingSend, Turns
from ferrorpc.collectives.call import Call
from ferrorpc.collectives.driver import drive, drive_apart
from ferrorpc.collectives.execution import Execution, Prepared
from ferrorpc.collectives.prepared import prepare
from ferrorpc.collectives.select import explain
from ferrorpc.collectives.small_messages import SmallMessages
from ferrorpc.collectives.tuning import Tuning
from ferrorpc.coordination.base import Session
from ferrorpc.errors import BackendUnavailableError, UsageError
from ferrorpc.guard import SYSTEM_CLOCK, Clock, Guard, Latch
from ferrorpc.shared_property import shared_property
from ferrorpc.transports.closed_groups import Begun
from ferrorpc.types import TensorSpec
from ferrorpc.work import Work


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do beyond the contract."""

    device_arrays: bool = False
    """Takes GPU arrays where they are."""
    device_moves: bool = False
    """Its collectives move them from GPU to GPU, not through the host."""
    device: int | None = None
    """The number of this rank's GPU, where its collectives refuse the arrays of another one."""


class Backend(ABC):
    """Operations of one group. Ranks in arguments are group ranks.

    A backend must set `rank` and `size`; the rest has defaults, which are those of a world without a coordinator.

    Attributes:
        name: as in `group.backend`: "grpc", "simulated", "nccl", "hybrid", "cuda_ipc" or a third party's own.
        rank, size: of this group.
        world_ranks: world rank of each group rank; errors speak of these.
        group_id: 0 for the world. Tags are unique within one group: messages of another one must not be taken for its own.
        session: the session with the coordinator; None for a backend without one (no store, no reform).
        latch: trips when the generation ends, and ends it (`latch.end`).
        clock: used by every wait.
        timeout: default timeout of an operation, in seconds, also of a group that is made without one.
        arena: the shared-memory operations of this group; None where its ranks do not share memory.
        small_messages: this group's sends and recvs that need no execution; None where it has no such.
    """

    name: ClassVar[str] = "custom"
    rank: int
    size: int
    group_id: int = 0
    session: Session | None = None
    clock: Clock = SYSTEM_CLOCK
    timeout: float = 60.0
    arena: Arena | None = None
    small_messages: SmallMessages | None = None

    @cached_property
    def world_ranks(self) -> tuple[int, ...]:
        """World rank of each group rank; a backend that sets none is a world."""
        return tuple(range(self.size))

    @shared_property
    def latch(self) -> Latch:
        """Trips when the generation ends; a backend that sets none gets one that concerns this rank only."""
        return Latch()

    @property
    def world_size(self) -> int:
        """The group's size (the name other libraries use)."""
        return self.size

    @property
    def capabilities(self) -> Capabilities:
        """What this backend can do. By default nothing beyond the contract."""
        return Capabilities()

    @abstractmethod
    def send(self, data: np.ndarray[Any, Any], dst: int, tag: int = 0) -> None:
        """Sends an array; returns when `data` may be changed again. Receipt is not implied.

        It may wait for its peer, but has to raise once that is lost: nothing else ends it.
        """

    @abstractmethod
    def recv(
        self, src: int, tag: int = 0, out: np.ndarray[Any, Any] | None = None, timeout: float | None = None
    ) -> np.ndarray[Any, Any]:
        """The next array from `src` with this tag (first in, first out), in `out` when given.

        Raises:
            CollectiveTimeoutError: nothing came within `timeout` seconds; nothing is lost, a later recv gets it.
            TensorMismatchError: `out` does not fit; the message stays for the next recv.
        """

    @abstractmethod
    def barrier(self, timeout: float | None = None) -> None:
        """Returns when every rank has entered. Raises BarrierTimeoutError naming those that did not."""

    def close(self) -> None:
        """Finishes own work, says goodbye, frees everything. Idempotent; under 1 s once all that was sent has been received."""
        return

    def __getstate__(self) -> NoReturn:
        """Refuses: its lanes are this process's."""
        raise UsageError("a backend cannot be copied or pickled", hint="each rank makes its own")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} rank {self.rank} of {self.size}>"

    def prepare(self, call: Call) -> Prepared:
        """Validates a call, selects an algorithm and plans it, once per signature. The result runs every such call."""
        return prepare(call, self.rank, self.size, lambda known, plan: BlockingPrepared(self, known, plan), self.basis)

    @cached_property
    def basis(self) -> Tuning:
        """What the selection of algorithms depends on. A backend that sets none has the packaged cost table only."""
        return Tuning()

    def explain(self, call: Call) -> str:
        """The algorithm that runs a call, the reason, and the alternatives, a line each. Sends no message."""
        return explain(call, self.size, self.basis)

    def empty(self, spec: TensorSpec) -> np.ndarray[Any, Any]:
        """A new array in storage dtype, in the memory that this backend's lanes read fastest."""
        return np.empty(spec.shape, spec.dtype.storage)

    def start_send(self, data: np.ndarray[Any, Any], spec: TensorSpec, dst: int, tag: int, guard: Guard) -> Execution:
        """A send as an execution, for `send(async_op=True)`. `data` is C-contiguous in storage dtype."""
        return BlockingSend(self, self._turns, data, spec, dst, tag, guard)

    def start_recv(
        self, src: int, tag: int, out: np.ndarray[Any, Any] | None, spec: TensorSpec | None, guard: Guard
    ) -> Execution:
        """A recv as an execution; `spec` is what `out` holds. The result's own spec is in `execution.specs`."""
        return BlockingRecv(self, self._turns, src, tag, out, spec, guard)

    def run(self, execution: Execution) -> list[np.ndarray[Any, Any]]:
        """Drives an execution on the caller's thread until it is complete, its deadline passes or the generation ends.

        A failure other than a UsageError (and than a recv's timeout) breaks the generation; what is raised is the first
        cause kept by the coordinator, or this rank's own timeout.
        """
        if isinstance(execution, BlockingMessage):
            execution.queue_up()
        return drive(execution)

    def submit(self, execution: Execution, convert: Callable[[Execution], Any]) -> Work[Any]:
        """Hands an execution to another thread; the Work's result is `convert(execution)`, made where it is completed.

        Executions over blocking `send` and `recv` block it, so here each has a thread of its own.
        """
        if isinstance(execution, BlockingMessage):
            execution.queue_up()
        return drive_apart(execution, convert)

    @shared_property
    def _turns(self) -> Turns:
        return Turns()

    def split(self, ranks: Sequence[int], group_id: int) -> Backend:
        """The backend of a subgroup (group ranks of this one, this rank included). Local: sends no message. The group sets its
        `group_id`, `world_ranks`, `session`, `latch` and `clock`.

        Its messages have the tags that those of this group have, too, so they must be kept apart by the `group_id`, which no
        other group of the world has.
        """
        hint = f"use init_process_group(), or give {type(self).__name__} a method split"
        raise BackendUnavailableError(f"backend {self.name!r} has no subgroups", hint)

    def stay_out(self, ranks: Sequence[int], group_id: int) -> None:
        """Called on the ranks outside when these ranks `split`. For backends in which all ranks must take part.

        Raises:
            BackendUnavailableError: the backend has no `split`, so that the ranks inside get this error.
        """
        if type(self).split is Backend.split:
            self.split(ranks, group_id)

    def retire(self, begun: Sequence[Begun], reason: str) -> None:
        """Called before a subgroup is closed: this rank begins nothing of it any more.

        Backends that can do so tell the peers that wait for this rank in another operation, and drop what nobody will take.

        Args:
            begun: the numbers that this rank has begun in each stream. Stream 0 is program order.
            reason: the exception by which this rank left the subgroup, for those who wait; empty for none.
        """
        return

    def open_stream(self, stream: int) -> None:
        """Opens a stream of operations that ranks may start in different orders. All ranks call it at the same point."""
        return

    def synchronize(self, until: float) -> None:
        """Blocks the host until devices have finished this group's operations.

        Raises:
            CollectiveTimeoutError: they had not at clock time `until`.
        """
        return

    def renew(self, timeout: float) -> Backend:
        """The same kind of backend in the next generation (`group.reform`). Only world backends with a session can.

        Args:
            timeout: seconds until all of its ranks have come.
        """
        if self.session is None:
            reason = f"backend {self.name!r} has no coordinator, so its group cannot be formed again"
            raise BackendUnavailableError(reason, "use init_process_group()")
        hint = f"give {type(self).__name__} a method renew, or end this process with code 75 and let it be started again"
        raise BackendUnavailableError(f"backend {self.name!r} cannot be used in another generation", hint)
