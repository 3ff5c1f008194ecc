"""Just enough of a process group for the packages above it: the operations they call, on a simulated world."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ferrorpc.arrays.kinds import NUMPY, view, view_out
from ferrorpc.backends.base import Backend
from ferrorpc.backends.simulated import SimulatedBackend
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.guard import Guard
from ferrorpc.types import ReduceOp
from ferrorpc.wire.frames import Key
from ferrorpc.work import Work


class Stream:
    """Operations numbered by their caller."""

    def __init__(self, group: Group, number: int) -> None:
        self._group = group
        self._number = number

    def all_reduce(self, x: Any, *, number: int, op: ReduceOp, out: Any) -> Work[Any]:
        call = Call(Operation.ALL_REDUCE, (view(x).spec,), op)
        return self._group.start(call, x, out, (self._number, number))


class Group:
    """One rank."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.rank, self.size, self.world_ranks = backend.rank, backend.size, backend.world_ranks
        self.calls: list[str] = []
        self._numbers = itertools.count()
        self._streams = itertools.count(1)

    def stream(self) -> Stream:
        return Stream(self, next(self._streams))

    def broadcast(self, x: Any, root: int, out: Any = None, async_op: bool = False) -> Any:
        inputs = (view(x).spec,) if self.rank == root else ()
        work = self.start(Call(Operation.BROADCAST, inputs, root=root), x if self.rank == root else None, out)
        return work if async_op else work.wait()

    def all_gather(self, x: Any) -> list[Any]:
        return self.start(Call(Operation.ALL_GATHER, (view(x).spec,)), x, None).wait()

    def start(self, call: Call, x: Any, out: Any, identity: tuple[int, int] | None = None) -> Work[Any]:
        self.calls.append(call.signature)
        stream, number = identity or (0, next(self._numbers))
        place = None if out is None else view_out(out, view(out).spec)
        guard = Guard(self.backend.clock, self.backend.latch, 20.0)
        execution = self.backend.prepare(call).start(
            Key(0, stream, number), [] if x is None else [view(x).data], None if place is None else [place.data], guard
        )

        def convert(done: Any) -> Any:
            if place is not None:
                if done.results[0] is not place.data:
                    np.copyto(place.data, done.results[0])
                return place.commit()
            wrapped = [NUMPY.wrap(array, spec) for array, spec in zip(done.results, done.specs, strict=True)]
            return wrapped if call.operation is Operation.ALL_GATHER else wrapped[0]

        return self.backend.submit(execution, convert)


def run_world(size: int, body: Callable[[Group], Any]) -> list[Any]:
    """body(group) on every rank, each on a thread of its own; the results in rank order."""
    groups = [Group(backend) for backend in SimulatedBackend.create_group(size)]
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(body, group) for group in groups]
        results = [future.result(60) for future in futures]
    for group in groups:
        group.backend.close()
    return results
