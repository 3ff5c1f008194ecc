"""NCCL launches what several ranks do from a thread of its own, after the call: meanwhile nothing else can be launched."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from ferrorpc.backends.device.completion import CompletionWatcher
from ferrorpc.collectives.progress import Progress
from ferrorpc.group import ProcessGroup
from ferrorpc.testing import run_groups
from ferrorpc.testing.gpu import nccl
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.fake_gpu.worlds import nccl_backends

OPERATIONS = 20


def behind_a_busy_gpu(cupy: StandIn, start: Any) -> None:
    """Two ranks start asynchronous operations while their GPUs are busy, and wait for the last in a stream."""
    released, both = threading.Event(), threading.Barrier(2)

    def body(group: ProcessGroup) -> None:
        with cupy.cuda.Device(group.rank):
            x = cupy.asarray(np.ones(4, np.float32))
            group.all_reduce(x, out=x)  # the first connects
            group.synchronize()
            both.wait(20)
            cupy.machine.gpus[group.rank].default.enqueue(released.is_set)
            works = start(group, x)
            works[-1].wait()
            both.wait(20)
            released.set()
            assert cupy.asnumpy(works[-1].wait()).tolist() == [4.0] * 4

    run_groups([ProcessGroup(backend) for backend in nccl_backends(cupy, 2)], body)


@pytest.mark.usefixtures("launched_within_the_call")
def test_asynchronous_operations_are_launched_on_the_callers_thread(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[str] = []
    submit = Progress.submit

    def counting(progress: Progress, execution: Any, *arguments: Any) -> Any:
        if not isinstance(execution, CompletionWatcher):
            submitted.append(execution.label)
        return submit(progress, execution, *arguments)

    def start(group: ProcessGroup, x: Any) -> list[Any]:
        monkeypatch.setattr(Progress, "submit", counting)
        return [group.all_reduce(x, async_op=True) for _ in range(OPERATIONS)]

    behind_a_busy_gpu(cupy, start)
    assert not submitted, "the progress thread would launch them one nap after the other"


def test_where_that_takes_longer_the_progress_thread_does_not_sleep_longer_each_time(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each launch is progress, after which it looks again soon."""
    moved: list[float] = []
    monkeypatch.setattr("ferrorpc.backends.device.launch_queue.LAUNCH_SECONDS", 0.0)
    monkeypatch.setattr(nccl, "LOOKS_TO_LAUNCH", 2)
    next_poll = Progress._next_poll

    def looking(progress: Progress, now: float) -> float:
        moved.append(progress._moved_at)
        return next_poll(progress, now)

    def start(group: ProcessGroup, x: Any) -> list[Any]:
        works = [group.all_reduce(x, async_op=True) for _ in range(OPERATIONS)]
        monkeypatch.setattr(Progress, "_next_poll", looking)
        return works

    behind_a_busy_gpu(cupy, start)
    assert len(set(moved)) > OPERATIONS // 2
