"""Broadcasts that begin with an announcement, because the algorithm depends on a size that only the root knows.

The announcement travels down a binomial tree. A small array travels in it, so the operation takes no longer than a plain
broadcast. For a larger one it holds dtype and shape. Then every rank knows the size, selects the same algorithm, and continues
with its plan under the same key. The announcement has a slot of its own; messages that arrive early wait in the mailbox.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ferrorpc.arrays.device import is_host
from ferrorpc.collectives import select
from ferrorpc.collectives.algorithms import tree
from ferrorpc.collectives.algorithms.plan import Plan
from ferrorpc.collectives.call import Call
from ferrorpc.collectives.device_transfers import on_host, transfers_for
from ferrorpc.collectives.execution import Execution, Prepared
from ferrorpc.collectives.select import bytes_of
from ferrorpc.collectives.tuning import Tuning
from ferrorpc.errors import FerroError
from ferrorpc.guard import Guard
from ferrorpc.types import DType, TensorSpec, fits
from ferrorpc.wire import announcement
from ferrorpc.wire.frames import ANNOUNCEMENT_SLOT, Key

_KNOWN_MAX: Final = 64
"""How many plans for announced arrays are cached."""

Array = np.ndarray[Any, Any]


class AnnouncedPrepared(Prepared):
    """A broadcast that begins with an announcement.

    Args:
        call: as this rank made it: only the root has an array.
        run: prepares one call with one plan.
        tuning: what the selection depends on.
    """

    def __init__(self, call: Call, rank: int, size: int, run: Callable[[Call, Plan], Prepared], tuning: Tuning) -> None:
        assert call.root is not None, "a broadcast has a root"
        self.is_root = rank == call.root
        self.is_inline = self.is_root and bytes_of(call) <= announcement.INLINE_BYTES
        self.call = call
        self._rank = rank
        self._size = size
        self._run = run
        self._tuning = tuning
        self._known: dict[TensorSpec, Prepared] = {}
        inputs = (
            tuple(TensorSpec(DType.UINT8, (announcement.size_bytes(spec),)) for spec in call.inputs) if self.is_root else ()
        )
        self.opening = run(replace(call, inputs=inputs), tree.broadcast(rank, size, call.root, ANNOUNCEMENT_SLOT))

    def prepared_for(self, spec: TensorSpec) -> Prepared:
        """The prepared call for an array whose dtype and shape all ranks know."""
        found = self._known.get(spec)
        if found is None:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            call = replace(self.call, inputs=(spec,))
            found = self._known[spec] = self._run(call, select.plan_for(call, self._rank, self._size, self._tuning))
        return found

    def start(self, key: Key, inputs: Sequence[Any], outputs: Sequence[Any] | None, guard: Guard) -> Execution:
        return AnnouncedExecution(self, key, inputs, outputs, guard)


class AnnouncedExecution(Execution):
    """The announcement, then the array unless it travelled in the announcement."""

    def __init__(
        self, prepared: AnnouncedPrepared, key: Key, inputs: Sequence[Any], outputs: Sequence[Any] | None, guard: Guard
    ) -> None:
        self.guard = guard
        self.results: list[Array] = []
        self.specs: list[TensorSpec] = []
        self._prepared = prepared
        self._key = key
        if prepared.is_inline:
            inputs = [on_host(each, guard) for each in inputs]
        # Arrays on a device are ordered after the stream of this thread; another thread may run the second phase.
        self._transfers = transfers_for(inputs, outputs, 1)
        self._inputs: Sequence[Any] = inputs if self._transfers is None else self._transfers.sources
        self._outputs: Sequence[Any] | None = outputs if self._transfers is None else self._transfers.targets
        self.polling = None if self._transfers is None else self._transfers.polling
        self.device = None if self._transfers is None else self._transfers.device
        packed = [announcement.pack(prepared.call.inputs[0], self._inputs[0])] if prepared.is_root else []
        self._phases = [prepared.opening.start(key, packed, None, guard)]

    @property
    def _phase(self) -> Execution:
        return self._phases[-1]

    def advance(self) -> bool:
        while True:
            phase = self._phase
            phase.wake = self.wake
            if not phase.advance():
                return False
            if len(self._phases) > 1:
                self.results, self.specs = phase.results, phase.specs
                return True
            spec, data = announcement.unpack(phase.results[0])
            if data is not None:
                self.results, self.specs = [self._copied(data, spec)], [spec]
                return True
            self._phases.append(self._prepared.prepared_for(spec).start(self._key, self._inputs, self._outputs, self.guard))

    def _copied(self, data: Array, spec: TensorSpec) -> Array:
        """The array in the caller's memory where that is on the host and fits, else a copy."""
        given: Array | None = self._outputs[0] if self._outputs and is_host(self._outputs[0]) else None
        if given is None or not fits(given, spec):
            return data.copy()
        given[...] = data
        return given

    @property
    def position(self) -> int:  # type: ignore[override]
        """That of the current phase, higher in the second."""
        return len(self._phases) + self._phase.position

    def make_stream_wait(self) -> None:
        self._phase.make_stream_wait()

    @property
    def label(self) -> str:
        return self._phase.label

    def waiting_on(self) -> list[int]:
        return self._phase.waiting_on()

    def probe(self) -> None:
        self._phase.probe()

    def explain(self) -> str:
        return self._phase.explain()

    def timeout_error(self) -> FerroError:
        return self._phase.timeout_error()

    def finish(self) -> None:
        for phase in self._phases:
            phase.finish()
        if self._transfers is not None:
            self._transfers.finish()
