"""What waits for this rank's own GPU: it says so, blames no peer, and lasts as long as its operation."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from ferrorpc.arrays import staging
from ferrorpc.arrays.devices import device_of
from ferrorpc.errors import CollectiveTimeoutError, GroupAbortedError
from ferrorpc.group import ProcessGroup
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.fake_gpu.groups import SECONDS, Ranks

ONES = np.ones(4, np.float32)


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
