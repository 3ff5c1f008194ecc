"""The backend for arrays on GPUs: collectives by NCCL, whose beginning and end are bounded and explained.

NCCL moves elements, and nothing else: it does not know shapes, tags or who has died, and it waits for ever. So every NCCL group
stands on host lanes (a group over gRPC or shared memory of the same ranks), which bring small things: announcements, barriers,
probes, and send and recv, whose messages have tags and describe themselves.

Sums are added in NCCL's own order: equal on all ranks, but not the left fold of the other backends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from ferrorpc.arrays.device import Device, Stream
from ferrorpc.backends.base import Backend, Capabilities
from ferrorpc.backends.message import MessageBackend
from ferrorpc.backends.nccl.api import Communicator, Connects, NcclApi, required
from ferrorpc.backends.nccl.barrier import SettledBarrier
from ferrorpc.backends.nccl.connect import Connector
from ferrorpc.backends.nccl.departures import LEAVE_SECONDS, Departures
from ferrorpc.backends.nccl.ending import CLOSE_SECONDS, Ending, apart
from ferrorpc.backends.nccl.execution import NcclPrepared
from ferrorpc.backends.nccl.identity import exchange, own_identity
from ferrorpc.backends.nccl.launched import Launched
from ferrorpc.backends.nccl.lineup import Lineup, NumberedLineup
from ferrorpc.backends.nccl.raw import RawOperations
from ferrorpc.backends.nccl.reduction import NcclReduction
from ferrorpc.backends.nccl.site import Site
from ferrorpc.backends.nccl.work import DeviceWork
from ferrorpc.collectives import select
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.execution import Execution, Prepared, as_it_is
from ferrorpc.collectives.progress import progress_of
from ferrorpc.coordination.base import Session
from ferrorpc.errors import CollectiveTimeoutError, FerroError, UsageError
from ferrorpc.guard import Guard
from ferrorpc.types import TensorSpec
from ferrorpc.work import Work

LOOK_SECONDS: Final = 200e-6
WORLD: Final = "world"


class NcclBackend(RawOperations, Backend):
    """One rank's backend. Made by every rank at the same time.

    Args:
        lanes: the same ranks' backend for host memory; closed with this one.
        device: this rank's GPU.
        api: the binding of NCCL.
        connector: makes communicators; None makes one of the binding, with its deadlines.
        stream: where everything is launched, CuPy's or a CUDA stream as a number; None for one of the backend's own, of the
            highest priority, that waits for nothing it does not have to.
        ending: how communicators end; None for the default, whose last resort is to end the process.

    Raises:
        BackendUnavailableError: two ranks have one GPU, or their versions of NCCL differ; all of them are named.
        NcclError: the communicator did not come about; the message says who did not come or what each rank met.
    """

    name = "nccl"

    def __init__(
        self,
        lanes: MessageBackend,
        device: Device,
        api: NcclApi,
        *,
        connector: Connects | None = None,
        stream: Any = None,
        ending: Ending | None = None,
    ) -> None:
        line = session_of(lanes)
        connector = Connector(api, line, device.here) if connector is None else connector
        self._introduce(line, device, api, lanes.timeout)
        communicator = connector.connect(WORLD, lanes.world_ranks)
        site = Site(lanes, device, Lineup(communicator, _stream(device, stream)), Departures(line))
        self._set_up(site, api, connector, stream)
        self._ending = Ending(lanes.clock, lanes.latch, device.here) if ending is None else ending
        self._ending.add(communicator)

    def _introduce(self, line: Session, device: Device, api: NcclApi, timeout: float) -> None:
        """Ranks tell each other what would keep them apart, before they begin."""
        exchange(line, own_identity(device.uuid, api.version, api.name), timeout)

    def _set_up(self, site: Site, api: NcclApi, connector: Connects, stream: Any) -> None:
        lanes = site.lanes
        self.site = site
        self.lanes = lanes
        self.device = site.device
        self.api = api
        self.session = lanes.session
        self.latch = lanes.latch
        self.clock = lanes.clock
        self.rank, self.size = lanes.rank, lanes.size
        self.world_ranks = lanes.world_ranks
        self.group_id = lanes.group_id
        self.timeout = lanes.timeout
        self._connector = connector
        self._stream = stream
        self._closed = False
        self.reductions = {}

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(device_arrays=True, device_moves=True)

    def prepare(self, call: Call) -> Prepared:
        if call.operation is Operation.BARRIER:
            return SettledBarrier(self.site, self.lanes.prepare(call))
        if call.wire is not None or call.algorithm is not None:
            raise UsageError(
                f"NCCL chooses its own algorithm and compresses nothing, so {call.signature} is not for it",
                hint="leave wire= and algorithm= away, or use backend='hybrid', which takes such calls through the host",
            )
        select.check(call)
        reduction = None if call.op is None else required(call.op, call.inputs[0].dtype, self.api.features)
        laid_out = NcclReduction if call.operation is Operation.ALL_REDUCE else NcclPrepared
        return laid_out(self.site, call, self.api.library, reduction, self.instead(call))

    def instead(self, call: Call) -> Prepared | None:
        """What runs the call where the root announces that its arrays are on the host; None: they go to the GPU and back."""
        return None

    def explain(self, call: Call) -> str:
        if call.operation is Operation.BARRIER:
            return self.lanes.explain(call)
        self.prepare(call)
        return f"{call.signature} on {self.size} ranks: {self._explained()}"

    def _explained(self) -> str:
        return f"by NCCL {self.api.version} through {self.api.name}, which chooses how"

    def empty(self, spec: TensorSpec) -> np.ndarray[Any, Any]:
        return self.lanes.empty(spec)

    def run(self, execution: Execution) -> list[Any]:
        if not isinstance(execution, Launched):
            return self.lanes.run(execution)
        execution.until_done = not execution.gives_device_arrays
        results = self.site.drive(execution)
        if not execution.until_done and execution.mark is not None:
            execution.join(execution.caller)
            self.site.see_off(execution)
        return results

    def submit(self, execution: Execution, convert: Callable[[Execution], Any]) -> Work[Any]:
        if not isinstance(execution, Launched):
            return self.lanes.submit(execution, convert)

        if convert is not as_it_is:
            convert = partial(self._converted, convert)
        execution.until_done = not execution.gives_device_arrays
        begun = not execution.until_done and execution.begin()
        execution.until_done = True
        work = DeviceWork(self.clock, execution, convert)
        if not begun:
            return progress_of(self.clock).submit(execution, self.abort, convert, work)
        execution.told = work.landed
        self.site.see_off(execution)
        return work

    def _converted(self, convert: Callable[[Execution], Any], execution: Execution) -> Any:
        with self.site.homewards():
            return convert(execution)

    def start_send(self, data: Any, spec: TensorSpec, dst: int, tag: int, guard: Guard) -> Execution:
        """By the host lanes, whose messages have tags and wait for nobody; a GPU's array goes through pinned memory."""
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
        """Blocks the host until this rank's GPU has done what this group gave it, and every rank has come here."""
        guard = Guard(self.clock, self.latch, self.timeout if timeout is None else timeout)
        self.synchronize(guard.deadline)
        self.lanes.barrier(guard.deadline - self.clock.now())

    def synchronize(self, until: float) -> None:
        """Blocks the host until the GPU has done what this group gave it.

        Raises:
            CollectiveTimeoutError: not by clock time `until`.
            FerroError: the generation's first cause.
        """
        parker = self.clock.parker()
        for look in range(1 << 62):
            flying = self.site.in_flight()
            self.latch.check()  # afterwards, for what has ended is not in flight either
            if not flying:
                return
            for execution in flying:
                execution.land()
            now = self.clock.now()
            if now >= until:
                labels = ", ".join(execution.label for execution in flying[:3])
                raise CollectiveTimeoutError([], f"the GPU had not done {labels} in time")
            if look:
                parker.park(min(until, now + LOOK_SECONDS))

    def open_stream(self, stream: int) -> None:
        """A communicator for operations of streams, the first time; every rank comes here at the same point of its program."""
        if self.site.numbered is None:
            own = _stream(self.device, self._stream)
            communicator = self._part(f"streams of group {self.group_id:x}", list(range(self.size)), self.rank)
            self.site.numbered = NumberedLineup(communicator, own)

    def split(self, ranks: Sequence[int], group_id: int) -> Backend:
        """The subgroup of these group ranks. The ranks outside call `stay_out` at the same time."""
        label = f"subgroup {group_id:x}"
        communicator = self._part(label, list(ranks), list(ranks).index(self.rank))
        return self._of_part(self.lanes.split(ranks, group_id), communicator)

    def _of_part(self, lanes: MessageBackend, communicator: Any) -> NcclBackend:
        """This backend for part of its ranks, on a communicator of their own: what suits NCCL is told as here."""
        part = object.__new__(type(self))
        program = Lineup(communicator, _stream(self.device, self._stream))
        part._set_up(Site(lanes, self.device, program, self.site.departures), self.api, self._connector, self._stream)
        part._ending = self._ending
        return part

    def stay_out(self, ranks: Sequence[int], group_id: int) -> None:
        if self.api.features.split:
            self._divide(f"subgroup {group_id:x}", self._world(ranks), None)

    def _part(self, label: str, ranks: list[int], own: int) -> Any:
        """A communicator of some of this group's ranks."""
        world = self._world(ranks)
        if self.api.features.split:
            found = self._divide(label, world, own)
        else:
            found = self._connector.connect(label.replace(" ", "/"), world)
        if found is None:
            raise AssertionError(f"{label} came about without this rank")
        self._ending.add(found)
        return found

    def _divide(self, label: str, world: list[int], own: int | None) -> Communicator | None:
        """As `Connector.split`, of the communicator of program order, in which nothing may be outstanding."""
        self.synchronize(self.clock.now() + self.timeout)
        try:
            return self._connector.split(self.site.program.communicator, label, world, own)
        except FerroError as error:
            self.abort(error)  # NCCL takes nothing more of a communicator whose division failed, or does not end
            raise

    def _world(self, ranks: Sequence[int]) -> list[int]:
        return [self.world_ranks[rank] for rank in ranks]

    def abort(self, cause: FerroError) -> None:
        self.lanes.abort(cause)

    def renew(self, timeout: float) -> NcclBackend:
        """The next generation's: new lanes, a new id, a new communicator."""
        self._shut(self.clock.now() + CLOSE_SECONDS)
        lanes = self.lanes.renew(timeout)
        if not isinstance(lanes, MessageBackend):
            raise AssertionError(f"{lanes!r} is no message backend")
        return type(self)(lanes, self.device, self.api, stream=self._stream)

    def close(self) -> None:
        self._shut(self.clock.now() + CLOSE_SECONDS)
        self.lanes.close()

    def _shut(self, until: float) -> None:
        if self._closed:
            return
        self._closed = True
        mine = [lineup.communicator for lineup in (self.site.program, self.site.numbered) if lineup is not None]
        if self.group_id == 0:
            mine = self._ending.communicators()  # those of subgroups that nobody closed, too
        if self.latch.cause is None:
            with contextlib.suppress(FerroError):  # what is still in flight is aborted with its communicator
                self.synchronize(until)
            self._depart()
            if self.latch.cause is None:
                self._ending.close(mine, until)

    def _depart(self) -> None:
        """Whoever comes to the same operations later need not look for this rank."""
        departures = self.site.departures
        departures.close(self.group_id)
        if self.group_id == 0 and self.size > 1:
            apart(self.clock, self.device.here, departures.leave, self.clock.now() + LEAVE_SECONDS)


def session_of(lanes: MessageBackend) -> Session:
    """The line to the coordinator."""
    if lanes.session is None:
        raise AssertionError("a message backend always has a session")
    return lanes.session


def _stream(device: Device, given: Any) -> Stream:
    """Where everything is launched: the caller's stream, or one of the backend's own."""
    return device.new_stream() if given is None else device.adopt(given)
