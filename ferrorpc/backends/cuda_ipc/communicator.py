"""One rank's end of a communicator whose ranks read each other's GPU memory (CUDA IPC), all on one host.

It has the interface of NCCL's communicators. Unlike those it works where ranks share one GPU, because none of its kernels waits
for another rank.

Idea. Reductions are pulled: every rank copies its part into its slab (rounds.py). Among few ranks each then folds all parts
itself, in one kernel. Among more, each folds one slice, publishes that in place of its own part, and copies the slices of the
others: a reduce-scatter and an all-gather (Rabenseifner, 2004), each with one pull. All fold in rank order, so they get the
same bits, which are those of the other backends.

Cost, in bytes of GPU memory read and written for n bytes of p ranks on one GPU: folding everything p * (p + 3) * n, in slices
about p * 5 * n; and for each slot of `slot_bytes` the host waits once, or twice in slices.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from ferrorpc.arrays.device import Device
from ferrorpc.arrays.staging import wait_for
from ferrorpc.backends.cuda_ipc.control_block import CLOSED
from ferrorpc.backends.cuda_ipc.peers import Own, Peer, part
from ferrorpc.backends.cuda_ipc.rounds import Messages, Rounds, Waits
from ferrorpc.backends.device.communicator import Communicator, DataType, Op, State, failed
from ferrorpc.backends.device.freeing import FREEING
from ferrorpc.errors import NcclError
from ferrorpc.guard import Clock
from ferrorpc.types import dtype_named

FOLD_ALL_RANKS_MAX: Final = 3
"""Up to so many ranks each fold everything: that takes one wait less, and up to 3 ranks fewer bytes."""
SLICE_BYTES: Final = 256
"""Slices begin at multiples of this."""
CLOSE_SECONDS: Final = 60.0
"""How long a rank that closes waits for the others to close its memory: their GPUs may be late."""
ABORT_SECONDS: Final = 2.0
"""How long a rank waits after an abort: others may be dead."""
TABLE_SECONDS: Final = 10.0
"""How long the GPU may take to copy a few addresses."""
_ITEM_BYTES: Final = {each: dtype_named(each.name.lower()).itemsize for each in DataType}
_ROUNDS: Final = "rounds"
_FOLDS: Final = {Op.SUM: "sum", Op.MEAN: "sum", Op.PRODUCT: "product", Op.MAX: "max", Op.MIN: "min"}


class IpcCommunicator(Communicator):
    """A communicator that is complete.

    Args:
        device: this rank's GPU.
        own: this rank's slab and events.
        peers: those of all other ranks, in rank order.
        release: frees the control block.

    Raises:
        CollectiveTimeoutError: the GPU does nothing.
    """

    def __init__(self, device: Device, clock: Clock, own: Own, peers: Sequence[Peer], release: Callable[[], None]) -> None:
        self.rank, self.size = own.rank, own.size
        self._device = device
        self._ipc = ipc = device.ipc
        self._clock = clock
        self._own = own
        self._peers = peers
        self._by_rank = {peer.rank: peer for peer in peers}
        self._release = release
        self._lock = threading.RLock()
        self._pending: deque[Waits] = deque()
        self._stream = 0
        """That of the latest operation: nothing else is asked for before that is wholly in its stream."""
        self._group: defaultdict[Hashable, list[Waits]] | None = None
        """What was called within `grouped`, by sequence: all rounds are one, and so are a peer's messages in one direction."""
        self._is_gone = False
        self._problem: NcclError | None = None
        self._rounds = Rounds(ipc, own, peers)
        self._messages = {peer.rank: Messages(ipc, own, peer) for peer in peers}
        bases = [own.base if place == own.rank else self._by_rank[place].base for place in range(own.size)]
        # In a stream of its own, so that it is there before any stream needs it, whatever the caller's stream holds.
        stream = device.new_stream()
        with device.on(stream):
            self._table: Any = device.folds.table(bases)
        wait_for(stream.record(), clock, TABLE_SECONDS)

    # -- the interface of a communicator -------------------------------------------------------------------------------

    def state(self) -> State:
        """As `Communicator.state`. Also continues operations that are not yet wholly in their streams."""
        with self._lock:
            if self._is_gone:
                raise failed("CUDA IPC", State.INVALID_USAGE, "the communicator was aborted or destroyed")
            if self._problem is not None:
                raise self._problem.again()
            if self._pending:
                with self._device.here():
                    self._advance()
            return State.IN_PROGRESS if self._pending else State.SUCCESS

    def _advance(self) -> None:
        try:
            while self._pending:
                for _ in self._pending[0]:
                    return
                self._pending.popleft()
        except BaseException as problem:
            # What was interrupted in the middle is over for its generator, but must not count as done.
            self._problem = failed("CUDA IPC", State.UNHANDLED_CUDA_ERROR, str(problem) or repr(problem))
            with suppress(self._ipc.error_class):  # a GPU that has failed reads nothing any more
                self._own.mark(self._stream)
            if isinstance(problem, self._ipc.error_class):
                raise self._problem.again() from None
            raise

    def last_error(self) -> str:
        """Nothing: errors that are raised say everything."""
        return ""

    def all_reduce(self, source: int, target: int, count: int, datatype: DataType, op: Op, stream: int) -> None:
        self._begin(_ROUNDS, self._all_reduce(source, target, count, datatype, op, stream), stream)

    def reduce(self, source: int, target: int, count: int, datatype: DataType, op: Op, root: int, stream: int) -> None:
        self._begin(_ROUNDS, self._reduce(source, target, count, datatype, op, root, stream), stream)

    def reduce_scatter(self, source: int, target: int, count: int, datatype: DataType, op: Op, stream: int) -> None:
        self._begin(_ROUNDS, self._reduce_scatter(source, target, count, datatype, op, stream), stream)

    def broadcast(self, source: int, target: int, count: int, datatype: DataType, root: int, stream: int) -> None:
        self._begin(_ROUNDS, self._broadcast(source, target, count * _ITEM_BYTES[datatype], root, stream), stream)

    def all_gather(self, source: int, target: int, count: int, datatype: DataType, stream: int) -> None:
        self._begin(_ROUNDS, self._all_gather(source, target, count * _ITEM_BYTES[datatype], stream), stream)

    def send(self, source: int, count: int, datatype: DataType, peer: int, stream: int) -> None:
        self._begin(("send", peer), self._messages[peer].send(source, count * _ITEM_BYTES[datatype], stream), stream)

    def recv(self, target: int, count: int, datatype: DataType, peer: int, stream: int) -> None:
        self._begin(("recv", peer), self._messages[peer].recv(target, count * _ITEM_BYTES[datatype], stream), stream)

    def grouped(self, calls: Callable[[], object]) -> None:
        """As `Communicator.grouped`: sequences of operations proceed side by side, the operations of each in order."""
        group: defaultdict[Hashable, list[Waits]] = defaultdict(list)
        self._group = group
        try:
            calls()
        finally:
            self._group = None
        with self._lock:
            self._pending.append(_side_by_side([itertools.chain.from_iterable(each) for each in group.values()]))
            self.state()

    def split(self, color: int | None, key: int) -> Communicator | None:
        """Not supported: each communicator is connected anew."""
        raise failed("CUDA IPC", State.INVALID_USAGE, "communicators are connected, not split")

    def finalize(self) -> None:
        """Does nothing: `destroy` waits for what is in flight."""

    def abort(self) -> None:
        """As `Communicator.abort`: what is not in its stream is dropped, and the GPU finishes the rest."""
        self._end(ABORT_SECONDS)

    def destroy(self) -> None:
        self._end(CLOSE_SECONDS)

    def _end(self, seconds: float) -> None:
        """Closes the others' memory once the GPU has finished reading it. Then it waits so long at most until the others have
        closed this rank's memory, and frees it; a peer that still has it open keeps it."""
        with self._lock:
            if self._is_gone:
                return
            self._is_gone = True
            self._pending.clear()
        try:
            with FREEING.begun() as may_run:
                if may_run:
                    self._own.settle()
            self._table = None
            part(self._own, self._peers, self._clock, seconds)
        except self._ipc.error_class as problem:
            self._own.words[CLOSED] = 1  # a GPU that has failed reads nothing any more: nobody has to wait for it
            raise failed("CUDA IPC", State.UNHANDLED_CUDA_ERROR, str(problem)) from None
        finally:
            self._release()

    # -- operations, as generators that yield while they wait for a word ----------------------------------------------------

    def _begin(self, sequence: Hashable, steps: Waits, stream: int) -> None:
        """Starts an operation, and does what can be done at once."""
        self._stream = stream
        if self._group is not None:
            self._group[sequence].append(steps)
            return
        with self._lock:
            self._pending.append(steps)
            self.state()

    def _all_reduce(self, source: int, target: int, count: int, datatype: DataType, op: Op, stream: int) -> Waits:
        item, rounds = _ITEM_BYTES[datatype], self._rounds
        digest = _digest("all_reduce", count, datatype, op)
        for first, size_bytes in _parts(count * item, rounds.slot_bytes):
            yield from rounds.begin(stream, digest)
            self._ipc.copy(self._own.base + rounds.offset, source + first, size_bytes, stream)
            rounds.publish()
            yield from rounds.gather()
            if self.size <= FOLD_ALL_RANKS_MAX:
                self._fold(rounds.offset, size_bytes, target + first, datatype, op, stream)
            else:
                yield from self._fold_slices(size_bytes, target + first, datatype, op, stream)
            rounds.leave()

    def _fold_slices(self, size_bytes: int, target: int, datatype: DataType, op: Op, stream: int) -> Waits:
        rounds = self._rounds
        step = -(-size_bytes // (self.size * SLICE_BYTES)) * SLICE_BYTES
        slices = [(min(rank * step, size_bytes), min((rank + 1) * step, size_bytes)) for rank in range(self.size)]
        first, last = slices[self.rank]
        self._fold(rounds.offset + first, last - first, self._own.base + rounds.offset + first, datatype, op, stream)
        rounds.publish(phase=1)
        self._ipc.copy(target + first, self._own.base + rounds.offset + first, last - first, stream)
        yield from rounds.gather(phase=1)
        for peer in self._peers:
            first, last = slices[peer.rank]
            self._ipc.copy(target + first, peer.base + rounds.offset + first, last - first, stream)

    def _reduce(self, source: int, target: int, count: int, datatype: DataType, op: Op, root: int, stream: int) -> Waits:
        item, rounds = _ITEM_BYTES[datatype], self._rounds
        digest = _digest("reduce", count, datatype, op, root)
        for first, size_bytes in _parts(count * item, rounds.slot_bytes):
            yield from rounds.begin(stream, digest)
            self._ipc.copy(self._own.base + rounds.offset, source + first, size_bytes, stream)
            rounds.publish()
            if self.rank == root:
                yield from rounds.gather()
                self._fold(rounds.offset, size_bytes, target + first, datatype, op, stream)
            rounds.leave()

    def _reduce_scatter(self, source: int, target: int, count: int, datatype: DataType, op: Op, stream: int) -> Waits:
        item, rounds = _ITEM_BYTES[datatype], self._rounds
        digest = _digest("reduce_scatter", count, datatype, op)
        most = rounds.slot_bytes // self.size // SLICE_BYTES * SLICE_BYTES
        for first, size_bytes in _parts(count * item, most):
            yield from rounds.begin(stream, digest)
            for peer in range(self.size):
                place = self._own.base + rounds.offset + peer * most
                self._ipc.copy(place, source + peer * count * item + first, size_bytes, stream)
            rounds.publish()
            yield from rounds.gather()
            self._fold(rounds.offset + self.rank * most, size_bytes, target + first, datatype, op, stream)
            rounds.leave()

    def _broadcast(self, source: int, target: int, size_bytes: int, root: int, stream: int) -> Waits:
        rounds = self._rounds
        digest = _digest("broadcast", size_bytes, root)
        for first, part_bytes in _parts(size_bytes, rounds.slot_bytes):
            yield from rounds.begin(stream, digest)
            if self.rank == root:
                self._ipc.copy(self._own.base + rounds.offset, source + first, part_bytes, stream)
            rounds.publish()
            if self.rank != root:
                peer = self._by_rank[root]
                yield from rounds.gather(peers=[peer])
                self._ipc.copy(target + first, peer.base + rounds.offset, part_bytes, stream)
            rounds.leave()
        if self.rank == root:
            self._ipc.copy(target, source, size_bytes, stream)

    def _all_gather(self, source: int, target: int, size_bytes: int, stream: int) -> Waits:
        rounds = self._rounds
        digest = _digest("all_gather", size_bytes)
        for first, part_bytes in _parts(size_bytes, rounds.slot_bytes):
            yield from rounds.begin(stream, digest)
            self._ipc.copy(self._own.base + rounds.offset, source + first, part_bytes, stream)
            rounds.publish()
            yield from rounds.gather()
            for peer in self._peers:
                place = target + peer.rank * size_bytes + first
                self._ipc.copy(place, peer.base + rounds.offset, part_bytes, stream)
            rounds.leave()
        self._ipc.copy(target + self.rank * size_bytes, source, size_bytes, stream)

    def _fold(self, offset: int, size_bytes: int, target: int, datatype: DataType, op: Op, stream: int) -> None:
        """Folds what is at `offset` in every rank's slab."""
        if not size_bytes:
            return
        with self._device.on(self._device.adopt(stream)):
            self._device.folds.fold(
                kernel_of(op, datatype),
                self._table,
                offset,
                size_bytes // _ITEM_BYTES[datatype],
                size_bytes,
                target,
                float(self.size) if op is Op.MEAN else 1.0,
            )


def kernel_of(op: Op, datatype: DataType) -> str:
    """The name of the kernel for an operator and an element type."""
    return f"fold_{_FOLDS[op]}_{datatype.name.lower()}"


def _parts(size_bytes: int, most: int) -> Iterator[tuple[int, int]]:
    """The offset and size of each part of at most so many bytes."""
    for first in range(0, size_bytes, most):
        yield first, min(most, size_bytes - first)


def _side_by_side(sequences: list[Waits]) -> Waits:
    """Continues each sequence as far as it can, until all are over."""
    waiting = sequences
    while waiting := [each for each in waiting if not _is_over(each)]:
        yield


def _is_over(sequence: Waits) -> bool:
    return next(sequence, True) is True


def _digest(*what: Any) -> int:
    """A number that is equal on all ranks that make the same call."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "little") >> 1
