"""From checked arrays to a running operation and back: what every collective of a group has in common.

A call is prepared once per signature and cached; a later one is look up, number, run.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from ferrorpc.arrays.base import Kind, Out, View
from ferrorpc.backends.base import Backend
from ferrorpc.collectives.call import Call
from ferrorpc.collectives.execution import Execution, Prepared
from ferrorpc.errors import GroupClosedError, TensorMismatchError, UsageError
from ferrorpc.guard import FOREVER, Guard
from ferrorpc.wire.frames import Key
from ferrorpc.work import Work

PREPARED_CALLS: Final = 1024
"""Prepared calls that are kept; beyond, the one used longest ago is laid out again when it comes back."""

Convert = Callable[[Execution], Any]


class Dispatch:
    """Starts operations of one group on its backend.

    Args:
        backend: performs them.
        timeout: seconds an operation may take where none are given.
    """

    def __init__(self, backend: Backend, timeout: float) -> None:
        self.backend = backend
        self.timeout = timeout
        self.closed = False
        self._lock = threading.Lock()
        self._prepared: OrderedDict[Call, Prepared] = OrderedDict()
        self._number = 0
        self._streams = 0
        self._flying: dict[int, Work[Any]] = {}

    def check_open(self) -> None:
        """Raises GroupClosedError after close(), and the first cause once the generation has ended."""
        if self.closed:
            raise GroupClosedError("the group was closed")
        self.backend.latch.check()

    def open_stream(self) -> int:
        """The number of a new stream. Ranks agree on it by opening streams in the same order."""
        self.check_open()
        with self._lock:
            self._streams += 1
            return self._streams

    def guard(self, timeout: float | None) -> Guard:
        """Deadline and latch of an operation that begins now."""
        if timeout is not None and not timeout >= 0:
            raise UsageError(f"timeout={timeout!r} is no number of seconds")
        return Guard(self.backend.clock, self.backend.latch, self.timeout if timeout is None else float(timeout))

    def start(
        self,
        call: Call,
        inputs: Sequence[View],
        outs: Sequence[Out] | None,
        *,
        timeout: float | None = None,
        stream: int = 0,
        number: int | None = None,
    ) -> Execution:
        """A new execution of a call; in program order, unless it has a number of its own.

        Raises:
            UsageError: the call means nothing; no number was used up.
        """
        self.check_open()
        prepared = self._prepare(call)
        guard = self.guard(timeout)
        if number is None:
            with self._lock:
                self._number += 1
                number = self._number
        if self.backend.session is not None:
            self.backend.session.note(call.operation.value)
        key = Key(self.backend.group_id, stream, number)
        targets = None if outs is None else [out.data for out in outs]
        return prepared.start(key, [view.data for view in inputs], targets, guard)

    def _prepare(self, call: Call) -> Prepared:
        with self._lock:
            found = self._prepared.get(call)
            if found is not None:
                self._prepared.move_to_end(call)
                return found
        fresh = self.backend.prepare(call)
        with self._lock:
            self._prepared[call] = fresh
            if len(self._prepared) > PREPARED_CALLS:
                self._prepared.popitem(last=False)
        return fresh

    def finish(self, execution: Execution, convert: Convert, async_op: bool) -> Any:
        """The result (blocking), or a Work for it."""
        if async_op:
            return self.submit(execution, convert)
        self.backend.run(execution)
        return convert(execution)

    def submit(self, execution: Execution, convert: Convert) -> Work[Any]:
        """A Work for the result; it is in flight until it is done."""
        work = self.backend.submit(execution, convert)
        with self._lock:
            self._flying[id(work)] = work
        work.on_done(lambda: self._landed(work))
        return work

    def _landed(self, work: Work[Any]) -> None:
        with self._lock:
            self._flying.pop(id(work), None)

    def drain(self) -> None:
        """Waits until nothing of this group is in flight; each operation's own deadline bounds that."""
        parker = self.backend.clock.parker()
        with self._lock:
            works = list(self._flying.values())
        for work in works:
            work.on_done(parker.unpark)
            while not work.done():
                parker.park(FOREVER)


def one(kind: Kind, out: Out | None) -> Convert:
    """The conversion of a single result; None where this rank gets nothing."""

    def convert(execution: Execution) -> Any:
        if not execution.results:
            return None
        return _give(execution, 0, kind, out)

    return convert


def many(kind: Kind, outs: Sequence[Out] | None) -> Convert:
    """The conversion of a list of results in rank order; None where this rank gets nothing."""

    def convert(execution: Execution) -> Any:
        if not execution.results:
            return None
        places = outs if outs is not None else [None] * len(execution.results)
        return [_give(execution, item, kind, out) for item, out in enumerate(places)]

    return convert


def nothing(execution: Execution) -> None:
    """The conversion of an operation without a result."""


def _give(execution: Execution, item: int, kind: Kind, out: Out | None) -> Any:
    array, spec = execution.results[item], execution.specs[item]
    if out is None:
        return kind.wrap(array, spec)
    if spec != out.spec:
        raise TensorMismatchError(f"{execution.label} gave {spec}, but out is {out.spec}: out is unchanged")
    if array is not out.data:
        np.copyto(out.data, array)
    return out.commit()
