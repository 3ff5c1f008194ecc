"""One mean of all gradients: each bucket leaves when its last gradient is there, and is waited for at the end."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from ferrorpc.arrays.base import Kind, View
from ferrorpc.ddp.bucket import Bucket, Slot
from ferrorpc.ddp.fleet import Fleet
from ferrorpc.ddp.hooks.base import Part
from ferrorpc.ddp.memory import Memory
from ferrorpc.ddp.steps import Step, Steps
from ferrorpc.errors import UsageError
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import FOREVER, Clock, Parker
from ferrorpc.types import ReduceOp
from ferrorpc.work import Work

_NAMES_SHOWN = 4


class Flight:
    """One bucket on its way round the group: operations one after the other, each begun when the one before is complete.

    Args:
        parker: unparked, from any thread, when `advance` may get further.
        place: a context in which operations are begun and taken home.

    Attributes:
        left: clock time of its start.
        home: clock time at which the last operation that was begun was complete.
    """

    def __init__(
        self,
        bucket: Bucket,
        operations: Generator[Work[Any], Any, None],
        clock: Clock,
        parker: Parker,
        place: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.bucket = bucket
        self.left = clock.now()
        self.home = FOREVER
        self._operations = operations
        self._place = place
        self._clock = clock
        self._parker = parker
        self._work: Work[Any] | None = None
        self._turn = threading.Lock()
        with place():
            self._begin(next(operations))

    def _begin(self, work: Work[Any]) -> None:
        self._work, self.home = work, FOREVER
        work.on_done(partial(self._landed, work))

    def _landed(self, work: Work[Any]) -> None:
        if work is self._work:
            self.home = self._clock.now()
        self._parker.unpark()

    def advance(self) -> bool:
        """Begins what can be begun without waiting. True when the last operation is complete. For any thread."""
        with self._turn:
            while self._work is not None and self._work.done():
                try:
                    with self._place():
                        self._begin(self._operations.send(self._work.wait()))
                except StopIteration:
                    self._work = None
                    self.home = min(self.home, self._clock.now())  # it is done before anybody is told
            return self._work is None

    def abandon(self) -> None:
        """Nobody will wait for it: its error, which somebody has seen elsewhere, need not be logged."""
        if self._work is not None:
            self._work.on_done(partial(_observe, self._work))


class Round:
    """One mean. `put` each gradient, or write it to its place in the bucket and `put` that; then `finish`.

    Args:
        steps: is told of it when it is over.
        number: of this round, from 0.
        weight: this rank's share of a weighted mean; None for an even one, on all ranks or on none.
    """

    def __init__(self, fleet: Fleet, steps: Steps, number: int, weight: float | None) -> None:
        self.number = number
        self.weight = weight
        self._fleet = fleet
        self._steps = steps
        self._missing = [len(bucket.slots) for bucket in fleet.layout.buckets]
        self._put: set[str] = set()
        self._flights: list[Flight] = []
        self._parker = fleet.clock.parker()
        self._used: set[str] = set()
        self._began = fleet.clock.now()
        for memory in fleet.memory:
            memory.begin(weight)

    @property
    def is_complete(self) -> bool:
        """Whether every gradient was put."""
        return len(self._put) == len(self._fleet.layout.slots)

    def has(self, name: str) -> bool:
        """Whether this gradient was put."""
        return name in self._put

    def put(self, name: str, gradient: View | None, used: bool = True, stays: bool = False) -> None:
        """This rank's gradient of one parameter, once a round. The last one of a bucket sends it on its way.

        Args:
            gradient: where the bucket is; None counts as zeros, not used. It is copied unless it lies in its place already.
            used: whether this rank has used the parameter. What a rank of weight 0 has used may count, and all ranks get zeros
                where nobody else has used it; or be unused.
            stays: it does not change before the other gradients of its bucket are put, in the same stream, so all may be copied
                at once.
        """
        memory, slot = self._fleet.at(name)
        memory.write(slot, None if self.weight == 0 else gradient, used and gradient is not None, stays)
        self.put_place(slot)

    def put_place(self, slot: Slot) -> None:
        """As `put`, of a gradient that lies in its place and was used. Only for a round without a weight."""
        self._put.add(slot.name)
        self._missing[slot.bucket] -= 1
        if self._missing[slot.bucket] == 0:
            self._send(self._fleet.memory[slot.bucket])
        if self._fleet.hook is not None:  # which has operations that follow others
            for flight in self._flights:
                self._advance(flight)

    def _send(self, memory: Memory) -> None:
        operations = self._operations(memory.bucket, memory.leave())
        place = nullcontext if self._fleet.hook is None else memory.apart
        self._flights.append(Flight(memory.bucket, operations, self._fleet.clock, self._parker, place))

    def _operations(self, bucket: Bucket, array: Any) -> Generator[Work[Any], Any, None]:
        hook = self._fleet.hook
        lane = self._fleet.lane(self.number, bucket.index)
        if hook is None or array.dtype != np.float32:
            yield lane.all_reduce(array, ReduceOp.MEAN if self.weight is None else ReduceOp.SUM)
            return
        header = lane.all_reduce(array[: bucket.header])
        yield from hook.exchange(Part(f"bucket{bucket.index}", array[bucket.header :], matrices(bucket)), lane)
        yield header

    def finish(self) -> None:
        """Counts what was not put as unused, and returns when every mean is in its place.

        Raises:
            UsageError: the weights of all ranks sum to zero, or to no number (on every rank).
            FerroError: what ended the generation.
        """
        if self.wait() == 0:
            raise UsageError("the weights of all ranks sum to zero", hint="at least one rank needs a positive weight")

    def wait(self) -> float:
        """As `finish`, but returns what the weights sum to where that is zero, too; then there are no means."""
        for name in () if self.is_complete else self._fleet.layout.slots:
            if name not in self._put:
                self.put(name, None)
        waited, flights = self._fleet.clock.now(), list(self._flights)
        with self._steps.waiting(waited):
            totals = self._bring_home()
        self._report(waited, flights)
        if not all(map(math.isfinite, totals)):
            raise UsageError(
                f"the weights of all ranks sum to {max(totals)}", hint="weigh by samples or tokens, in smaller units"
            )
        return totals[-1]

    def _bring_home(self) -> list[float]:
        """Waits for all buckets; what the weights sum to, as each of them says."""
        totals = [float(self._fleet.size)]
        while self._flights:
            # All of them go on while any is waited for: which one comes home first differs from rank to rank.
            under_way = [flight for flight in self._flights if not self._advance(flight)]
            for flight in self._flights:
                if flight not in under_way:
                    totals.append(self._settle(self._fleet.memory[flight.bucket.index]))
            if len(under_way) == len(self._flights):
                self._parker.park(FOREVER)  # each operation has its own deadline
            self._flights = under_way
        return totals

    def _report(self, waited: float, flights: list[Flight]) -> None:
        ended, before = self._fleet.clock.now(), self._steps.last_end
        began = self._began if before is None else before
        told = tuple((flight.bucket.index, flight.left, flight.home) for flight in flights)
        self._steps.add(Step(self.number, began, waited, ended, told))

    def _advance(self, flight: Flight) -> bool:
        try:
            return flight.advance()
        except BaseException as error:
            self.abandon()
            error.add_note(f"while averaging {_told(flight.bucket)}, round {self.number}")
            raise

    def abandon(self) -> None:
        """This round will not be finished."""
        for flight in self._flights:
            flight.abandon()

    def _settle(self, memory: Memory) -> float:
        """A bucket has come home: notes who was used. Returns what the weights sum to."""
        home = memory.settle()
        self._used.update(home.used)
        return float(self._fleet.size) if home.total is None else home.total

    def used(self, name: str) -> bool:
        """After `finish`: whether any rank has used the parameter. Where none has, there is no mean."""
        return name in self._used

    def means(self, kinds: Mapping[str, Kind], as_views: bool) -> dict[str, Any]:
        """After `finish`: name -> mean, as an array of its kind; None where no rank has used it.

        Args:
            as_views: they lie in the bucket, where their kind permits. They belong to the next round then.
        """
        found: dict[str, Any] = dict.fromkeys(self._fleet.layout.slots)
        for memory in self._fleet.memory:
            used = [slot for slot in memory.bucket.slots if slot.name in self._used]
            if as_views:
                found.update({slot.name: memory.alias(slot, kinds[slot.name]) for slot in used})
            rest = [slot for slot in used if found[slot.name] is None]
            found.update(zip([slot.name for slot in rest], memory.copies(rest, kinds), strict=True))
        return found


@contextmanager
def unless_interrupted(current: Round, group: ProcessGroup) -> Iterator[None]:
    """For the end of a round: an interrupt ends the generation, since others take the step, and this rank may not."""
    try:
        yield
    except KeyboardInterrupt:
        current.abandon()
        group.abort("KeyboardInterrupt while gradients were averaged")
        raise


def matrices(bucket: Bucket) -> tuple[tuple[int, int, int], ...]:
    """(start behind the header, rows, columns) of each gradient that is a matrix, or can be read as one of its first
    dimension by all others."""
    found = []
    for slot in bucket.slots:
        rows = slot.spec.shape[0] if len(slot.spec.shape) > 1 else 0
        if slot.stop > slot.start and rows:
            found.append((slot.start - bucket.header, rows, (slot.stop - slot.start) // rows))
    return tuple(found)


def _told(bucket: Bucket) -> str:
    names = [slot.name for slot in bucket.slots]
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"bucket {bucket.index} ({', '.join(names[:_NAMES_SHOWN])}{more})"


def _observe(work: Work[Any]) -> None:
    work.exception()
