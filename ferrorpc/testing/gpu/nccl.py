"""A fake NCCL on fake GPUs, which behaves like NCCL where that determines what its caller must do.

What is modelled:

- A communicator is IN_PROGRESS until all ranks have joined with the same id, for ever if one never does. All must have the same
  version and each a GPU of its own.
- After each operation a communicator is IN_PROGRESS for some queries, more after the first one, when NCCL connects. Another
  thread of NCCL's launches meanwhile, so the operation is in its stream only when the state says so.
- Operations run in streams; those of one communicator in the order of their launches, whatever their streams. A rank that is
  alone only copies, in the order of its stream. Collectives that do not match on all ranks never complete, nor do sends without
  their receives. If the communicator is aborted, they end without a result: they leave anything in the memory that they were to
  write. So do those that NCCL's thread launches until it hears of the abort.
- A communicator that is IN_PROGRESS refuses all other calls. It is so during a split, and after it is finalized until its
  operations have completed. It cannot be split while operations are outstanding, and the child does not exist until all ranks
  have called split.
- A communicator with an error accepts only abort. An aborted one no longer exists.
- Sums start at a rank that depends on the element, as in a ring, so they are not in rank order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ferrorpc.backends.device.communicator import Communicator, DataType, Op, State, failed
from ferrorpc.backends.nccl.api import Features, NcclApi
from ferrorpc.testing.gpu.machine import STUCK_SECONDS, FakeStream, Gpu, GpuFault, Machine
from ferrorpc.testing.gpu.nccl_parts import Part, perform

ID_BYTES: Final = 128
LOOKS_TO_CONNECT: Final = 2
"""How many state queries return IN_PROGRESS after a communicator's first operation."""
LOOKS_TO_LAUNCH: Final = 10
"""As many after each later one, where there are other ranks: there NCCL launches from another thread, for one alone within the
call."""
STEP_SECONDS: Final = 0.02
"""How often an abort lets the GPU go on, which may be able to although nobody has made it go on."""
SPOILT: Final = 0x5A
"""The byte that an aborted operation leaves in its target."""


@dataclass
class Meeting:
    """The state that all ranks of one communicator share."""

    size: int
    ends: dict[int, FakeCommunicator] = field(default_factory=dict)
    arrived: dict[tuple[int, int], dict[int, Part]] = field(default_factory=dict)
    """(operation, part) -> the calls of the ranks whose streams have reached it, by rank."""
    mail: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)
    """(from, to) -> (source address, size in bytes) of sends that are not received yet."""
    splits: dict[int, dict[int, tuple[int | None, int]]] = field(default_factory=dict)
    children: dict[tuple[int, int], Meeting] = field(default_factory=dict)
    _was_complete: bool = False

    @property
    def complete(self) -> bool:
        """Whether all ranks have joined before any of them aborted."""
        ends = self.ends.values()
        self._was_complete = self._was_complete or (len(ends) == self.size and not any(end.aborted for end in ends))
        return self._was_complete


