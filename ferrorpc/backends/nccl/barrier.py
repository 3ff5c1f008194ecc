"""A barrier that blocks the host: no rank leaves it before every rank's GPU has done what the group gave it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ferrorpc.backends.nccl.site import Site
from ferrorpc.collectives.execution import Execution, Prepared
from ferrorpc.errors import FerroError
from ferrorpc.guard import Guard
from ferrorpc.wire.frames import Key


class SettledBarrier(Prepared):
    """A barrier of the host lanes, entered once this rank's GPU is through."""

    def __init__(self, site: Site, inner: Prepared) -> None:
        self._site = site
        self._inner = inner

    def start(self, key: Key, inputs: Sequence[Any], outputs: Sequence[Any] | None, guard: Guard) -> Execution:
        return _Settling(self._site, self._inner.start(key, inputs, outputs, guard))


class _Settling(Execution):
    """First what was in flight when it was started, then the barrier."""

    def __init__(self, site: Site, inner: Execution) -> None:
        self.guard = inner.guard
        self.polling = site.polling
        self.results, self.specs = [], []
        self._before = site.in_flight()
        self._inner = inner

    @property
    def label(self) -> str:
        return self._inner.label

    def advance(self) -> bool:
        self._before = [execution for execution in self._before if not execution.land()]
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
        return self._before[0].timeout_error() if self._before else self._inner.timeout_error()

    def finish(self) -> None:
        self._inner.finish()
