"""The handle of an operation on a GPU, while that has not been launched."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from ferrorpc.backends.device.work import DeviceWork
from ferrorpc.errors import CollectiveTimeoutError, GroupAbortedError
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import Guard, Latch
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.fake_gpu.groups import Ranks


def test_a_wait_that_ends_before_the_launch_names_who_is_late_and_counts(cupy: StandIn) -> None:
    counted: list[float] = []

    def body(group: ProcessGroup) -> Any:
        x = ranks.array()
        if group.rank == 0:
            work = group.all_gather(x, async_op=True)
            work.meter = SimpleNamespace(operating=counted.append, operated=counted.append)
            with pytest.raises(CollectiveTimeoutError, match=r"rank 1 .*it still runs after 0\.1 s") as raised:
                work.wait(0.1)
            assert raised.value.waiting_on == [1]
            group.session.barrier("told")
            return [each.get().tolist() for each in work.wait()]
        group.session.barrier("told")
        return [each.get().tolist() for each in group.all_gather(x)]

    ranks = Ranks(cupy, 2)
    assert ranks.run(body) == [[[1.0] * 4] * 2] * 2
    assert counted[1] >= 0.1


class Queueing:
    """A clock on which the operation is queued once somebody has waited for 0.9 s, just after its rank has found the end of the
    generation."""

    one_at_a_time = False

    def __init__(self) -> None:
        self.seconds = 0.0
        self.execution = SimpleNamespace(
            label="all_gather",
            end_event=None,
            guard=Guard(self, Latch(), 10.0),
            device=SimpleNamespace(here=nullcontext),
            has_completed=False,
            is_awaited=True,
            try_complete=lambda: False,
        )

    def now(self) -> float:
        return self.seconds

    def parker(self) -> Any:
        return SimpleNamespace(park=self.park, unpark=lambda: None)

    def park(self, until: float) -> bool:
        if self.execution.end_event is not None:
            self.seconds = until
            return False
        self.seconds = 0.9
        self.execution.guard.latch.ended_here.append(GroupAbortedError(0, "over"))
        self.execution.end_event = object()
        self.execution.on_queued()
        return True


def test_what_is_left_of_a_timeout_is_for_both_waits() -> None:
    clock: Any = Queueing()
    work = DeviceWork(clock, clock.execution, lambda execution: None)
    work.is_on_device = True
    with pytest.raises(CollectiveTimeoutError, match="after 1 s"):
        work.wait(1.0)
    assert clock.seconds == pytest.approx(1.0)
