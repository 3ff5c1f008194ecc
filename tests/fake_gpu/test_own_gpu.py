"""What waits for this rank's own GPU: it says so, blames no peer, and lasts as long as its operation."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np
import pytest

from ferrorpc.arrays import staging
from ferrorpc.arrays.devices import device_of
from ferrorpc.errors import CollectiveTimeoutError, GroupAbortedError
from ferrorpc.group import ProcessGroup
from ferrorpc.testing import run_groups
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.fake_gpu.groups import SECONDS, Ranks
from tests.fake_gpu.worlds import host_lanes
from tests.integration.test_grpc_backend import GrpcWorld

ONES = np.ones(4, np.float32)
MANY = np.ones(1 << 20, np.float32)
"""So many that shared memory has their sum copied to the GPU piece by piece."""


@pytest.fixture
def unpinned(cupy: StandIn) -> None:
    """As for arrays that are larger than all that may be pinned."""
    for index in range(3):
        device_of(cupy, index).staging.pool._most_bytes = 0


@pytest.mark.usefixtures("unpinned")
@pytest.mark.parametrize("ends", ["its deadline", "an abort"])
def test_an_array_of_the_hosts_that_waits_for_the_gpu_ends_with_its_operation(cupy: StandIn, ends: str) -> None:
    is_late = ends == "its deadline"

    def body(group: ProcessGroup) -> None:
        group.barrier()
        if group.rank == 1:
            if not is_late:
                time.sleep(0.2)
                group.abort("enough")
            with pytest.raises(GroupAbortedError, match="end of a copy" if is_late else "enough"):
                group.all_reduce(ONES)
            return
        with cupy.cuda.Stream(non_blocking=True) as stuck:
            stuck.fake.enqueue(lambda: False)
            expected = CollectiveTimeoutError if is_late else GroupAbortedError
            with pytest.raises(expected, match="end of a copy" if is_late else "enough"):
                group.all_reduce(ONES, timeout=0.4 if is_late else SECONDS)
            stuck.fake.tasks.clear()

    Ranks(cupy, 2).run(body)


@pytest.mark.usefixtures("unpinned")
def test_so_it_does_where_a_rank_is_late_whose_result_the_stream_waits_for(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "COPY_SECONDS", 0.1)

    def body(group: ProcessGroup) -> Any:
        if group.rank == 1:
            time.sleep(0.5)
        x = ranks.array()
        group.all_reduce(x, out=x)
        return group.all_reduce(ONES).tolist()

    ranks = Ranks(cupy, 2)
    assert ranks.run(body) == [[2.0] * 4] * 2


def does_its_part(group: ProcessGroup, what: str) -> Any:
    """What rank 1 does of an operation with rank 0, which is late."""
    if what == "recv":
        return group.send(MANY, 0, async_op=True)
    return group.recv(0, async_op=True) if what == "send" else group.all_reduce(MANY, async_op=True)


def calls_in_vain(group: ProcessGroup, what: str, there: Any) -> None:
    """What rank 0 does of it, with an array of a GPU that does not come to it."""
    if what == "recv":
        group.recv(1, out=there, timeout=0.4)
    elif what == "send":
        group.send(there, 1, timeout=0.4)
    else:
        group.all_reduce(MANY, out=there, timeout=0.4)


@pytest.mark.usefixtures("unpinned")
@pytest.mark.parametrize("what", ["recv", "all_reduce", "send"])
@pytest.mark.parametrize("lanes", ["messages", pytest.param("shared memory", marks=pytest.mark.shared_memory)])
def test_what_waits_for_the_gpu_to_give_its_array_or_take_its_result_says_so(cupy: StandIn, lanes: str, what: str) -> None:
    """The other rank has done its part."""

    def body(group: ProcessGroup) -> None:
        group.barrier()
        if group.rank == 1:
            work = does_its_part(group, what)
            group.session.barrier("done")
            with contextlib.suppress(GroupAbortedError):
                work.wait()
            return
        there = cupy.asarray(np.zeros_like(MANY))
        cupy.cuda.get_current_stream().synchronize()
        group.session.barrier("done")
        with cupy.cuda.Stream(non_blocking=True) as stuck:
            stuck.fake.enqueue(lambda: False)
            with pytest.raises(CollectiveTimeoutError, match="this rank's own GPU") as raised:
                calls_in_vain(group, what, there)
            stuck.fake.tasks.clear()
        assert not raised.value.waiting_on
        assert what not in ("send", "recv") or "stream" in (raised.value.hint or "")
        if what == "recv":
            np.testing.assert_array_equal(cupy.asnumpy(group.recv(1, out=there)), MANY)

    if lanes == "messages":
        run_groups([ProcessGroup(backend) for backend in host_lanes(2)], body)
    else:
        with GrpcWorld(2, transport="shared_memory") as world:
            run_groups([ProcessGroup(backend, SECONDS) for backend in world.backends], body)


def test_a_compressed_sum_whose_stream_is_late_says_so(cupy: StandIn) -> None:
    def body(group: ProcessGroup) -> None:
        with cupy.cuda.Device(group.rank), cupy.cuda.Stream(non_blocking=True) as stream:
            x = cupy.asarray(ONES)
            stream.synchronize()
            if group.rank == 0:
                stream.fake.enqueue(lambda: False)
            expected = GroupAbortedError if group.rank else CollectiveTimeoutError
            with pytest.raises(expected, match="this rank's own GPU"):
                group.all_reduce(x, wire="bf16", timeout=SECONDS if group.rank else 0.4)
            stream.fake.tasks.clear()

    run_groups([ProcessGroup(backend) for backend in host_lanes(2)], body)
