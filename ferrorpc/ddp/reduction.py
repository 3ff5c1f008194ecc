"""The reduction of all gradients in one step: each bucket's starts with its last gradient; the end waits for all."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from ferrorpc.arrays.base import Kind, View
from ferrorpc.ddp.bucket import Bucket, Slot
from ferrorpc.ddp.bucket_memory import BucketMemory, is_divisor
from ferrorpc.ddp.bucket_reduction import BucketReduction
from ferrorpc.ddp.hooks.base import Part, run_exchange
from ferrorpc.ddp.reducer import Reducer
from ferrorpc.ddp.steps import Step
from ferrorpc.errors import UsageError
from ferrorpc.failure import tell_others
from ferrorpc.guard import FOREVER
from ferrorpc.types import ReduceOp, number_of
from ferrorpc.work import Work

_NAMES_SHOWN: Final = 4
_ZERO_IN_FLOAT32: Final = 2.0**-150
"""Weights up to this one are zero in the header of a bucket of float32, however many ranks add them up."""
_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)
T = TypeVar("T")


class Reduction:
    """One step's reduction. `put` each gradient, or write it to its slot and `put_in_place`; then `finish`.

    Args:
        reducer: used by one reduction at a time.
        weight: of this rank in a weighted mean; None for an unweighted one, on all ranks or on none.
        follows: whether this rank has left an `uneven` block and only follows the others.

    Attributes:
        number: of this step, from 0.
        weight: as it is reduced: 1 for None where there is a hook or an `uneven` block.
        is_taken: after `wait`: whether any rank does not only follow.

    Raises:
        UsageError: the weight is no number, negative or not finite; or a graph is being captured from the current stream, or
            from that of the last step, and the buckets are on a GPU.
    """

    def __init__(self, reducer: Reducer, weight: float | None, follows: bool = False) -> None:
        self.number = reducer.begun
        default = None if reducer.hook is None and not reducer.is_uneven else 1.0
        self.weight = default if weight is None else _checked_weight(weight)
        self.is_taken = False
        self._is_refused = False
        """Whether it was refused for the weights of all ranks, on every rank that does not only follow."""
        self._reducer = reducer
        self._missing = [len(bucket.slots) for bucket in reducer.layout.buckets]
        self._received: set[str] = set()
        self._in_flight: list[BucketReduction] = []
        self._clock = reducer.stream.clock
        self._parker = self._clock.parker()
        self._unused: set[str] = set()
        """Parameters that this rank has not used."""
        self._used: set[str] = set()
        """Parameters that any rank has used."""
        self._totals: list[float] = []
        """The sum of the ranks' weights, as each bucket's header has it; none without weights."""
        self._kept: list[tuple[BucketMemory, Slot, Any]] = []
        self._began = self._clock.now()
        for memory in reducer.memory:
            memory.begin(None if self.weight is None else self._summable(memory, self.weight), follows)
        reducer.begun += 1

    @property
    def is_complete(self) -> bool:
        """Whether every gradient was put."""
        return len(self._received) == len(self._reducer.layout.slots)

    def has(self, name: str) -> bool:
        """Whether this gradient was put."""
        return name in self._received

    def put(self, name: str, gradient: View | None, used: bool = True, deferrable: bool = False) -> None:
        """Takes this rank's gradient of one parameter, once a step. The last one of a bucket starts its reduction.

        Args:
            gradient: on the bucket's device; None counts as zeros, not used. It is copied unless it already lies in its slot.
            used: whether this rank has used the parameter. On a rank of weight 0 the caller decides: what is used nowhere else
                becomes zeros on all ranks if it counts here, and has no mean if it does not.
            deferrable: the gradient does not change before the last one of its bucket is put, in the same stream, so all may be
                copied together.
        """
        memory, slot = self._reducer.at(name)
        is_used = used and gradient is not None
        if not is_used:
            self._unused.add(name)
        memory.write(slot, None if self.weight == 0 else gradient, is_used, deferrable)
        self._has_arrived(slot)

    def keep(self, name: str) -> None:
        """Has `finish` write back what is in a gradient's slot now, if no rank has used the parameter."""
        memory, slot = self._reducer.at(name)
        self._kept.append((memory, slot, memory.save(slot)))

    def put_in_place(self, slot: Slot) -> None:
        """As `put`, of a used gradient that the current stream has computed in its slot. Only without a weight."""
        self._reducer.memory[slot.bucket].written_in_place()
        self._has_arrived(slot)

    def _has_arrived(self, slot: Slot) -> None:
        self._received.add(slot.name)
        self._missing[slot.bucket] -= 1
        if self._missing[slot.bucket] == 0:
            self._start(self._reducer.memory[slot.bucket])
        if self._reducer.hook is not None:  # only hooks have collectives that follow others
            for each in self._in_flight:
                self._advance(each)

    def _start(self, memory: BucketMemory) -> None:
        operations = self._operations(memory, memory.pack())
        context = nullcontext if self._reducer.hook is None else memory.hook_context
        self._in_flight.append(BucketReduction(memory.bucket, operations, self._clock, self._parker, context))

    def _summable(self, memory: BucketMemory, weight: float) -> float:
        """The weight that a bucket gets: with a hook infinity, where all ranks together might exceed float32.

        Then the sum is infinite on every rank and the step is refused, but after the hook. Hooks see that this rank's weight
        or the sum is not finite, and remember nothing of the step's absurd scale.
        """
        too_large = weight > _FLOAT32_MAX / self._reducer.group.size
        hooked = self._reducer.hook is not None and memory.accumulator.dtype == np.float32
        return math.inf if too_large and hooked else weight

    def _operations(self, memory: BucketMemory, array: Any) -> Generator[Work[Any], Any, None]:
        hook, bucket = self._reducer.hook, memory.bucket
        collectives = self._reducer.collectives(self.number, bucket.index)
        if hook is None or self.weight is None or array.dtype != np.float32:  # where there is a hook, there is a weight
            yield collectives.all_reduce(array, ReduceOp.MEAN if self.weight is None else ReduceOp.SUM)
            return
        header = collectives.all_reduce(array[: bucket.header])
        if self.weight <= _ZERO_IN_FLOAT32 and float((yield header)[bucket.weight]) == 0:
            return  # nothing is averaged in this step, and what a hook remembers must not be sent for it
        weight = self._summable(memory, self.weight)
        unused = [(slot.start - bucket.header, slot.stop - bucket.header) for slot in bucket.slots if slot.name in self._unused]
        values = array[bucket.header :]
        total_weight = partial(_element, header, bucket.weight)
        key, found = self._reducer.keys[bucket.index], matrices(bucket)
        part = Part(key, values, found, weight=weight, unused=tuple(unused), total_weight=total_weight)
        yield from run_exchange(hook, part, collectives)
        # Where blocks of values are coded together, what is not finite spreads to the gaps, and from there to later steps.
        for start, stop in bucket.gaps:
            array[start:stop] = 0
        yield header

    def finish(self) -> None:
        """Puts the remaining gradients as unused, and waits until every slot holds the mean.

        Raises:
            UsageError: the weights of all ranks sum to zero, or to no finite number (on every rank).
            FerroError: what ended the generation.
        """
        total = self.wait()
        if not is_divisor(total):
            self._is_refused = True
            hint = "at least one rank needs a positive weight" if total == 0 else "weigh by samples or tokens, in smaller units"
            raise UsageError(
                f"the weights of all ranks sum to {'zero' if total == 0 else total}",
                hint=f"{hint}; gradients that are views of buckets are lost: compute them again",
            )
        for memory, slot, saved in self._kept:
            if slot.name not in self._used:
                memory.restore(slot, saved)

    def wait(self) -> float:
        """As `finish`, but returns the sum of the weights also where it is zero or not finite; then there are no means.

        It is that of one bucket: a weight may be zero, or too large, in one dtype and not in another, and all ranks must decide
        alike.
        """
        for name in () if self.is_complete else self._reducer.layout.slots:
            if name not in self._received:
                self.put(name, None)
        wait_began, reductions = self._clock.now(), list(self._in_flight)
        with self._reducer.steps.waiting(self._clock):
            self._wait_for_buckets()
        self._record(wait_began, reductions)
        totals = self._totals or [float(self._reducer.group.size)]
        return min(totals) if all(map(math.isfinite, totals)) else max(totals)

    def _wait_for_buckets(self) -> None:
        if self._reducer.hook is None and self._reducer.kind is not None:
            self._wait_for_gpu()
        while self._in_flight:
            # Advances all of them while it waits for any: the order in which they complete differs between ranks.
            pending = [each for each in self._in_flight if not self._advance(each)]
            for each in self._in_flight:
                if each not in pending:
                    memory = self._reducer.memory[each.bucket.index]
                    memory.fetch()
                    self._finish_bucket(memory)
            if len(pending) == len(self._in_flight):
                pending[0].assist()
                self._parker.park(FOREVER)  # each collective has its own deadline
            self._in_flight = pending

    def _wait_for_gpu(self) -> None:
        """As `_wait_for_buckets`, where nothing follows a collective. What the host reads is queued for all buckets before
        this thread waits for the GPU."""
        for each in self._in_flight:
            self._tried(each, each.join)
            self._reducer.memory[each.bucket.index].fetch()
        for each in self._in_flight:
            self._tried(each, each.wait)
            self._finish_bucket(self._reducer.memory[each.bucket.index])
        self._in_flight = []

    def _record(self, wait_began: float, reductions: list[BucketReduction]) -> None:
        ended, before = self._clock.now(), self._reducer.steps.last_end
        began = self._began if before is None else before
        buckets = tuple((each.bucket.index, each.started, each.ended) for each in reductions)
        self._reducer.steps.add(Step(self.number, began, wait_began, ended, buckets))

    def _advance(self, reduction: BucketReduction) -> bool:
        return self._tried(reduction, reduction.advance)

    def _tried(self, reduction: BucketReduction, act: Callable[[], T]) -> T:
        """The result of a step of one bucket's reduction. Its error says which bucket that is."""
        try:
            return act()
        except BaseException as error:
            self._abandon()
            error.add_note(f"while averaging {_described(reduction.bucket)}, step {self.number}")
            raise

    def give_up(self, error: BaseException) -> None:
        """Ends the generation with an error of this step, because the other ranks wait for this one, or take the step and this
        one may not. Not with one that all ranks raise."""
        if not self._is_refused:
            self._abandon()
            tell_others(self._reducer.group, error)

    def _abandon(self) -> None:
        """This reduction will not be finished."""
        for each in self._in_flight:
            each.abandon()

    def _finish_bucket(self, memory: BucketMemory) -> None:
        """Notes which parameters were used, the sum of the weights, and whether the step is taken."""
        header = memory.finish()
        self.is_taken = header.is_taken
        self._used.update(header.used)
        if header.total_weight is not None:
            self._totals.append(header.total_weight)

    def used(self, name: str) -> bool:
        """After `finish`: whether any rank has used the parameter. If none has, there is no mean."""
        return name in self._used

    def means(self, kinds: Mapping[str, Kind], as_views: bool) -> dict[str, Any]:
        """After `finish`: name -> mean, as an array of the kind given for it; None if no rank has used the parameter.

        Args:
            as_views: means are views of the buckets, if their kind permits. The next step overwrites them.
        """
        found: dict[str, Any] = dict.fromkeys(self._reducer.layout.slots)
        for memory in self._reducer.memory:
            used = [slot for slot in memory.bucket.slots if slot.name in self._used]
            if as_views:
                found.update({slot.name: memory.alias(slot, kinds[slot.name]) for slot in used})
            rest = [slot for slot in used if found[slot.name] is None]
            found.update(zip([slot.name for slot in rest], memory.copies(rest, kinds), strict=True))
        return found


