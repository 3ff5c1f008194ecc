"""all_reduce, as it is called most: of one plain array of this GPU, into another or itself.

Then an address and a count are all that NCCL wants, and nothing has to be announced, made or copied. So the shortest way
(`ferrorpc.operations.device_shortcut`) begins here, with addresses; what is not so plain begins with `start`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from ferrorpc.arrays.device import Device
from ferrorpc.backends.nccl.airborne import nobody
from ferrorpc.backends.nccl.api import DataType, Op
from ferrorpc.backends.nccl.execution import NcclPrepared
from ferrorpc.backends.nccl.launched import Immediate
from ferrorpc.collectives.execution import Bare, Execution
from ferrorpc.guard import Guard
from ferrorpc.wire.frames import Key


class NcclReduction(NcclPrepared):
    """An all_reduce, for one group."""

    @cached_property
    def asked(self) -> tuple[int, DataType, Op]:
        """What NCCL is asked for: how many of its elements, which, and its operator."""
        if self.reduction is None:
            raise AssertionError(f"{self.call.signature} reduces nothing")
        op, datatype, factor = self.reduction
        return factor * self.call.inputs[0].elements, datatype, op

    def bare(self, device: Device) -> Bare | None:
        return self if device is self.site.device else None

    def start_at(self, key: Key, source: int, target: int, keeps: Any, guard: Guard) -> Execution:
        """As `Bare.start_at`."""
        return Reduction(self, key, source, target, keeps, guard)

    def ran(self, execution: Execution) -> bool:
        """As `Bare.ran`."""
        if not isinstance(execution, Reduction) or not execution.begin():
            return False
        execution.join(execution.caller)
        self.site.see_off(execution)
        return True


class Reduction(Immediate):
    """One run of it on addresses."""

    def __init__(self, prepared: NcclReduction, key: Key, source: int, target: int, keeps: Any, guard: Guard) -> None:
        self._prepared = prepared
        self._key = key
        self._source, self._target = source, target
        self._keeps = keeps
        self._mailbox = prepared.site.lanes.transport.mailbox
        self._is_asking = False
        super().__init__(prepared.site, guard)
        self._mailbox.note(key, prepared.signature)

    @property
    def label(self) -> str:
        return f"{self._prepared.signature} #{self._key.number}"

    def launch(self, pointer: int) -> None:
        self.lineup.communicator.all_reduce(self._source, self._target, *self._prepared.asked, pointer)

    def probe(self) -> None:
        """What the others answer comes to its box, which it has from now on."""
        key, signature = self._key, self._prepared.signature
        self._is_asking = True
        self._mailbox.enter(key, signature, nobody)
        if self.over:  # for another thread, meanwhile
            self._mailbox.leave(key)
        else:
            self.ask(key, signature, self.number)

    def holdings(self) -> object:
        return self._keeps if self.is_launched else None

    def let_go(self) -> None:
        if self._is_asking:
            self._mailbox.leave(self._key)
        self._keeps = None
