"""all_reduce in its most frequent form: of one contiguous array of this GPU, into another or in place.

The communicator then needs an address and a count alone, and nothing is announced, allocated or copied. So the fast path
(`ferrorpc.operations.device_fast_path`) calls `start_at` with addresses; all other forms call `start`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from ferrorpc.arrays.device import Device
from ferrorpc.backends.device.collective import CollectivePrepared
from ferrorpc.backends.device.communicator import DataType, Op
from ferrorpc.backends.device.execution import ImmediateExecution
from ferrorpc.collectives.execution import PointerAllReduce
from ferrorpc.guard import Guard, wake_nobody
from ferrorpc.wire.frames import Key


class AllReducePrepared(CollectivePrepared):
    """An all_reduce prepared for one group."""

    @cached_property
    def asked(self) -> tuple[int, DataType, Op]:
        """What the communicator is asked for: the count and type of its elements, and its operator."""
        if self.reduction is None:
            raise AssertionError(f"{self.call.signature} reduces nothing")
        op, datatype, factor = self.reduction
        return factor * self.call.inputs[0].elements, datatype, op

    def for_pointers(self, device: Device) -> PointerAllReduce | None:
        return self if device is self.context.device else None

    def start_at(self, key: Key, source: int, target: int, keeps: Any, guard: Guard) -> AllReduceExecution:
        """As `PointerAllReduce.start_at`."""
        execution = AllReduceExecution(self, key, source, target, keeps, guard)
        execution.enter()
        try:
            self.context.lanes.transport.mailbox.record(key, self.signature)  # so that probes of the others are answered
        except BaseException as error:
            execution.struck(error)
            raise
        return execution


class AllReduceExecution(ImmediateExecution):
    """One run of a prepared all_reduce on addresses."""

    _is_probing = False

    def __init__(self, prepared: AllReducePrepared, key: Key, source: int, target: int, keeps: Any, guard: Guard) -> None:
        self._prepared = prepared
        self._key = key
        self._source, self._target = source, target
        self._keeps = keeps
        super().__init__(prepared.context, guard)

    @property
    def label(self) -> str:
        return f"{self._prepared.signature} #{self._key.number}"

    def launch(self, pointer: int) -> None:
        self.launch_queue.communicator.all_reduce(self._source, self._target, *self._prepared.asked, pointer)

    def probe(self) -> None:
        """Enters the mailbox first, which receives the answers."""
        key, signature = self._key, self._prepared.signature
        self._is_probing = True
        mailbox = self.context.lanes.transport.mailbox
        mailbox.enter(key, signature, wake_nobody)
        if self.released:  # by another thread, meanwhile
            mailbox.leave(key)
        else:
            self.probe_others(key, signature, self.number)

    def buffers_in_use(self) -> object:
        return self._keeps if self.after else None  # set before the launch, during which an interrupt may strike

    def drop_references(self) -> None:
        if self._is_probing:
            self.context.lanes.transport.mailbox.leave(self._key)
        self._keeps = None