class FakeNccl:
    """The state that all communicators of one machine share. `api(rank)` gives each rank its NcclApi.

    Args:
        machine: the machine whose GPUs the ranks use: GPU `rank`, unless `api` gets another.
        version: the version of the library, unless `api` gets another.
    """

    def __init__(self, machine: Machine, version: int = 22809) -> None:
        self.machine = machine
        self.version = version
        self.meetings: dict[bytes, Meeting] = {}
        self.minted = 0
        self.absent: set[bytes] = set()
        """Ids whose communicators never become complete: every rank that joins waits."""
        self._lock = threading.Lock()

    def api(self, rank: int, *, gpu: int | None = None, version: int | None = None) -> FakeApi:
        """The API of one rank."""
        return FakeApi(self, self.machine.gpus[rank if gpu is None else gpu], version or self.version)

    def mint(self) -> bytes:
        """Creates a new id."""
        with self._lock:
            self.minted += 1
            return self.minted.to_bytes(8, "big") * (ID_BYTES // 8)


class _Thread(threading.local):
    """A thread's calls since ncclGroupStart; None outside a group."""

    grouped: list[tuple[FakeCommunicator, Part, int]] | None = None


class FakeApi(NcclApi):
    """`NcclApi` on one fake GPU."""

    name = "fake"

    def __init__(self, world: FakeNccl, gpu: Gpu, version: int, features: Features | None = None) -> None:
        self.world = world
        self.gpu = gpu
        self.version = version
        self.features = Features.of(version) if features is None else features
        self._thread = _Thread()
        self.broken_mint: Exception | None = None
        """An exception for `unique_id` to raise, to test what other ranks see then."""

    def unique_id(self) -> bytes:
        if self.broken_mint is not None:
            raise self.broken_mint
        return self.world.mint()

    def init(self, size: int, rank: int, unique_ids: Sequence[bytes]) -> Communicator:
        with self.world.machine.lock:
            meeting = self.world.meetings.setdefault(unique_ids[0], Meeting(size))
            if rank in meeting.ends or meeting.size != size:
                raise failed("ncclCommInitRank", State.INVALID_ARGUMENT, f"rank {rank} of {size} was there already")
            return FakeCommunicator(self, meeting, rank, completes=unique_ids[0] not in self.world.absent)

    def grouped(self, calls: Callable[[], object]) -> None:
        parts: list[tuple[FakeCommunicator, Part, int]] = []
        self._thread.grouped = parts
        try:
            calls()
        finally:
            self._thread.grouped = None
            for communicator in dict.fromkeys(entry[0] for entry in parts):
                mine = [(part, stream) for owner, part, stream in parts if owner is communicator]
                communicator.launch([part for part, _ in mine], mine[0][1])

    def call(self, communicator: FakeCommunicator, part: Part, stream: int) -> None:
        """Launches a call now, or adds it to the current group."""
        if self._thread.grouped is not None:
            self._thread.grouped.append((communicator, part, stream))
        else:
            communicator.launch([part], stream)


class FakeCommunicator(Communicator):
    """`Communicator` of one rank.

    Attributes:
        broken: an asynchronous error; tests set it to simulate network failures.
        aborted: whether `abort` was called.
        ended: how many launches have ended.
        stuck: makes `abort` block until this event is set, as bugs of NCCL have done.
    """

    def __init__(self, api: FakeApi, meeting: Meeting, rank: int, completes: bool = True) -> None:
        self.api = api
        self.rank = rank
        self.meeting = meeting
        self.broken: State | None = None
        self.aborted = False
        self.destroyed = False
        self.finalized = False
        self.stuck: threading.Event | None = None
        self.splits = 0
        self._completes = completes
        self._launches = 0
        self.ended = 0
        self._collectives = 0
        self._looks = 0
        """How many state queries return IN_PROGRESS from now on."""
        self._launching: list[tuple[FakeStream, _Task]] = []
        """What comes to its stream when these are over."""
        self._machine = api.world.machine
        meeting.ends[rank] = self

    @property
    def size(self) -> int:
        """The number of ranks in the communicator."""
        return self.meeting.size

    def state(self) -> State:
        with self._machine.lock:
            if self.aborted or self.destroyed:
                raise failed("ncclCommGetAsyncError", State.INVALID_ARGUMENT, "the communicator is gone")
            if self.broken is not None:
                return self.broken
            if not self._completes or not self.meeting.complete or self._is_splitting:
                return State.IN_PROGRESS
            if self._looks:
                self._looks -= 1
                if not self._looks:
                    self._put_into_streams()
                return State.IN_PROGRESS
            if self.finalized and self._running:
                self._machine.step()
                return State.IN_PROGRESS
            return State.INVALID_USAGE if self.last_error() else State.SUCCESS

    def _put_into_streams(self) -> None:
        self._looks = 0
        for stream, task in self._launching:
            stream.enqueue(task.run)
        self._launching.clear()

    @property
    def _is_splitting(self) -> bool:
        """Whether some rank has not called this rank's latest split yet."""
        return bool(self.splits) and len(self.meeting.splits[self.splits - 1]) < self.size

    def last_error(self) -> str:
        ends = list(self.meeting.ends.values())
        if len({end.api.version for end in ends}) > 1:
            return "Mismatched NCCL version detected"
        return "Duplicate GPU detected" if len({end.api.gpu.uuid for end in ends}) < len(ends) else ""

    def all_reduce(self, source: int, target: int, count: int, datatype: DataType, op: Op, stream: int) -> None:
        self.api.call(self, Part("all_reduce", source, target, count, datatype, op), stream)

    def reduce(self, source: int, target: int, count: int, datatype: DataType, op: Op, root: int, stream: int) -> None:
        self.api.call(self, Part("reduce", source, target, count, datatype, op, root), stream)

    def reduce_scatter(self, source: int, target: int, count: int, datatype: DataType, op: Op, stream: int) -> None:
        self.api.call(self, Part("reduce_scatter", source, target, count, datatype, op), stream)

    def broadcast(self, source: int, target: int, count: int, datatype: DataType, root: int, stream: int) -> None:
        self.api.call(self, Part("broadcast", source, target, count, datatype, None, root), stream)

    def all_gather(self, source: int, target: int, count: int, datatype: DataType, stream: int) -> None:
        self.api.call(self, Part("all_gather", source, target, count, datatype), stream)

    def send(self, source: int, count: int, datatype: DataType, peer: int, stream: int) -> None:
        self.api.call(self, Part("send", source, 0, count, datatype, None, peer), stream)

    def recv(self, target: int, count: int, datatype: DataType, peer: int, stream: int) -> None:
        self.api.call(self, Part("recv", 0, target, count, datatype, None, peer), stream)

    def grouped(self, calls: Callable[[], object]) -> None:
        self.api.grouped(calls)

    def split(self, color: int | None, key: int) -> Communicator | None:
        self._check("ncclCommSplit")
        with self._machine.lock:
            if self._running:
                raise failed("ncclCommSplit", State.INVALID_USAGE, "operations are outstanding")
            number, self.splits = self.splits, self.splits + 1
            asked = self.meeting.splits.setdefault(number, {})
            asked[self.rank] = (color, key)
            if color is None:
                return None
            return _Child(self, number, color)

    def abort(self) -> None:
        if self.stuck is not None:
            self.stuck.wait()
        machine, until = self._machine, time.monotonic() + STUCK_SECONDS
        with machine.lock:
            self.aborted = True
            self._put_into_streams()
            while self._running:  # like NCCL, which frees the memory of its kernels only after they end
                if not machine.step():
                    machine.moved.wait(STEP_SECONDS)
                if time.monotonic() >= until:
                    raise GpuFault(f"an abort waits for {self._running} launches, and nothing moves")

    def finalize(self) -> None:
        self._check("ncclCommFinalize")
        self.finalized = True

    def destroy(self) -> None:
        if not self.finalized:
            raise failed("ncclCommDestroy", State.INVALID_USAGE, "finalize was not called")
        self.destroyed = True

    def _check(self, call: str) -> None:
        """Refuses calls that NCCL refuses or that would break it."""
        if self.aborted or self.destroyed or self.finalized:
            raise failed(call, State.INVALID_ARGUMENT, "the communicator is gone")
        if self.broken is not None:
            raise failed(call, self.broken, "the communicator has met an error")
        if not self._completes or not self.meeting.complete or self._looks or self._is_splitting:
            raise failed(call, State.INVALID_USAGE, "the communicator is in progress")

    def launch(self, parts: list[Part], stream: int) -> None:
        """Queues calls as one launch."""
        for part in parts:
            self._check(f"nccl {part.kind}")
            if (part.source or part.target) and part.size_bytes > 1 << 40:
                raise failed(part.kind, State.INVALID_ARGUMENT, "count")
            # NCCL's kernel for it leaves the last elements of long arrays unwritten (2.28.9 on an H100: 3 of 100,003).
            if part.op is Op.MEAN and self.size == 1:
                raise GpuFault("NCCL was asked for the mean of one rank")
        with self._machine.lock:
            number = self._collectives
            if any(part.kind not in ("send", "recv") for part in parts):  # those concern two ranks alone
                self._collectives += 1
            fake: FakeStream = self.api.gpu.stream(stream)
            self._launching.append((fake, _Task(self, number, parts, after=self._launches if self.size > 1 else 0)))
            self._launches += 1
            if self._launches == 1:
                self._looks = LOOKS_TO_CONNECT
            elif self.size > 1:
                self._looks = LOOKS_TO_LAUNCH
            else:
                self._put_into_streams()

    @property
    def _running(self) -> int:
        return self._launches - self.ended


class _Child(FakeCommunicator):
    """A communicator that a split creates. It is complete once every rank of its parent has called split."""

    def __init__(self, parent: FakeCommunicator, number: int, color: int) -> None:
        self._parent = parent
        self._number = number
        self._color = color
        meeting = parent.meeting.children.setdefault((number, color), Meeting(0))
        super().__init__(parent.api, meeting, parent.rank)

    def state(self) -> State:
        asked = self._parent.meeting.splits[self._number]
        with self._machine.lock:
            if len(asked) < self._parent.size:
                raise failed("ncclCommGetAsyncError", State.INVALID_ARGUMENT, "there is no communicator before all have come")
            if not self.meeting.size:
                self._name(asked)
        return super().state()

    def _name(self, asked: dict[int, tuple[int | None, int]]) -> None:
        """Assigns its size and ranks, once every rank of the parent has called split."""
        ordered = sorted((key, rank) for rank, (color, key) in asked.items() if color == self._color)
        by_old, self.meeting.size, self.meeting.ends = self.meeting.ends, len(ordered), {}
        for new, (_, old) in enumerate(ordered):
            by_old[old].rank = new
            self.meeting.ends[new] = by_old[old]


class _Task:
    """One launch in a stream.

    Args:
        number: counts the launches of collectives.
        after: how many launches of its communicator it waits for.
    """

    def __init__(self, owner: FakeCommunicator, number: int, parts: list[Part], after: int) -> None:
        self._owner = owner
        self._number = number
        self._parts = parts
        self._after = after
        self._sent: list[tuple[tuple[int, int], tuple[int, int]]] = []
        self._done: set[int] = set()
        self._here = False

    def run(self) -> bool:
        """Returns True when every part has been matched on its ranks, or the communicator is aborted."""
        owner = self._owner
        if owner.aborted:
            owner.ended += 1
            self._take_back()
            self._spoil()
            return True
        if owner.ended < self._after:
            return False
        if not self._here:
            self._arrive()
        for place, part in enumerate(self._parts):
            if place not in self._done and self._meet(place, part):
                self._done.add(place)
        if len(self._done) < len(self._parts):
            return False
        owner.ended += 1
        return True

    def _arrive(self) -> None:
        self._here = True
        owner = self._owner
        for place, part in enumerate(self._parts):
            if part.kind == "send":
                entry = (part.source, part.size_bytes)
                owner.meeting.mail.setdefault((owner.rank, part.peer), []).append(entry)
                self._sent.append(((owner.rank, part.peer), entry))
            elif part.kind != "recv":
                self._give(part)
                owner.meeting.arrived.setdefault((self._number, place), {})[owner.rank] = part

    def _give(self, part: Part) -> None:
        """Copies the input of a rank that only sends. It then completes at once: NCCL buffers its values for late ranks."""
        rank, gpu = self._owner.rank, self._owner.api.gpu
        if (part.kind == "reduce" and part.peer != rank) or (part.kind == "broadcast" and part.peer == rank):
            part.given = part.elements(gpu, part.source, part.count).copy()
            if part.kind == "broadcast":
                part.elements(gpu, part.target, part.count)[:] = part.given

    def _take_back(self) -> None:
        """Withdraws the calls of an aborted rank, so that later ranks do not find them."""
        for route, entry in self._sent:
            if entry in self._owner.meeting.mail.get(route, []):
                self._owner.meeting.mail[route].remove(entry)
        for place in range(len(self._parts)):
            self._owner.meeting.arrived.get((self._number, place), {}).pop(self._owner.rank, None)

    def _spoil(self) -> None:
        """Overwrites what this rank was to receive and has not, as a kernel does that is told to end in the middle."""
        rank, gpu = self._owner.rank, self._owner.api.gpu
        for place, part in enumerate(self._parts):
            is_written = part.kind not in ("send", "reduce") or (part.kind == "reduce" and part.peer == rank)
            if is_written and part.given is None and place not in self._done:
                gpu.bytes_at(part.target, part.size_bytes)[:] = SPOILT

    def _meet(self, place: int, part: Part) -> bool:
        owner, meeting = self._owner, self._owner.meeting
        if part.kind == "send":
            route, entry = next(item for item in self._sent if item[0] == (owner.rank, part.peer))
            return entry not in meeting.mail[route]
        if part.kind == "recv":
            return self._receive(part)
        brought = meeting.arrived[self._number, place]
        if len(brought) == owner.size and len({each.agreed for each in brought.values()}) == 1:
            # The last rank to arrive does the work for all. The others' outputs stay valid, because their streams wait.
            perform([meeting.ends[rank].api.gpu for rank in range(owner.size)], brought)
            brought.clear()
            brought[-1] = part
        return part.given is not None or -1 in brought

    def _receive(self, part: Part) -> bool:
        owner, meeting = self._owner, self._owner.meeting
        waiting = meeting.mail.get((part.peer, owner.rank), [])
        if not waiting or waiting[0][1] != part.size_bytes:
            return False
        source, size_bytes = waiting.pop(0)
        owner.api.gpu.bytes_at(part.target, size_bytes)[:] = meeting.ends[part.peer].api.gpu.bytes_at(source, size_bytes)
        return True
