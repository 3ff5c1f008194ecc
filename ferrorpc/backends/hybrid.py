"""The backend for jobs that have arrays on GPUs and on hosts: each goes by what suits it.

Arrays of a GPU go by NCCL, those of a host by the host lanes, with the algorithms, bits and compression they have there. What
NCCL lacks (operators, dtypes, `wire=`, `algorithm=`) goes by the host lanes too, through pinned memory. All ranks must come to
the same answer. Where every rank brings an array, each looks at its own: an array on a GPU here and on a host there is a
mismatch, which is found and explained like any other. Where only the root does (broadcast, scatter), it announces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ferrorpc.arrays.device import Device, is_host
from ferrorpc.backends.nccl.api import reduction
from ferrorpc.backends.nccl.backend import NcclBackend
from ferrorpc.collectives.arena.arena import Arena
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.execution import Bare, Execution, Prepared
from ferrorpc.guard import Guard
from ferrorpc.wire.frames import Key

ROOT_DECIDES: Final = (Operation.BROADCAST, Operation.SCATTER)


class HybridBackend(NcclBackend):
    """One rank's backend. As `NcclBackend`, for arrays on GPUs; as its lanes, for the others."""

    name = "hybrid"

    @property
    def arena(self) -> Arena | None:
        return self.lanes.arena

    def prepare(self, call: Call) -> Prepared:
        if call.operation is Operation.BARRIER:
            return super().prepare(call)
        if call.operation in ROOT_DECIDES and call.algorithm is None:
            return super().prepare(call)
        host = self.lanes.prepare(call)
        return HybridPrepared(host, super().prepare(call) if self._suits_nccl(call) else None)

    def instead(self, call: Call) -> Prepared | None:
        """As messages: what the root decides is known only when later operations may have begun."""
        return self.lanes.prepare_as_messages(call) if call.operation in ROOT_DECIDES else None

    def _suits_nccl(self, call: Call) -> bool:
        if call.wire is not None or call.algorithm is not None:
            return False
        return call.op is None or reduction(call.op, call.inputs[0].dtype, self.api.features) is not None

    def explain(self, call: Call) -> str:
        host = self.lanes.explain(call)
        if call.operation is Operation.BARRIER:
            return host
        lacks = f"{call.signature}: {self.api.library} has nothing for it, so as on the host"
        near = super().explain(call) if self._suits_nccl(call) else lacks
        return f"on the host: {host}\non a GPU: {near}"


class HybridPrepared(Prepared):
    """A call whose arrays every rank knows, both ways.

    Args:
        host: by the host lanes.
        near: by NCCL; None where NCCL has nothing for it.
    """

    def __init__(self, host: Prepared, near: Prepared | None) -> None:
        self.host = host
        self.near = near

    def bare(self, device: Device) -> Bare | None:
        return None if self.near is None else self.near.bare(device)

    def start(self, key: Key, inputs: Sequence[Any], outputs: Sequence[Any] | None, guard: Guard) -> Execution:
        if self.near is None or all(is_host(array) for array in inputs):
            return self.host.start(key, inputs, outputs, guard)
        return self.near.start(key, inputs, outputs, guard)
