"""Calls prepared with their plans. Where the arrays of a run are (host or GPU) decides what runs the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

from ferrorpc.collectives import select
from ferrorpc.collectives.algorithms.plan import Plan
from ferrorpc.collectives.announced_broadcast import AnnouncedPrepared
from ferrorpc.collectives.call import Call
from ferrorpc.collectives.compressed_on_device import CompressedDeviceExecution, DeviceWorkspace, suits
from ferrorpc.collectives.device_transfers import TransferWorkspace, transfers_for, with_transfers
from ferrorpc.collectives.execution import Describe, Execution, Prepared
from ferrorpc.collectives.executor import Layout, PlanExecution
from ferrorpc.collectives.fusion import fused
from ferrorpc.collectives.select import DEFAULT_TUNING
from ferrorpc.collectives.tuning import Tuning
from ferrorpc.collectives.workspace import Workspace
from ferrorpc.guard import Guard
from ferrorpc.transports.base import Transport
from ferrorpc.wire.frames import Key


def prepare(
    call: Call, rank: int, size: int, run: Callable[[Call, Plan], Prepared], tuning: Tuning = DEFAULT_TUNING
) -> Prepared:
    """Validates a call and prepares its plan, with an announcement first where it needs one.

    Args:
        run: prepares one call with one plan.
        tuning: what the selection depends on.

    Raises:
        UsageError, TensorMismatchError: as `select.plan_for`.
    """
    call = tuning.applied(call)
    select.check(call)
    if not select.is_announced(call, size, tuning):
        return run(call, select.plan_for(call, rank, size, tuning))
    return AnnouncedPrepared(call, rank, size, run, tuning)


class PlanPrepared(Prepared):
    """A call with its plan, for one group on one transport.

    Args:
        ranks: world rank of each group rank.
        rank: own group rank.
    """

    def __init__(
        self, transport: Transport, ranks: Sequence[int], rank: int, call: Call, plan: Plan, describe: Describe
    ) -> None:
        self.call = call
        self.plan = plan
        self._layout_of = partial(Layout, transport, describe, call, plan, rank, tuple(ranks))
        self.layout = self._layout_of(fused(plan))

    @cached_property
    def transfer_layout(self) -> Layout:
        """The layout for runs with some arrays on a device."""
        return self._layout_of(with_transfers(self.layout.tasks, len(self.call.inputs)))

    def start(self, key: Key, inputs: Sequence[Any], outputs: Sequence[Any] | None, guard: Guard) -> Execution:
        layout = self.layout
        if layout.rules.codec is not None and suits(self.call, inputs, outputs):
            on_device = DeviceWorkspace(layout.rules, inputs, outputs)
            return CompressedDeviceExecution(layout, key, on_device, guard)
        transfers = transfers_for(inputs, outputs, self.plan.out_items, layout.own)
        if transfers is None:
            return PlanExecution(layout, key, Workspace(layout.rules, inputs, outputs), guard)
        workspace = TransferWorkspace(self.transfer_layout.rules, transfers)
        return PlanExecution(self.transfer_layout, key, workspace, guard, transfers)