def _checked_weight(weight: Any) -> float:
    """A rank's weight as a number. Raises UsageError."""
    number = number_of(weight)
    if not 0 <= number < math.inf:
        raise UsageError(f"weight={weight!r} is no share", hint="pass a number of samples or tokens, 0 or more")
    return number


def followed(reducer: Reducer) -> Iterator[Reduction]:
    """The finished reductions of the others' steps, in which this rank takes part with weight 0 until all ranks do."""
    while reducer.memory:
        before = [(memory, slot, memory.save(slot)) for memory in reducer.memory for slot in memory.bucket.slots]
        reduction = Reduction(reducer, 0.0, follows=True)
        if is_divisor(reduction.wait()):
            yield reduction
            continue
        # The step was refused, or all have left. Gradients that lie in the buckets are of the last step, not of this one.
        for memory, slot, saved in before:
            memory.restore(slot, saved)
        if not reduction.is_taken:
            return


@contextmanager
def given_up_on_failure(reduction: Reduction) -> Iterator[None]:
    """A context whose errors the reduction is given up with."""
    try:
        yield
    except BaseException as error:
        reduction.give_up(error)
        raise


def _element(work: Work[Any], place: int) -> Generator[Work[Any], Any, float]:
    """Waits for a collective. Returns one element of its result."""
    return float((yield work)[place])


def matrices(bucket: Bucket) -> tuple[tuple[int, int, int], ...]:
    """(start after the header, rows, columns) of each gradient with at least two dimensions: the first one by all others."""
    found = []
    for slot in bucket.slots:
        rows = slot.spec.shape[0] if len(slot.spec.shape) > 1 else 0
        if slot.stop > slot.start and rows:
            found.append((slot.start - bucket.header, rows, (slot.stop - slot.start) // rows))
    return tuple(found)


def _described(bucket: Bucket) -> str:
    names = [slot.name for slot in bucket.slots]
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"bucket {bucket.index} ({', '.join(names[:_NAMES_SHOWN])}{more})"
