"""Results on a GPU, and who may use them when: the streams in which they are waited for, and the memory they pass through."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ferrorpc.group import ProcessGroup
from ferrorpc.testing.gpu.stand_in import StandIn
from ferrorpc.work import Work
from tests.fake_gpu.ddp_worlds import EACH_ITS_OWN_GPU, LANES, world
from tests.waiting import eventually

COUNT = 64
SECONDS = 30.0


def ones(cupy: StandIn) -> Any:
    return cupy.asarray(np.ones(COUNT, np.float32))


def wait_in_two(cupy: StandIn, work: Work[Any], first: Any, released: list[bool]) -> None:
    """Waits in `first` and in another stream, which doubles the sum of two ranks; only then is the GPU released to make it."""
    with first:
        work.wait()
    with cupy.cuda.Stream(non_blocking=True):
        doubled = work.wait() * 2
        for _ in range(10):
            cupy.machine.step()
        released.append(True)
        np.testing.assert_array_equal(cupy.asnumpy(doubled), np.full(COUNT, 4))


@pytest.mark.parametrize("lanes", LANES)
def test_every_stream_that_waits_goes_on_after_the_result(cupy: StandIn, lanes: str) -> None:
    """Not the first one alone: threads that share a Work wait in streams of their own."""
    released: list[bool] = []
    cupy.machine.copying = lambda direction, gpu, size_bytes: direction == "down" or bool(released)

    def body(group: ProcessGroup) -> None:
        x = ones(cupy)
        cupy.cuda.get_current_stream().synchronize()
        wait_in_two(cupy, group.all_reduce(x, async_op=True), cupy.cuda.Stream(non_blocking=True), released)

    world(cupy, lanes, 2, body)


@pytest.mark.parametrize("lanes", LANES)
def test_so_it_does_where_the_first_one_still_copies_the_result_to_where_it_belongs(cupy: StandIn, lanes: str) -> None:
    def body(group: ProcessGroup) -> None:
        first = cupy.cuda.Stream(non_blocking=True)
        out = cupy.asarray(np.zeros((COUNT, 2), np.float32))[:, 0]
        cupy.cuda.get_current_stream().synchronize()
        work = group.all_reduce(ones(cupy), out=out, async_op=True)
        released: list[bool] = []
        first.fake.enqueue(lambda: bool(released))
        wait_in_two(cupy, work, first, released)

    world(cupy, lanes, 2, body)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("operation", ["broadcast", "all_gather"])
def test_a_stream_that_waits_writes_the_result_after_what_the_starting_stream_still_wrote(
    cupy: StandIn, lanes: str, operation: str, strided: bool
) -> None:
    """That may be the memory of `out`; nothing that this rank sends has to wait for it."""

    def body(group: ProcessGroup) -> None:
        first, second = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
        x = ones(cupy)
        rows = cupy.asarray(np.zeros((COUNT, 2), np.float32))
        out = rows[:, 0] if strided else cupy.asarray(np.zeros(COUNT, np.float32))
        cupy.cuda.get_current_stream().synchronize()
        released = [True] if group.rank == 0 else []  # what it sends has to be read first
        with first:
            first.fake.enqueue(lambda: bool(released))
            out[...] = 5
            if operation == "broadcast":
                work = group.broadcast(x if group.rank == 0 else None, 0, out=out, async_op=True)
            else:
                none = x[:0]
                work = group.all_gather(x if group.rank == 0 else none, out=[out, none.copy(), none.copy()], async_op=True)
        with second:
            work.wait()
            for _ in range(50):
                cupy.machine.step()
        released.append(True)
        first.synchronize()
        second.synchronize()
        np.testing.assert_array_equal(cupy.asnumpy(out), np.ones(COUNT))

    world(cupy, lanes, 3, body)


@pytest.mark.parametrize("lanes", LANES)
def test_what_a_result_passes_through_is_not_used_again_before_it_was_read(cupy: StandIn, lanes: str) -> None:
    """It is the starting stream's memory, and is read in the stream that waits."""

    def body(group: ProcessGroup) -> None:
        late = cupy.cuda.Stream(non_blocking=True)
        out = cupy.asarray(np.zeros((COUNT, 2), np.float32))[:, 0]
        work = group.all_reduce(ones(cupy), out=out, async_op=True)
        released: list[bool] = []
        late.fake.enqueue(lambda: bool(released))
        with late:
            work.wait()
            del work
        for _ in range(50):
            cupy.machine.step()
        released.append(True)
        with late:
            np.testing.assert_array_equal(cupy.asnumpy(out.copy()), np.full(COUNT, 2))

    world(cupy, lanes, 2, body)


@pytest.mark.parametrize("lanes", EACH_ITS_OWN_GPU)
@pytest.mark.parametrize("size", [1, 2])
def test_results_are_where_their_inputs_are_whatever_the_current_device(cupy: StandIn, lanes: str, size: int) -> None:
    def body(group: ProcessGroup) -> None:
        me = group.rank
        x = ones(cupy)
        whole = cupy.zeros(group.size * COUNT, np.float32)
        mine = whole[me * COUNT : (me + 1) * COUNT]
        mine[...] = x
        with cupy.cuda.Device(7):
            total = group.all_reduce(x)
            group.all_gather(mine, out=whole)
        assert total.device.id == me
        np.testing.assert_array_equal(cupy.asnumpy(total), np.full(COUNT, group.size))
        np.testing.assert_array_equal(cupy.asnumpy(whole), np.ones(group.size * COUNT))

    world(cupy, lanes, size, body)


@pytest.mark.parametrize("lanes", EACH_ITS_OWN_GPU)
def test_the_thread_that_lets_go_of_arrays_is_on_their_device(cupy: StandIn, lanes: str) -> None:
    """The null stream has one number on every GPU, so `malloc_async` gives its memory back in that of the current device."""

    def body(group: ProcessGroup) -> None:
        found: list[int] = []
        work = group.all_reduce(ones(cupy), async_op=True)
        work.on_done(lambda: found.append(cupy.cuda.Device().id))
        work.wait(host=True)

        def told() -> list[int]:
            cupy.machine.step()
            return found

        eventually(told, "the Work says that it is done")
        assert found == [group.rank]

    world(cupy, lanes, 3, body)


@pytest.mark.parametrize("lanes", ["nccl", "hybrid"])
def test_results_for_the_host_wait_for_no_other_work_of_the_gpu(cupy: StandIn, lanes: str) -> None:
    """The null stream, which is current on a thread that chose none, waits for whatever any blocking stream holds."""

    def body(group: ProcessGroup) -> None:
        late: list[bool] = []
        cupy.stream.enqueue(lambda: bool(late))
        with cupy.cuda.Stream(non_blocking=True):
            works = [
                group.scatter([ones(cupy), ones(cupy)] if group.rank == 0 else None, root=0, async_op=True),
                group.all_gather(np.ones(3) if lanes == "nccl" else ones(cupy), async_op=True),
            ]
            found = [work.wait(timeout=SECONDS) for work in works]
            assert isinstance(found[0], np.ndarray) == (group.rank == 1)
        late.append(True)

    world(cupy, lanes, 2, body)
