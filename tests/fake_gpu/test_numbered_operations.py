"""Operations of streams over NCCL, which ranks may start in different orders: where they are launched, and how each ends."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest

from ferrorpc.backends.nccl.backend import NcclBackend
from ferrorpc.group import ProcessGroup
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.fake_gpu.ddp_worlds import world
from tests.waiting import eventually


def test_operations_of_streams_may_be_started_in_any_order_on_any_rank(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> None:
        streams = [group.stream(), group.stream(channels=2)]
        calls = [(stream, number) for stream in (0, 1) for number in (0, 3, 4, 9)]
        random.Random(group.rank).shuffle(calls)
        works = {
            (stream, number): streams[stream].all_reduce(cupy.asarray(np.full(2, 10.0 * stream + number)), number=number)
            for stream, number in calls
        }
        between = group.all_reduce(cupy.asarray(np.ones(3)))
        for (stream, number), work in works.items():
            np.testing.assert_array_equal(cupy.asnumpy(work.wait()), np.full(2, 3 * (10.0 * stream + number)))
        np.testing.assert_array_equal(cupy.asnumpy(between), np.full(3, 3.0))

    world(cupy, "nccl", 3, body)


@pytest.mark.parametrize("size", [1, 2])
def test_an_operation_of_a_stream_is_launched_on_the_thread_of_its_caller(cupy: StandIn, size: int) -> None:
    """By the rank that gives numbers. Another thread would have to wait until the caller's lets go of the interpreter."""

    def body(group: ProcessGroup) -> None:
        stream, backend = group.stream(), group._backend
        assert isinstance(backend, NcclBackend)
        assert backend.context.numbered is not None
        communicator: Any = backend.context.numbered.communicator
        launch, launched = communicator.all_reduce, list[threading.Thread]()
        communicator.all_reduce = lambda *told: (launched.append(threading.current_thread()), launch(*told))[1]
        work = stream.all_reduce(cupy.asarray(np.ones(2)), number=0)
        if group.rank == 0:
            assert launched == [threading.current_thread()]
        np.testing.assert_array_equal(cupy.asnumpy(work.wait()), np.full(2, float(size)))

    world(cupy, "nccl", size, body)


def test_operations_of_streams_that_are_watched_in_another_order_end_each_by_itself(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where two threads launch them at once."""

    def body(group: ProcessGroup) -> None:
        stream, backend = group.stream(), group._backend
        assert isinstance(backend, NcclBackend)
        stream.all_reduce(cupy.asarray(np.ones(2)), number=0).wait(host=True)  # for the first one NCCL connects
        watch, launched = backend.context.watch, list[Any]()
        monkeypatch.setattr(backend.context, "watch", launched.append)
        released: list[bool] = []
        early = stream.all_reduce(cupy.asarray(np.ones(2)), number=1)
        with cupy.cuda.Stream(non_blocking=True) as busy:
            busy.fake.enqueue(lambda: bool(released))
            late = stream.all_reduce(cupy.asarray(np.ones(2)), number=2, timeout=20)  # one watcher takes both
        eventually(lambda: launched[0].end_event.done)
        for execution in reversed(launched):
            watch(execution)
        time.sleep(0.05)  # for the watcher to look at them
        assert not late.done()
        early.wait(host=True)
        assert not late.done()
        released.append(True)
        late.wait(host=True)

    world(cupy, "nccl", 1, body)
