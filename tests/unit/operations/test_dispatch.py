"""What operations of a group have in common: prepared calls are kept, and not for ever."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet, ref

import numpy as np
import pytest

from ferrorpc import PeerLostError, ProcessGroup, UsageError
from ferrorpc.backends.simulated import SimulatedBackend
from ferrorpc.collectives.call import Operation
from ferrorpc.collectives.driver import drive
from ferrorpc.collectives.execution import Prepared
from ferrorpc.collectives.point_to_point import SendExecution, SendQueues
from ferrorpc.collectives.progress import Progress
from ferrorpc.guard import SYSTEM_CLOCK, Guard, Latch
from ferrorpc.operations.dispatch import PREPARED_CALLS, Dispatch
from ferrorpc.testing import ManualClock, run_world
from ferrorpc.transports.inproc import InprocTransport
from ferrorpc.types import DType, TensorSpec
from ferrorpc.wire.frames import Header, Key
from tests.unit.collectives.lane import Lane
from tests.unit.collectives.test_event_driven import Counting
from tests.waiting import eventually


def test_the_calls_prepared_last_are_kept_and_no_more_of_them_than_a_program_needs() -> None:
    (backend,) = SimulatedBackend.create_group(1)
    dispatch = Dispatch(backend, 20.0)
    alive: WeakSet[Prepared] = WeakSet()

    def prepared(number: int) -> Prepared:
        return dispatch.prepared(Operation.BARRIER, note=str(number))

    for number in range(2 * PREPARED_CALLS):
        alive.add(prepared(number))
    assert len(alive) == PREPARED_CALLS
    assert prepared(2 * PREPARED_CALLS - 1) in alive
    assert prepared(0) not in alive
    backend.close()


def test_a_group_holds_nothing_of_an_asynchronous_operation_that_is_over() -> None:
    def body(group: ProcessGroup) -> Any:
        work = group.all_reduce(np.ones(4), async_op=True)
        work.wait()
        group.synchronize()
        held = ref(work)
        del work
        gc.collect()
        return held()

    assert run_world(2, body) == [None, None]


@pytest.mark.parametrize("fails", [False, True])
def test_the_time_in_an_operation_is_told_from_its_beginning_to_its_end(fails: bool) -> None:
    clock, told = ManualClock(10.0), list[tuple[str, float]]()

    def run(execution: Any) -> None:
        clock.advance(4.0)
        if fails:
            raise PeerLostError(1, "gone")

    activity = SimpleNamespace(
        operating=lambda began: told.append(("since", began)), operated=lambda seconds: told.append(("for", seconds))
    )
    session = SimpleNamespace(activity=activity)
    backend: Any = SimpleNamespace(group_id=0, session=session, latch=Latch(), clock=clock, run=run)
    if fails:
        with pytest.raises(PeerLostError):
            Dispatch(backend, 20.0).run(Counting(1))
    else:
        Dispatch(backend, 20.0).run(Counting(1))
    assert told == [("since", 10.0), ("for", 4.0)]


@pytest.mark.parametrize("in_time", [True, False])
def test_an_asynchronous_send_goes_on_once_a_full_lane_has_room(in_time: bool) -> None:
    """Room may come before the send has a driver, or afterwards."""

    class Full(Lane):
        def send(self, peer: int, key: Key, header: Header, offset: int, payload: Any, room: Callable[[], None]) -> bool:
            told.append(room)
            return super().send(peer, key, header, offset, payload, room)

    told: list[Callable[[], None]] = []
    lane, data = Full(0), np.ones(4, np.uint8)
    guard = Guard(SYSTEM_CLOCK, Latch(), 20.0)
    execution = SendExecution(lane, 0, SendQueues(), data, TensorSpec(DType.UINT8, (4,)), 1, 0, guard)
    (backend,) = SimulatedBackend.create_group(1)
    assert not Dispatch(backend, 20.0).begin(execution)
    if in_time:
        lane.room = 1
        told[-1]()
    work = Progress(SYSTEM_CLOCK).submit(execution, lambda done: 7)
    if not in_time:
        eventually(lambda: len(told) == 2, "it was refused once more")
        lane.room = 1
        told[-1]()
    assert work.wait(timeout=5.0) == 7
    backend.close()


def test_what_goes_wrong_at_once_is_met_by_who_drives_it() -> None:
    def wrong() -> None:
        raise UsageError("wrong")

    (backend,) = SimulatedBackend.create_group(1)
    failing = Counting(1, wrong)
    assert not Dispatch(backend, 20.0).begin(failing)
    with pytest.raises(UsageError, match="wrong"):
        drive(failing)
    backend.close()


def test_who_waits_for_everything_in_flight_goes_on_as_soon_as_it_is_over() -> None:
    def body(group: ProcessGroup) -> float | None:
        clock = group.session.clock
        if group.rank == 0:
            clock.parker().park(3.0)
            group.send(1.0, 1)
            return None
        waiting = group.recv(0, async_op=True)
        group.synchronize()
        assert waiting.done()
        return clock.now()

    assert run_world(2, body) == [None, 3.0]


def test_a_groups_asynchronous_send_goes_on_once_its_full_lane_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane was full when its caller began it, before it had the driver that the lane calls."""
    honest, rooms = InprocTransport.send, list[Callable[[], None]]()

    def full(*arguments: Any) -> bool:
        rooms.append(arguments[-1])
        return False

    def body(group: ProcessGroup) -> None:
        if group.rank == 1:
            assert group.recv(0).tolist() == [0, 1, 2]
            return
        monkeypatch.setattr(InprocTransport, "send", full)
        work = group.send(np.arange(3), 1, async_op=True)
        clock = group.session.clock
        clock.parker().park(clock.now() + 0.1)
        monkeypatch.setattr(InprocTransport, "send", honest)
        for room in rooms:
            room()
        work.wait(timeout=1.0)

    run_world(2, body)
