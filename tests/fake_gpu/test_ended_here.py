"""A rank that has found what ends its generation begins and completes no operation on its GPU before the coordinator's word."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from ferrorpc.backends.hybrid import HybridBackend
from ferrorpc.backends.nccl.backend import NcclBackend
from ferrorpc.errors import CollectiveMismatchError, FerroError
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import SYSTEM_CLOCK, Latch
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.fake_gpu.groups import SECONDS, Ranks

FOUND = CollectiveMismatchError({0: "gather()", 1: "scatter()"})


@pytest.mark.parametrize("kind", [NcclBackend, HybridBackend])
@pytest.mark.parametrize(
    "call",
    [
        lambda group, x: group.all_reduce(x),
        lambda group, x: group.all_reduce(x, async_op=True).wait(host=True),
        lambda group, x: group.all_gather(x),
        lambda group, x: group.all_reduce(np.ones(4, np.float32)),
        lambda group, x: group._backend.all_reduce_raw(x.data.ptr, x.data.ptr, x.size, "float32"),
    ],
    ids=["blocking", "asynchronous", "gather", "host", "raw"],
)
def test_nothing_begins_after_that(cupy: StandIn, kind: Any, call: Callable[[ProcessGroup, Any], object]) -> None:
    ranks, over = Ranks(cupy, 2, kind), threading.Event()

    def body(group: ProcessGroup) -> None:
        x, latch = ranks.array(8), group._backend.latch
        group.all_reduce(x)
        group.synchronize()
        if group.rank:
            assert over.wait(SECONDS)
            return
        told_later(latch)
        latch.end(FOUND)
        before = len(group._backend.context.in_flight())
        with pytest.raises(CollectiveMismatchError, match="gather"):
            call(group, x)
        assert (latch.cause is not None, before) == (True, 0)
        over.set()

    assert ranks.run(body) == [None, None]


@pytest.mark.parametrize("host", [True, False])
def test_what_the_gpu_completes_meanwhile_is_left_in_flight_until_then(cupy: StandIn, host: bool) -> None:
    ranks, found = Ranks(cupy, 2), threading.Barrier(2)

    def body(group: ProcessGroup) -> None:
        x, latch = ranks.array(8), group._backend.latch
        group.all_reduce(x)
        group.synchronize()
        work = group.all_reduce(x, async_op=True) if group.rank == 0 else None
        if group.rank == 0:
            told_later(latch)
            latch.end(FOUND)
        found.wait(SECONDS)
        if work is None:  # only now the GPU of rank 0 can complete its operation
            with suppress(FerroError):  # it may be told just before, or after
                group.all_reduce(x, async_op=True).wait(host=True)
            return
        with pytest.raises(CollectiveMismatchError, match="gather"):
            work.wait(host=host)

    assert ranks.run(body) == [None, None]


def told_later(latch: Latch) -> None:
    """The coordinator's word comes after a moment."""
    report = latch._report
    assert report is not None
    latch._report = lambda cause, of: SYSTEM_CLOCK.call_at(SYSTEM_CLOCK.now() + 0.2, lambda: report(cause, of))
