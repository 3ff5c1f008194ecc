"""A barrier that blocks the host until every rank's GPU has finished what the group gave it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ferrorpc.backends.device.context import GroupContext
from ferrorpc.collectives.execution import Execution, Prepared, deadline_error
from ferrorpc.errors import FerroError
from ferrorpc.guard import Guard
from ferrorpc.wire.frames import Key


class DeviceBarrier(Prepared):
    """A barrier of the host lanes, which a rank enters once its own GPU has finished the group's operations."""

    def __init__(self, context: GroupContext, inner: Prepared) -> None:
        self._context = context
        self._inner = inner

    def start(self, key: Key, inputs: Sequence[Any], outputs: Sequence[Any] | None, guard: Guard) -> Execution:
        return _BarrierExecution(self._context, self._inner.start(key, inputs, outputs, guard))


class _BarrierExecution(Execution):
    """Waits for the operations that were in flight when it was started, then enters the barrier of the host lanes."""

    def __init__(self, context: GroupContext, inner: Execution) -> None:
        self.guard = inner.guard
        self.polling = context.polling
        self.results, self.specs = [], []
        self._before = context.in_flight()
        self._describe = context.lanes.session.described
        self._inner = inner

    @property
    def label(self) -> str:
        return self._inner.label

    def advance(self) -> bool:
        self._before = [execution for execution in self._before if not execution.try_complete()]
        if self._before:
            return False
        self._inner.wake = self.wake
        return self._inner.advance()

    def waiting_on(self) -> list[int]:
        return self._before[0].waiting_on() if self._before else self._inner.waiting_on()

    def probe(self) -> None:
        if not self._before:
            self._inner.probe()

    def explain(self) -> str:
        if self._before:
            return f"{self.label} waits for the GPU of this rank: {self._before[0].explain()}"
        return self._inner.explain()

    def timeout_error(self) -> FerroError:
        return deadline_error(self, self._describe, barrier=True) if self._before else self._inner.timeout_error()

    def finish(self) -> None:
        self._inner.finish()
