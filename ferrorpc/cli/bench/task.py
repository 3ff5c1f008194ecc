"""The operation that a rank repeats, and the check of its result.

An in-place all_reduce of ones multiplies them by the number of ranks each time, so the result is known after any number of
repetitions. The array is refilled before each block of repetitions, outside the timed part. Other operations read one array
and write another, so they can be repeated as they are. Every block is checked at three elements; `verify` checks every
element, with values that differ by element and by rank.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import repeat
from typing import Any, Final

import numpy as np

from ferrorpc.cli.bench.case import (
    ALL_GATHER,
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    EXCHANGES,
    ITEM_BYTES,
    REDUCE_SCATTER,
    ROUND_TRIP,
    SEND,
    Case,
)
from ferrorpc.cli.bench.runners.base import Action, Runner
from ferrorpc.errors import FerroError, UsageError

PATTERN: Final = np.arange(1, 8, dtype=np.float32)
"""Repeated values whose sums over 8 ranks are exact in every dtype."""
PIECE: Final = 7 * 8192
"""Elements verified at a time: few, so that verification does not raise the measured peak of memory."""
LARGEST: Final = {"float32": 2.0**100, "float16": 2.0**15, "bfloat16": 2.0**100}
QUANTISED_TOLERANCE: Final = 0.02
"""Relative to the largest value, for compressed messages."""
BARRIERS_MAX: Final = 1000
SENDS_MAX: Final = 64
SENDS_BYTES: Final = 128 << 20
"""Bytes sent in a block: more than buffers hold, so that the block measures throughput."""
REPEATS_MAX: Final = 60


class Task(ABC):
    """One case on one rank.

    Attributes:
        arrays_bytes: size of its arrays.
        repeats_min, repeats_max: bounds on the repetitions in a block; after `repeats_max` the array must be refilled.
    """

    arrays_bytes: int = 0
    repeats_min: int = 1
    repeats_max: int

    @abstractmethod
    def refill(self) -> None:
        """Writes the values that a block of repetitions starts from."""

    @abstractmethod
    def run(self, count: int) -> None:
        """Repeats the operation. Only this is timed."""

    @abstractmethod
    def check(self, count: int) -> None:
        """Checks some values after `run(count)`.

        Raises:
            FerroError: a value is wrong.
        """

    @abstractmethod
    def verify(self) -> None:
        """Runs the operation once and checks every value. Raises as `check` does."""


class Repeated(Task):
    """A task that repeats one call.

    Attributes:
        act: the call.
    """

    act: Action

    def run(self, count: int) -> None:
        act = self.act
        for _ in repeat(None, count):
            act()


class Barrier(Repeated):
    """Repeated barriers. They have no values to check."""

    repeats_max = BARRIERS_MAX

    def __init__(self, runner: Runner) -> None:
        self.act = runner.barrier()

    def refill(self) -> None:
        pass

    def check(self, count: int) -> None:
        pass

    def verify(self) -> None:
        self.run(1)


class AllReduce(Repeated):
    """In-place sums."""

    def __init__(self, runner: Runner, case: Case, memory: str, wire: str | None) -> None:
        self._runner = runner
        self._array = runner.array(case.count, case.dtype, memory)
        self.act = runner.all_reduce(self._array, wire)
        self._tolerance = QUANTISED_TOLERANCE if wire else 0.0
        self.arrays_bytes = case.size_bytes
        self.repeats_max = min(REPEATS_MAX, int(math.log(LARGEST[case.dtype], max(2, runner.size))))
        self.refill()

    def refill(self) -> None:
        self._array[...] = 1

    def check(self, count: int) -> None:
        expected = np.full(3, float(self._runner.size) ** count)
        _equal(_some_of(self._array), expected, self._tolerance * count or _rounding(self._runner.size))

    def verify(self) -> None:
        _write(self._runner, self._array, self._runner.rank + 1)
        self.run(1)
        _verify(self._runner, self._array, sum(range(1, self._runner.size + 1)), self._tolerance)


class Exchange(Repeated):
    """One of `EXCHANGES`, on arrays of as many equal pieces as there are ranks; a broadcast is in place."""

    repeats_max = REPEATS_MAX

    def __init__(self, runner: Runner, case: Case, memory: str) -> None:
        self._runner = runner
        self._operation = case.operation
        self._piece = case.count // runner.size
        if not self._piece:
            raise UsageError(f"{case.title}: fewer elements than ranks", hint="measure larger arrays")
        whole = self._piece * runner.size
        self._source = runner.array(self._piece if case.operation == ALL_GATHER else whole, case.dtype, memory)
        self._target = self._source
        if case.operation != BROADCAST:
            self._target = runner.array(self._piece if case.operation == REDUCE_SCATTER else whole, case.dtype, memory)
        self.act = runner.exchange(case.operation, self._source, self._target)
        elements = len(self._source) + (0 if case.operation == BROADCAST else len(self._target))
        self.arrays_bytes = elements * ITEM_BYTES[case.dtype]
        self.refill()

    def refill(self) -> None:
        self._target[...] = 0
        self._source[...] = self._runner.rank + 1

    def check(self, count: int) -> None:
        _equal(_some_of(self._target), np.array([float(self._factor(place)) for place in _places(self._target)]), 0.0)

    def verify(self) -> None:
        self._target[...] = 0
        _write(self._runner, self._source, self._runner.rank + 1)
        self.run(1)
        for start in range(0, len(self._target), self._piece):
            part = self._target[start : start + self._piece]
            _verify(self._runner, part, self._factor(start), 0.0, self._origin(start))

    def _factor(self, place: int) -> int:
        """The factor of the pattern at an element of the result: the source rank plus one, or the sum of these."""
        if self._operation == REDUCE_SCATTER:
            return sum(range(1, self._runner.size + 1))
        return 1 if self._operation == BROADCAST else place // self._piece + 1

    def _origin(self, start: int) -> int:
        """The offset in the source of the piece that begins at `start` in the result."""
        if self._operation == ALL_GATHER:
            return 0
        return start if self._operation == BROADCAST else self._runner.rank * self._piece


class Send(Task):
    """Arrays from rank 0 to rank 1, with one reply to all of them or a reply to each."""

    def __init__(self, runner: Runner, case: Case, memory: str, *, answer_each: bool) -> None:
        if runner.size != 2:
            raise UsageError(f"{case.operation} is between 2 ranks, and there are {runner.size}", hint="measure it on 2 ranks")
        self._runner = runner
        self._array = runner.array(case.count, case.dtype, memory)
        self._received = self._array
        self._each = answer_each
        self._blocks = 0
        self.arrays_bytes = case.size_bytes
        self.repeats_max = max(1, min(SENDS_MAX, SENDS_BYTES // max(1, case.size_bytes)))
        self.repeats_min = 1 if answer_each else self.repeats_max
        self.refill()

    def refill(self) -> None:
        self._blocks += 1
        self._array[...] = self._value() if self._runner.rank == 0 else 0

    def run(self, count: int) -> None:
        for _ in repeat(None, count if self._each else 1):
            self._once(1 if self._each else count)

    def check(self, count: int) -> None:
        _equal(_some_of(self._received), np.full(3, float(self._value())), 0.0)

    def verify(self) -> None:
        _write(self._runner, self._array, 1 if self._runner.rank == 0 else 0)
        self._once(1)
        _verify(self._runner, self._received, 1, 0.0)

    def _once(self, count: int) -> None:
        if self._runner.rank == 0:
            self._runner.send(self._array, count)
        else:
            self._received = self._runner.receive(self._array, count)

    def _value(self) -> int:
        return self._blocks % 100 + 1


def make(runner: Runner, case: Case, memory: str, wire: str | None) -> Task:
    """The task of a case.

    Raises:
        BackendUnavailableError: the system lacks the operation, dtype or kind of memory.
    """
    if case.operation == BARRIER:
        return Barrier(runner)
    if case.operation == ALL_REDUCE:
        return AllReduce(runner, case, memory, wire)
    if case.operation in EXCHANGES:
        return Exchange(runner, case, memory)
    if case.operation in (SEND, ROUND_TRIP):
        return Send(runner, case, memory, answer_each=case.operation == ROUND_TRIP)
    operations = ", ".join((BARRIER, ALL_REDUCE, *EXCHANGES, SEND, ROUND_TRIP))
    raise UsageError(f"there is no operation {case.operation!r} to measure", hint=f"use one of: {operations}")


def _rounding(ranks: int) -> float:
    """Relative tolerance: powers of the number of ranks are exact if it is a power of two, else rounded at each step."""
    return 0.0 if ranks & (ranks - 1) == 0 else 0.05


def _places(array: Any) -> tuple[int, int, int]:
    """The three elements that are checked after a block."""
    last = len(array) - 1
    return 0, last // 2, last


def _some_of(array: Any) -> np.ndarray[Any, Any]:
    return np.array([float(array[place]) for place in _places(array)])


def _pieces(length: int, origin: int = 0) -> Iterator[tuple[slice, np.ndarray[Any, Any]]]:
    """Slices of an array with the pattern's values there; the pattern begins `origin` elements before the array."""
    pattern = np.resize(np.roll(PATTERN, -origin), min(PIECE, length))
    for start in range(0, length, PIECE):
        stop = min(start + PIECE, length)
        yield slice(start, stop), pattern[: stop - start]


def _write(runner: Runner, array: Any, factor: int) -> None:
    for piece, pattern in _pieces(len(array)):
        runner.write(array[piece], pattern * factor)


def _verify(runner: Runner, array: Any, factor: int, tolerance: float, origin: int = 0) -> None:
    for piece, pattern in _pieces(len(array), origin):
        _equal(runner.read(array[piece]), pattern * factor, tolerance)


def _equal(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], tolerance: float) -> None:
    wrong = ~(np.abs(found - expected) <= tolerance * np.abs(expected).max())  # NaN too
    if wrong.any():
        index = int(np.argmax(wrong))
        text = f"{int(wrong.sum())} of {wrong.size} values are wrong, such as {found[index]} for {expected[index]}"
        raise FerroError(text, hint="do not trust its times either")
