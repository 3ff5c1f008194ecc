"""Ranks that leave while an operation here lasts: nobody needs them for what they had launched, and somebody for what not."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from ferrorpc.backends.device.context import PROBE_THREAD
from ferrorpc.backends.device.departures import CLOSED_MAX, Departures
from ferrorpc.backends.nccl.backend import NcclBackend
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.coordination.local import LocalWorld
from ferrorpc.errors import LimitExceededError, PeerLostError
from ferrorpc.guard import SYSTEM_CLOCK, Guard, SystemClock
from ferrorpc.testing.gpu.stand_in import StandIn
from ferrorpc.types import DType, ReduceOp, TensorSpec
from ferrorpc.wire.frames import Key
from tests.fake_gpu.groups import Ranks
from tests.fake_gpu.worlds import SECONDS, nccl_backends
from tests.threads import in_threads
from tests.waiting import eventually

SUM = Call(Operation.REDUCE, (TensorSpec(DType.FLOAT32, (4,)),), op=ReduceOp.SUM, root=0)
"""Rank 1 only gives: it may be through while rank 0 has not begun."""


def started(cupy: StandIn, backend: Any, number: int, stream: int = 0) -> Any:
    """The sum of ones, launched, as a group would with arrays of its GPU."""
    with cupy.cuda.Device(backend.device.index):
        x = cupy.asarray(np.ones(4, np.float32))
        execution = backend.prepare(SUM).start(
            Key(backend.group_id, stream, number), [x], None, Guard(SYSTEM_CLOCK, backend.latch, SECONDS)
        )
        execution.until_done, execution.wake = False, lambda: None
    return execution


def both(cupy: StandIn, backends: list[NcclBackend], number: int, stream: int = 0) -> list[Any]:
    executions = [started(cupy, backend, number, stream) for backend in backends]
    eventually(lambda: all(execution.advance() for execution in executions), "both are in their streams")
    return executions


def busy(cupy: StandIn, backend: Any, stream: int = 0) -> list[bool]:
    """The GPU comes to nothing of this group until what is returned has something in it: other work has taken all of it."""
    released: list[bool] = []
    cupy.machine.stream(backend.context.launch_queue(stream).stream.pointer).enqueue(lambda: bool(released))
    return released


def leave(backend: Any) -> None:
    """As a group that is closed."""
    backend.close()
    backend.session.leave("")


def probe(execution: Any, times: int = 4) -> None:
    """As its driver does after a while, and again, until the others were asked."""
    for _ in range(times):
        execution.probe()
        for thread in [each for each in threading.enumerate() if each.name == PROBE_THREAD]:
            thread.join(SECONDS)


def test_who_left_after_its_part_was_done_is_not_needed_however_long_the_operation_lasts_here(cupy: StandIn) -> None:
    backends = nccl_backends(cupy, 2)
    released = busy(cupy, backends[0])
    first, given = both(cupy, backends, 1)
    second, also_given = both(cupy, backends, 2)
    eventually(lambda: all(each.try_complete() for each in (given, also_given)), "rank 1 is through")
    leave(backends[1])
    for execution in (first, second):
        probe(execution)
    assert backends[0].latch.cause is None
    released.append(True)
    eventually(second.try_complete, "the sum is there")
    np.testing.assert_array_equal(cupy.asnumpy(second.results[0]), np.full(4, 2.0, np.float32))


def test_who_left_without_launching_an_operation_is_needed_for_it(cupy: StandIn) -> None:
    backends = nccl_backends(cupy, 2)
    _, given = both(cupy, backends, 1)
    eventually(given.try_complete, "rank 1 is through")
    call = started(cupy, backends[0], 2)
    eventually(call.advance, "it is in its stream")
    cupy.machine.settle()
    leave(backends[1])
    probe(call)
    cause = backends[0].latch.cause
    assert isinstance(cause, PeerLostError)
    assert cause.rank == 1


@pytest.mark.parametrize("launched", [True, False])
def test_so_it_is_in_a_subgroup_that_was_closed_before(cupy: StandIn, launched: bool) -> None:
    backends = nccl_backends(cupy, 3)
    released: list[bool] = []

    def part(rank: int) -> Any:
        return backends[rank].split([0, 1], 5) if rank < 2 else backends[rank].stay_out([0, 1], 5)

    parts = in_threads(3, part)[:2]
    released = busy(cupy, parts[0])
    if launched:
        call, given = both(cupy, parts, 1)
        eventually(given.try_complete, "rank 1 is through")
    else:
        call = started(cupy, parts[0], 1)
        eventually(call.advance, "it is in its stream")
    parts[1].close()
    leave(backends[1])
    probe(call)
    assert isinstance(backends[0].latch.cause, PeerLostError) is not launched
    released.append(True)


@pytest.mark.parametrize("launched", [True, False])
def test_so_it_is_with_operations_of_streams(cupy: StandIn, launched: bool) -> None:
    backends = nccl_backends(cupy, 2)
    assert in_threads(2, lambda rank: backends[rank].open_stream(1)) == [None] * 2
    released = busy(cupy, backends[0], 1)
    if launched:
        call, given = both(cupy, backends, 7, 1)
        eventually(given.try_complete, "rank 1 is through")
    else:
        call = started(cupy, backends[0], 7, 1)
        eventually(call.advance, "it is in its stream")
    leave(backends[1])
    probe(call)
    assert isinstance(backends[0].latch.cause, PeerLostError) is not launched
    released.append(True)


def test_who_leaves_with_an_operation_in_flight_is_needed_for_it(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ferrorpc.backends.device.backend.CLOSE_SECONDS", 0.05)
    backends = nccl_backends(cupy, 2)
    released = busy(cupy, backends[1])
    call, _ = both(cupy, backends, 1)
    cupy.machine.settle()
    leave(backends[1])
    probe(call)
    assert isinstance(backends[0].latch.cause, PeerLostError)
    released.append(True)


def test_a_probe_for_which_there_is_no_thread_is_left_out(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    backends, start = nccl_backends(cupy, 2), SystemClock.start

    def refuses(clock: SystemClock, body: Any, name: str) -> None:
        if name == PROBE_THREAD:
            raise LimitExceededError("the system refuses a thread")
        start(clock, body, name)

    monkeypatch.setattr(SystemClock, "start", refuses)
    execution = started(cupy, backends[0], 1)
    eventually(execution.advance, "it is in its stream")
    execution.probe()
    started(cupy, backends[1], 1).advance()
    eventually(execution.try_complete, "it completes all the same")


def test_a_rank_that_closed_very_many_groups_tells_of_the_latest(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what it writes fits no value of the store, and the others would need it for ever."""
    monkeypatch.setattr("ferrorpc.backends.device.departures.CLOSED_MAX", 3)
    own, other = (backend.context.departures for backend in nccl_backends(cupy, 2))
    for group in range(1, 6):
        own.register(group, lambda: [7, 0])
        own.close(group)
        own.close(group)
    own.leave()
    assert [other.still_needed([0], Key(group, 0, 6), 6) for group in range(1, 6)] == [[0], [0], [], [], []]


def test_the_most_groups_that_a_rank_tells_of_fit_a_value_of_the_store() -> None:
    departures = Departures(LocalWorld(1, timeout=SECONDS).session(0))
    for group in range(CLOSED_MAX):
        departures.register((1 << 64) - 1 - group, lambda: [1 << 40, 1 << 40])
        departures.close((1 << 64) - 1 - group)
    departures.leave()


def test_a_recv_to_a_gpu_from_a_rank_that_has_left_ends_alone(cupy: StandIn) -> None:
    ranks = Ranks(cupy, 2)

    def body(group: Any) -> None:
        if group.rank == 1:
            group.close()
            return
        posted = group.recv(1, out=ranks.array(), async_op=True)
        for wait in (posted.wait, partial(group.recv, 1, out=ranks.array())):
            with pytest.raises(PeerLostError, match="rank 1 has left"):
                wait()
        assert group._backend.latch.cause is None
        group.close()

    ranks.run(body)
