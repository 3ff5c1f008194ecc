"""An operation that cannot be started, or whose result cannot be made or is interrupted on the way: no other waits for it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from ferrorpc.backends.device.collective import CollectivePrepared
from ferrorpc.backends.device.completion import CompletionWatcher
from ferrorpc.backends.device.work import DeviceWork
from ferrorpc.errors import FerroError, LimitExceededError
from ferrorpc.group import ProcessGroup
from ferrorpc.operations.results import Into
from ferrorpc.testing.gpu.stand_in import StandIn
from tests.fake_gpu.groups import SECONDS, Ranks
from tests.waiting import eventually


def test_an_operation_that_cannot_be_started_keeps_no_place_in_the_launch_order(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, announce, failed = Ranks(cupy, 2), CollectivePrepared.announce, set[int]()

    def announcing(prepared: CollectivePrepared, *arguments: Any) -> Any:
        if prepared.context.rank not in failed:
            failed.add(prepared.context.rank)
            raise MemoryError("no room")
        return announce(prepared, *arguments)

    monkeypatch.setattr(CollectivePrepared, "announce", announcing)

    def body(group: ProcessGroup) -> None:
        x = ranks.array()
        with pytest.raises(MemoryError):
            group.all_gather(x)
        assert [cupy.asnumpy(each).tolist() for each in group.all_gather(x, timeout=5.0)] == [[1.0] * 4] * 2
        group.synchronize()

    assert ranks.run(body) == [None, None]


def failing(error: Exception) -> Any:
    def fail(*arguments: Any) -> Any:
        raise error

    return fail


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Watchers look only once it is set."""
    advance, may_look = CompletionWatcher.advance, threading.Event()
    monkeypatch.setattr(CompletionWatcher, "advance", lambda watcher: may_look.is_set() and advance(watcher))
    return may_look


@pytest.mark.usefixtures("launched_within_the_call")
@pytest.mark.parametrize("who", ["the caller", "the watcher"])
@pytest.mark.parametrize(("error", "kind"), [(MemoryError("no room"), LimitExceededError), (RuntimeError("odd"), FerroError)])
def test_a_result_that_cannot_be_made_is_this_ranks_failure_alone(
    cupy: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    watches: threading.Event,
    who: str,
    error: Exception,
    kind: type[FerroError],
) -> None:
    ranks = Ranks(cupy, 2)

    def body(group: ProcessGroup) -> None:
        x = ranks.array()
        group.all_reduce(x)
        out = np.zeros(4, np.float32)
        work = group.all_reduce(x, out=out, async_op=True)
        if group.rank == 0:
            monkeypatch.setattr(Into, "give", failing(error))
        group.barrier()
        if who == "the watcher":
            watches.set()
            eventually(work.done, "it has ended", SECONDS)
        with pytest.raises(kind, match=str(error)):
            work.wait(timeout=SECONDS)
        watches.set()
        assert cupy.asnumpy(group.all_reduce(x)).tolist() == [2.0] * 4
        group.synchronize()
        group.barrier()
        assert group._backend.latch.cause is None

    assert ranks.run(body) == [None, None]


@pytest.mark.usefixtures("launched_within_the_call")
@pytest.mark.parametrize("struck", ["before the result is set", "after"])
def test_who_is_interrupted_while_making_a_result_leaves_it_to_the_watcher(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, watches: threading.Event, struck: str
) -> None:
    (backend,) = (ranks := Ranks(cupy, 1)).backends
    (group,) = ranks.groups
    name = "complete" if struck == "before the result is set" else "_tell"
    original, interrupted = getattr(DeviceWork, name), list[object]()

    def slow(work: DeviceWork, *arguments: Any) -> Any:
        if work is given and not interrupted:
            interrupted.append(work)
            watches.set()
            (watcher,) = backend.context._watchers.values()
            eventually(lambda: not watcher._in_flight, "the watcher has passed it by", SECONDS)
            raise KeyboardInterrupt
        return original(work, *arguments)

    out = np.zeros(4, np.float32)
    given = group.all_reduce(cupy.asarray(np.ones(4, np.float32)), out=out, async_op=True)
    told = threading.Event()
    given.on_done(told.set)
    monkeypatch.setattr(DeviceWork, name, slow)
    with pytest.raises(KeyboardInterrupt):
        given.wait(host=True)
    out += 1 if struck == "after" else 0
    assert told.wait(SECONDS)
    assert given.done()
    assert out.tolist() == [2.0 if struck == "after" else 1.0] * 4
    group.close()
