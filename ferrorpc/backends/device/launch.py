"""Translates each collective into calls of a communicator, once all arrays are on the GPU and all shapes are known.

A communicator has all_reduce, reduce, broadcast, and all_gather and reduce_scatter of even parts. The others are groups of
sends and receives, or of reduces and broadcasts, launched as one. Moves are moves of bytes, so they take every dtype. No rank
calls anything for arrays without elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ferrorpc.arrays.device import Device, DeviceArray, Stream
from ferrorpc.backends.device.announcement import Announced
from ferrorpc.backends.device.communicator import Communicator, DataType, Op
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.types import TensorSpec

BYTES: Final = DataType.UINT8


@dataclass(slots=True)
class Launch:
    """One operation on one rank.

    Attributes:
        sources: this rank's inputs, on the GPU.
        targets: where results go, on the GPU, as `results_of` lists them.
        reduction: as `communicator.reduction` returns it; None for moves.
        scratch: memory for the communicator's stream alone.
        after: copies (target, source) on the GPU to be queued once the communicator has launched everything.
    """

    communicator: Communicator
    device: Device
    stream: Stream
    rank: int
    size: int
    call: Call
    sources: Sequence[DeviceArray]
    targets: Sequence[DeviceArray]
    reduction: tuple[Op, DataType, int] | None
    scratch: list[DeviceArray] = field(default_factory=list)
    after: list[tuple[DeviceArray, DeviceArray]] = field(default_factory=list)

    def run(self) -> None:
        """Launches it. The communicator may finish that later: its state tells. Raises NcclError."""
        _LAUNCHES[self.call.operation](self)

    def address(self, array: DeviceArray) -> int:
        """The address of an array."""
        return self.device.pointer(array)

    def room(self, size_bytes: int) -> DeviceArray:
        """So many bytes of scratch memory."""
        self.scratch.append(self.device.empty((size_bytes,), np.dtype(np.uint8), self.stream))
        return self.scratch[-1]

    def reduced(self) -> tuple[Op, DataType, int]:
        """`reduction` of a call that has one."""
        if self.reduction is None:
            raise AssertionError(f"{self.call.signature} reduces nothing")
        return self.reduction

    def root(self) -> int:
        """The root of a call that has one."""
        if self.call.root is None:
            raise AssertionError(f"{self.call.signature} has no root")
        return self.call.root

    def send(self, array: DeviceArray, peer: int) -> None:
        """Sends to another rank. For this rank it does nothing: its own part is copied by `keep`."""
        if array.nbytes and peer != self.rank:
            self.communicator.send(self.address(array), array.nbytes, BYTES, peer, self.stream.pointer)

    def recv(self, array: DeviceArray, peer: int) -> None:
        """Receives from another rank; as `send` for this one."""
        if array.nbytes and peer != self.rank:
            self.communicator.recv(self.address(array), array.nbytes, BYTES, peer, self.stream.pointer)

    def adjoin(self, arrays: Sequence[DeviceArray]) -> bool:
        """Whether arrays of equal size lie one after the other."""
        first, step = self.address(arrays[0]), arrays[0].nbytes
        return all(self.address(array) == first + place * step for place, array in enumerate(arrays))

    def packed(self, arrays: Sequence[DeviceArray]) -> DeviceArray:
        """A copy of arrays of equal size, one after the other in scratch memory."""
        step = arrays[0].nbytes
        block = self.room(len(arrays) * step)
        for place, array in enumerate(arrays):
            self.device.copy(block[place * step : (place + 1) * step], array, self.stream)
        return block

    def keep(self, target: DeviceArray, source: DeviceArray) -> None:
        """Copies this rank's own part to its place."""
        if source.nbytes and self.address(target) != self.address(source):
            self.device.copy(target, source, self.stream)


def results_of(call: Call, rank: int, everyones: Sequence[Announced]) -> list[TensorSpec]:
    """The dtype and shape of each result of this rank."""
    operation, root = call.operation, call.root or 0
    if operation is Operation.ALL_REDUCE:
        return [call.inputs[0]]
    if operation is Operation.REDUCE:
        return [call.inputs[0]] if rank == root else []
    if operation is Operation.REDUCE_SCATTER:
        return [call.inputs[rank]]
    if operation is Operation.BROADCAST:
        return [everyones[root].specs[0]]
    if operation is Operation.SCATTER:
        return [everyones[root].specs[rank]]
    if operation is Operation.ALL_TO_ALL:
        return [each.specs[rank] for each in everyones]
    if operation is Operation.ALL_GATHER or rank == root:
        return [each.specs[0] for each in everyones]
    return []


