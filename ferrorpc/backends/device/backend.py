"""The base of backends for arrays on GPUs: collectives by communicators, whose beginning and end are bounded and explained.

A communicator moves elements, and nothing else: it knows neither shapes nor tags nor who has died, and it waits without a
deadline. So each such group also has host lanes, a group of the same ranks over gRPC or shared memory. They carry small
messages: announcements, barriers, probes, and send and recv, whose messages have tags and describe themselves.

Arrays of a GPU go by the communicator, those of a host by the host lanes, with the algorithms, bits and compression they have
there. What the communicator lacks (operators, dtypes, `wire=`, `algorithm=`) goes by the host lanes too, through pinned memory.
All ranks must come to the same answer. Where every rank brings an array, each looks at its own: an array on a GPU here and on
a host there is a mismatch, which is found and explained like any other. Where only the root brings one (broadcast, scatter),
the root announces where it is.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Self

import numpy as np

from ferrorpc.arrays.device import Device, Stream, is_host
from ferrorpc.backends.base import Backend, Capabilities
from ferrorpc.backends.device.all_reduce import AllReducePrepared
from ferrorpc.backends.device.announcement import ROOT_DECIDES
from ferrorpc.backends.device.barrier import DeviceBarrier
from ferrorpc.backends.device.collective import CollectivePrepared
from ferrorpc.backends.device.communicator import Communicator, Connector, Split, reduction, required
from ferrorpc.backends.device.context import GroupContext
from ferrorpc.backends.device.departures import LEAVE_SECONDS, Departures
from ferrorpc.backends.device.ending import CLOSE_SECONDS, Ending, on_own_thread
from ferrorpc.backends.device.execution import DeviceExecution
from ferrorpc.backends.device.launch_queue import LaunchQueue, NumberedLaunchQueue
from ferrorpc.backends.device.raw import RawOperations
from ferrorpc.backends.device.work import DeviceWork
from ferrorpc.backends.message import MessageBackend
from ferrorpc.collectives import select
from ferrorpc.collectives.arena.arena import Arena
from ferrorpc.collectives.call import Call, Operation, in_ranks
from ferrorpc.collectives.execution import Execution, PointerAllReduce, Prepared, return_execution
from ferrorpc.collectives.progress import progress_of
from ferrorpc.errors import CollectiveTimeoutError, FerroError
from ferrorpc.guard import FOREVER, Guard
from ferrorpc.transports.closed_groups import Begun
from ferrorpc.types import TensorSpec
from ferrorpc.wire.frames import Key
from ferrorpc.work import Work

POLL_SECONDS: Final = 200e-6
WORLD: Final = "world"


class DeviceBackend(RawOperations, Backend):
    """One rank's backend. Every rank makes its own at the same time.

    Args:
        lanes: the same ranks' backend for host memory; closed with this one.
        device: this rank's GPU.
        connector: makes communicators.
        stream: where everything is launched, CuPy's or a CUDA stream as a number; None for a stream of the backend's own, of
            the highest priority, which does not wait for the legacy default stream.

    Raises:
        NcclError: the communicator could not be made; the message says who did not come or what each rank met.
    """

    def __init__(self, lanes: MessageBackend, device: Device, connector: Connector, *, stream: Any = None) -> None:
        own = _stream(device, stream)
        communicator = connector.connect(WORLD, lanes.world_ranks)
        program = LaunchQueue(communicator, *own)
        ending = Ending(lanes.clock, lanes.latch, device.beside_captures)
        self._set_up(GroupContext(lanes, device, program, Departures(lanes.session), ending), connector, stream, [])
        ending.add(communicator)

    def _set_up(self, context: GroupContext, connector: Connector, stream: Any, contexts: list[GroupContext]) -> None:
        lanes = context.lanes
        self.context = context
        self._contexts = contexts
        """Those of the world and its subgroups that are not closed."""
        contexts.append(context)
        self.lanes = lanes
        self.device = context.device
        self.session = lanes.session
        self.latch = lanes.latch
        self.clock = lanes.clock
        self.rank, self.size = lanes.rank, lanes.size
        self.world_ranks = lanes.world_ranks
        self.group_id = lanes.group_id
        self.timeout = lanes.timeout
        self.small_messages = lanes.small_messages
        self._connector = connector
        self._stream = stream
        self.reductions = {}

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(device_arrays=True, device_moves=True, device=self.device.index)

    @property
    def arena(self) -> Arena | None:  # type: ignore[override]
        return self.lanes.arena

    def prepare(self, call: Call) -> Prepared:
        if call.operation is Operation.BARRIER:
            return DeviceBarrier(self.context, self.lanes.prepare(call))
        if call.operation in ROOT_DECIDES and call.algorithm is None:
            # As messages, because the root's answer may come only after later operations have begun in shared memory.
            return self.prepare_on_device(call, self.lanes.prepare_as_messages(call))
        host = self.lanes.prepare(call)
        return RoutedPrepared(host, self.prepare_on_device(call)) if self._suits_device(call) else host

    def prepare_on_device(self, call: Call, on_host: Prepared | None = None) -> Prepared:
        """As `prepare`, by the communicator.

        Args:
            on_host: runs the call instead where the root announces that its arrays are on the host; None: those go to the GPU
                and back.
        """
        select.check(call)
        wanted = None if call.op is None else required(call.op, call.inputs[0].dtype, self._connector.library, self.size)
        kind = AllReducePrepared if call.operation is Operation.ALL_REDUCE else CollectivePrepared
        return kind(self.context, call, self._connector, wanted, on_host)

    def _suits_device(self, call: Call) -> bool:
        """Whether the communicator has everything that the call asks for."""
        if call.wire is not None or call.algorithm is not None:
            return False
        return call.op is None or reduction(call.op, call.inputs[0].dtype) is not None

    def explain(self, call: Call) -> str:
        host = self.lanes.explain(call)
        if call.operation is Operation.BARRIER:
            return host
        lacks = f"{call.signature}: {self._connector.library} has no such operation, so as on the host"
        on_device = self.explain_on_device(call) if self._suits_device(call) else lacks
        return f"on the host: {host}\non a GPU: {on_device}"

    def explain_on_device(self, call: Call) -> str:
        """As `explain`, for arrays that go by the communicator. Raises as `prepare`."""
        self.prepare(call)
        return f"{call.signature} on {in_ranks(self.size)}: {self._connector.explanation}"

    def empty(self, spec: TensorSpec) -> np.ndarray[Any, Any]:
        return self.lanes.empty(spec)

    def run(self, execution: Execution) -> list[Any]:
        if not isinstance(execution, DeviceExecution):
            return self.lanes.run(execution)
        results = self.context.drive(execution)
        if not execution.until_done:
            execution.ran()
        return results

    def submit(self, execution: Execution, convert: Callable[[Execution], Any]) -> Work[Any]:
        if not isinstance(execution, DeviceExecution):
            return self.lanes.submit(execution, convert)

        if convert is not return_execution:
            convert = partial(self._converted, convert)
        begun = not execution.until_done and (execution.end_event is not None or execution.begin())
        execution.until_done = True
        work = DeviceWork(self.clock, execution, convert)
        if not begun:
            return progress_of(self.clock).submit(execution, convert, work)
        execution.on_complete = work.on_complete
        self.context.watch(execution)
        return work

    def _converted(self, convert: Callable[[Execution], Any], execution: Execution) -> Any:
        with self.context.copying_to_host():
            return convert(execution)

    def start_send(self, data: Any, spec: TensorSpec, dst: int, tag: int, guard: Guard) -> Execution:
        """By the host lanes, whose messages have tags and need no matching recv; a GPU's array goes through pinned memory."""
        return self.lanes.start_send(data, spec, dst, tag, guard)

    def start_recv(self, src: int, tag: int, out: Any, spec: TensorSpec | None, guard: Guard) -> Execution:
        return self.lanes.start_recv(src, tag, out, spec, guard)

    def send(self, data: np.ndarray[Any, Any], dst: int, tag: int = 0) -> None:
        self.lanes.send(data, dst, tag)

    def recv(
        self, src: int, tag: int = 0, out: np.ndarray[Any, Any] | None = None, timeout: float | None = None
    ) -> np.ndarray[Any, Any]:
        return self.lanes.recv(src, tag, out, timeout)

    def barrier(self, timeout: float | None = None) -> None:
        """Blocks the host until this rank's GPU has finished what this group gave it, and every rank has called this."""
        guard = self.lanes.guard(timeout)
        self.synchronize(guard.deadline)
        self.lanes.barrier(max(0.0, guard.deadline - self.clock.now()))

    def synchronize(self, until: float) -> None:
        """Blocks the host until the GPU has finished what this group gave it.

        Raises:
            CollectiveTimeoutError: it has not by clock time `until`.
            FerroError: the generation's first cause.
        """
        parker = self.clock.parker()
        for polls in range(1 << 62):
            in_flight = self.context.in_flight()
            self.latch.check()  # afterwards, because what has failed is not in flight either
            if not in_flight:
                return
            for execution in in_flight:
                execution.try_complete()
            now = self.clock.now()
            if now >= until:
                labels = ", ".join(execution.label for execution in in_flight[:3])
                raise CollectiveTimeoutError([], f"the GPU had not done {labels} in time")
            if polls:
                parker.park(min(until, now + POLL_SECONDS))

    def open_stream(self, stream: int) -> None:
        """Makes the communicator for operations of streams, the first time. Every rank calls it at the same point."""
        if self.context.numbered is None:
            own = _stream(self.device, self._stream)
            communicator = self._part(f"streams of group {self.group_id:x}", range(self.size))
            self.context.numbered = NumberedLaunchQueue(communicator, *own)

    def split(self, ranks: Sequence[int], group_id: int) -> Backend:
        """The subgroup of these group ranks. The ranks outside call `stay_out` at the same time."""
        communicator = self._part(f"subgroup {group_id:x}", ranks)
        lanes = self.lanes.split(ranks, group_id)
        program = LaunchQueue(communicator, *_stream(self.device, self._stream))
        part = object.__new__(type(self))
        context = GroupContext(lanes, self.device, program, self.context.departures, self.context.ending)
        part._set_up(context, self._connector, self._stream, self._contexts)
        return part

    def stay_out(self, ranks: Sequence[int], group_id: int) -> None:
        split = self._connector.split
        if split is not None:
            self._divide(split, f"subgroup {group_id:x}", ranks)

    def _part(self, label: str, ranks: Sequence[int]) -> Communicator:
        """A communicator of some of this group's ranks."""
        split = self._connector.split
        if split is None:
            found: Communicator | None = self._connector.connect(label.replace(" ", "/"), self._world(ranks))
        else:
            found = self._divide(split, label, ranks)
        if found is None:
            raise AssertionError(f"{label} was made without this rank")
        self.context.ending.add(found)
        return found

    def _divide(self, split: Split, label: str, ranks: Sequence[int]) -> Communicator | None:
        """As `Split`, from the communicator of program order, in which nothing may be in flight."""
        own = ranks.index(self.rank) if self.rank in ranks else None
        self.synchronize(self.clock.now() + self.timeout)
        try:
            return split(self.context.program.communicator, label, self._world(ranks), own)
        except FerroError as error:
            self.latch.end(error)  # a communicator whose split failed, or does not end, takes nothing more
            raise

    def _world(self, ranks: Sequence[int]) -> list[int]:
        return [self.world_ranks[rank] for rank in ranks]

    def retire(self, begun: Sequence[Begun], reason: str) -> None:
        self.lanes.retire(begun, reason)

    def renew(self, timeout: float) -> Self:
        """The backend of the next generation, with new lanes and a new communicator."""
        until = self.clock.now() + timeout
        self._shut(until - timeout / 2)
        lanes = self.lanes.renew(max(timeout / 2, until - self.clock.now()))
        if not isinstance(lanes, MessageBackend):
            raise AssertionError(f"{lanes!r} is no message backend")
        try:
            return self._renewed(lanes)
        except BaseException:
            lanes.close()
            raise

    @abstractmethod
    def _renewed(self, lanes: MessageBackend) -> Self:
        """A new backend like this one over new lanes."""

    def close(self) -> None:
        self._shut(FOREVER)
        self.lanes.close()

    def _shut(self, until: float) -> None:
        """Ends what the group has on the GPU, by clock time `until`: results that callers have, until their own deadlines; then
        for at most CLOSE_SECONDS all that is left."""
        if self.context not in self._contexts:
            return
        contexts, mine = list(self._contexts), self.context.ending.communicators()
        if self.group_id:  # else also those of subgroups that were not closed
            queues = self.context.numbered, self.context.program
            contexts, mine = [self.context], [queue.communicator for queue in queues if queue is not None]
        if self.latch.cause is None:
            with contextlib.suppress(FerroError):  # what is still in flight is aborted with its communicator
                self._finish_joined(contexts, until)
            until = min(until, self.clock.now() + CLOSE_SECONDS)
            with contextlib.suppress(FerroError):
                self.synchronize(until)
            self._depart()
            if self.latch.cause is None:
                self.context.ending.close(mine, until)
        with contextlib.suppress(ValueError):  # another thread has just done the same
            self._contexts.remove(self.context)  # last: an interrupt leaves the rest to the next call

    def _finish_joined(self, contexts: Sequence[GroupContext], until: float) -> None:
        """Waits for the operations whose results callers have, until their deadlines, or until clock time `until`. Raises the
        generation's first cause."""
        parker = self.clock.parker()
        while left := [execution for context in contexts for execution in context.in_flight() if execution.is_joined]:
            self.latch.check()
            for execution in left:
                execution.try_complete()
            now = self.clock.now()
            if now >= min(until, max(execution.guard.deadline for execution in left)):
                return
            parker.park(now + POLL_SECONDS)

    def _depart(self) -> None:
        """Tells the other ranks which operations they no longer need this rank for."""
        departures = self.context.departures
        departures.close(self.group_id)
        if self.group_id == 0 and self.size > 1:
            on_own_thread(self.clock, self.device.beside_captures, departures.leave, self.clock.now() + LEAVE_SECONDS)


class RoutedPrepared(Prepared):
    """A call prepared for the host lanes and for the communicator; where the arrays are decides at each start.

    Args:
        host: by the host lanes.
        on_device: by the communicator.
    """

    def __init__(self, host: Prepared, on_device: Prepared) -> None:
        self.host = host
        self.on_device = on_device

    def for_pointers(self, device: Device) -> PointerAllReduce | None:
        return self.on_device.for_pointers(device)

    def start(self, key: Key, inputs: Sequence[Any], outputs: Sequence[Any] | None, guard: Guard) -> Execution:
        chosen = self.host if all(is_host(array) for array in inputs) else self.on_device
        return chosen.start(key, inputs, outputs, guard)


def _stream(device: Device, given: Any) -> tuple[Stream] | tuple[Stream, Callable[[], None]]:
    """The given stream and the check that no graph is captured from it, or a new stream, which only the library has."""
    if given is None:
        return (device.new_stream(),)
    stream = device.adopt(given)
    return stream, lambda: device.check_not_captured(stream, "group's")