def _all_reduce(launch: Launch) -> None:
    (source,), (target,) = launch.sources, launch.targets
    op, datatype, factor = launch.reduced()
    if source.size:
        launch.communicator.all_reduce(
            launch.address(source), launch.address(target), factor * source.size, datatype, op, launch.stream.pointer
        )


def _reduce(launch: Launch) -> None:
    _reduce_to(launch, launch.sources[0], launch.root())


def _reduce_to(launch: Launch, source: DeviceArray, root: int) -> None:
    op, datatype, factor = launch.reduced()
    target = launch.address(launch.targets[0]) if root == launch.rank else launch.address(source)
    if source.size:
        launch.communicator.reduce(
            launch.address(source), target, factor * source.size, datatype, op, root, launch.stream.pointer
        )


def _reduce_scatter(launch: Launch) -> None:
    """Even parts by one reduce_scatter from one block, uneven ones by a group of reduces. All ranks know which it is."""
    op, datatype, factor = launch.reduced()
    sources, target = launch.sources, launch.targets[0]
    if len({math.prod(spec.shape) for spec in launch.call.inputs}) > 1:
        for root, source in enumerate(sources):
            _reduce_to(launch, source, root)
    elif target.size:
        block = sources[0] if launch.adjoin(sources) else launch.packed(sources)
        launch.communicator.reduce_scatter(
            launch.address(block), launch.address(target), factor * target.size, datatype, op, launch.stream.pointer
        )


def _broadcast(launch: Launch) -> None:
    _broadcast_from(launch, launch.root(), launch.targets[0])


def _broadcast_from(launch: Launch, root: int, target: DeviceArray) -> None:
    source = launch.sources[0] if launch.rank == root else target
    if target.nbytes:
        launch.communicator.broadcast(
            launch.address(source), launch.address(target), target.nbytes, BYTES, root, launch.stream.pointer
        )


def _scatter(launch: Launch) -> None:
    root = launch.root()
    if launch.rank == root:
        for peer, source in enumerate(launch.sources):
            launch.send(source, peer)
        launch.keep(launch.targets[0], launch.sources[root])
    else:
        launch.recv(launch.targets[0], root)


def _gather(launch: Launch) -> None:
    root = launch.root()
    if launch.rank == root:
        for peer, target in enumerate(launch.targets):
            launch.recv(target, peer)
        launch.keep(launch.targets[root], launch.sources[0])
    else:
        launch.send(launch.sources[0], root)


def _all_gather(launch: Launch) -> None:
    """Even parts by one all_gather into one block, uneven ones by a group of broadcasts. All ranks know which it is."""
    source, targets = launch.sources[0], launch.targets
    if len({target.nbytes for target in targets}) > 1:
        for root, target in enumerate(targets):
            _broadcast_from(launch, root, target)
    elif source.nbytes:
        block = targets[0] if launch.adjoin(targets) else launch.room(launch.size * source.nbytes)
        launch.communicator.all_gather(
            launch.address(source), launch.address(block), source.nbytes, BYTES, launch.stream.pointer
        )
        if block is not targets[0]:
            step = source.nbytes
            launch.after.extend((target, block[rank * step : (rank + 1) * step]) for rank, target in enumerate(targets))


def _all_to_all(launch: Launch) -> None:
    for peer, (source, target) in enumerate(zip(launch.sources, launch.targets, strict=True)):
        launch.send(source, peer)
        launch.recv(target, peer)
    launch.keep(launch.targets[launch.rank], launch.sources[launch.rank])


def _as_one(parts: Callable[[Launch], None]) -> Callable[[Launch], None]:
    def run(launch: Launch) -> None:
        launch.communicator.grouped(lambda: parts(launch))

    return run


_LAUNCHES: Final[dict[Operation, Callable[[Launch], Any]]] = {
    Operation.ALL_REDUCE: _all_reduce,
    Operation.REDUCE: _reduce,
    Operation.REDUCE_SCATTER: _as_one(_reduce_scatter),
    Operation.BROADCAST: _broadcast,
    Operation.SCATTER: _as_one(_scatter),
    Operation.GATHER: _as_one(_gather),
    Operation.ALL_GATHER: _as_one(_all_gather),
    Operation.ALL_TO_ALL: _as_one(_all_to_all),
}
