"""How communicators come about over the fake: the id's way, deadlines, a second attempt, and what is said when it fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from ferrorpc.arrays.devices import device_of
from ferrorpc.backends.device.communicator import State
from ferrorpc.backends.nccl import connect
from ferrorpc.backends.nccl.backend import NcclBackend
from ferrorpc.backends.nccl.connect import NcclConnector
from ferrorpc.backends.nccl.identity import Identity, judge
from ferrorpc.coordination.local import LocalWorld
from ferrorpc.errors import (
    BackendUnavailableError,
    BarrierTimeoutError,
    FerroError,
    GroupAbortedError,
    NcclError,
    PeerLostError,
)
from ferrorpc.testing.gpu.machine import Machine
from ferrorpc.testing.gpu.nccl import FakeNccl
from ferrorpc.testing.gpu.stand_in import StandIn
from ferrorpc.testing.virtual_clock import VirtualClock
from tests.fake_gpu.worlds import host_lanes, nccl_backends
from tests.threads import in_threads

INIT = 0.4
VERDICT = 0.5


class World:
    """Ranks that make a communicator, in virtual time."""

    def __init__(self, size: int) -> None:
        self.nccl = FakeNccl(Machine(size))
        self.clock = VirtualClock()
        job = LocalWorld(size, clock=self.clock)
        self.sessions = [job.session(rank) for rank in range(size)]
        self.apis = [self.nccl.api(rank) for rank in range(size)]

    def run(self, size: int, body: Callable[[int], Any]) -> list[Any]:
        """What body(rank) returned or raised on each of the first `size` ranks."""
        outcomes: list[Any] = [None] * size

        def run(rank: int) -> None:
            try:
                outcomes[rank] = body(rank)
            except FerroError as error:
                outcomes[rank] = error

        self.clock.run([(f"rank {rank}", partial(run, rank)) for rank in range(size)])
        return outcomes

    def sleep(self, seconds: float) -> None:
        """On the thread of a rank."""
        self.clock.parker().park(self.clock.now() + seconds)

    def connect(self, rank: int, name: str = "world", seconds: float = INIT) -> Any:
        size = len(self.sessions)
        connector = NcclConnector(self.apis[rank], self.sessions[rank], contextlib.nullcontext, seconds, VERDICT)
        return connector.connect(name, list(range(size)))


def test_the_first_rank_mints_and_the_id_reaches_all() -> None:
    world = World(4)
    found = world.run(4, world.connect)
    assert [(end.rank, end.size, end.state()) for end in found] == [(rank, 4, State.SUCCESS) for rank in range(4)]
    assert world.nccl.minted == 1


def test_a_rank_that_does_not_come_is_named_after_two_attempts_each_with_its_own_id() -> None:
    world = World(3)
    found = world.run(2, world.connect)
    for error in found:
        assert isinstance(error, NcclError)
        assert "rank 2 did not arrive" in error.message
        assert "member-2" in error.message, "what the coordinator knows of it"
        assert "in 2 attempts" in error.message
    assert world.nccl.minted == 2
    assert all(end.aborted for meeting in world.nccl.meetings.values() for end in meeting.ends.values())


def test_an_id_with_which_nobody_gets_through_is_given_up_for_a_new_one() -> None:
    """A stray connection can keep the root of an id busy for ever."""
    world = World(2)
    first = (1).to_bytes(8, "big") * 16
    world.nccl.absent.add(first)
    found = world.run(2, world.connect)
    assert [end.state() for end in found] == [State.SUCCESS] * 2
    assert world.nccl.minted == 2
    assert all(end.aborted for end in world.nccl.meetings[first].ends.values())


def test_a_rank_that_comes_late_leaves_the_id_that_the_others_have_given_up() -> None:
    world = World(2)

    def body(rank: int) -> Any:
        if rank == 1:
            world.sleep(INIT + VERDICT + 0.15)  # the others are at their second attempt
        return world.connect(rank)

    found = world.run(2, body)
    assert [end.state() for end in found] == [State.SUCCESS] * 2
    assert len(world.nccl.meetings) == 2


def test_a_rank_that_waits_with_an_id_which_the_others_have_given_up_goes_on_to_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came just before they did so: with patience of its own it would miss them once more."""
    monkeypatch.setattr(connect, "CHECK_SECONDS", 0.05)
    world = World(2)
    first = (1).to_bytes(8, "big") * 16

    def body(rank: int) -> Any:
        if rank == 1:
            world.sleep(INIT + VERDICT - 0.15)
        return world.connect(rank, seconds=INIT if rank == 0 else 100 * INIT)

    found = world.run(2, body)
    assert [end.state() for end in found] == [State.SUCCESS] * 2
    assert {rank: end.aborted for rank, end in world.nccl.meetings[first].ends.items()} == {0: True, 1: True}


def test_a_complete_communicator_is_aborted_if_the_generation_ends_before_all_have_said_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ended(*arguments: Any, **options: Any) -> Any:
        raise GroupAbortedError(1, "it was asked to")

    world = World(2)
    for session in world.sessions:
        monkeypatch.setattr(session, "barrier", ended)
    assert [type(error) for error in world.run(2, world.connect)] == [GroupAbortedError] * 2
    (meeting,) = world.nccl.meetings.values()
    assert [end.aborted for end in meeting.ends.values()] == [True] * 2


def test_a_leader_that_cannot_mint_says_why_on_every_rank() -> None:
    world = World(2)
    world.apis[0].broken_mint = NcclError("no network interface")
    for error in world.run(2, world.connect):
        assert isinstance(error, NcclError)
        assert "no network interface" in error.message


@pytest.mark.parametrize("after_seconds", [0.0, INIT / 4])
def test_an_error_on_one_rank_ends_the_attempt_on_all_and_is_told_to_all(after_seconds: float) -> None:
    """Also where the others are through already."""
    world = World(2)
    init = world.apis[1].init

    def broken(size: int, rank: int, ids: Any) -> Any:
        end: Any = init(size, rank, ids)
        fails_at = world.clock.now() + after_seconds
        end.state = lambda: State.IN_PROGRESS if world.clock.now() < fails_at else State.SYSTEM_ERROR
        return end

    world.apis[1].init = broken  # type: ignore[method-assign]
    for error in world.run(2, world.connect):
        assert isinstance(error, NcclError)
        assert "rank 1: its initialisation: system error" in error.message
    assert all(end.aborted for meeting in world.nccl.meetings.values() for end in meeting.ends.values())


def test_the_end_of_the_generation_ends_the_wait_at_once_with_its_cause() -> None:
    world = World(2)

    def body(rank: int) -> Any:
        if rank == 0:
            return world.connect(0)
        return world.sessions[1].leave("ValueError: bad batch")

    error = world.run(2, body)[0]
    assert isinstance(error, PeerLostError)
    assert error.rank == 1
    assert all(end.aborted for meeting in world.nccl.meetings.values() for end in meeting.ends.values())


def test_two_ranks_on_one_gpu_are_named_before_nccl_is_called(cupy: StandIn) -> None:
    nccl, lanes = FakeNccl(cupy.machine), host_lanes(3)

    def body(rank: int) -> Any:
        gpu = 0 if rank == 2 else rank
        return NcclBackend(lanes[rank], device_of(cupy, gpu), nccl.api(rank, gpu=gpu))

    for error in in_threads(3, body):
        assert isinstance(error, BackendUnavailableError)
        assert "ranks 0 and 2 are on one GPU, GPU-" in error.reason
        assert "CUDA_VISIBLE_DEVICES" in error.hint
    assert (nccl.minted, nccl.meetings) == (0, {})


def test_different_versions_are_named_before_nccl_is_called(cupy: StandIn) -> None:
    nccl, lanes = FakeNccl(cupy.machine), host_lanes(2)

    def body(rank: int) -> Any:
        api = nccl.api(rank, version=22809 if rank == 0 else 23003)
        return NcclBackend(lanes[rank], device_of(cupy, rank), api)

    for error in in_threads(2, body):
        assert isinstance(error, BackendUnavailableError)
        assert "rank 0 has 2.28.9 through fake; rank 1 has 2.30.3 through fake" in error.reason
    assert nccl.minted == 0


def test_the_fake_refuses_what_nccl_refuses() -> None:
    """Duplicate GPUs and mixed versions, where nobody looked before."""
    for options, words in (({"gpu": 0}, "Duplicate GPU"), ({"version": 23000}, "Mismatched NCCL version")):
        nccl = FakeNccl(Machine(2))
        ids = [nccl.mint()]
        one = nccl.api(0).init(2, 0, ids)
        assert one.state() is State.IN_PROGRESS
        other = nccl.api(1, **options).init(2, 1, ids)
        assert (one.state(), other.state()) == (State.INVALID_USAGE, State.INVALID_USAGE)
        assert words in one.last_error()


def test_ranks_that_differ_in_nothing_that_matters_pass() -> None:
    judge([Identity("GPU-a", 22809, "nccl4py", "one"), Identity("GPU-b", 22809, "cupy.cuda.nccl", "two")])


def test_where_the_coordinator_does_not_answer_its_error_is_told_and_no_rank_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2)

    def barrier(name: str, payload: bytes = b"", *, ranks: Any = None, timeout: float = 0.0) -> list[bytes]:
        world.sleep(timeout)
        raise BarrierTimeoutError([], "the coordinator has not answered", hint="look at its log", retryable=True)

    for session in world.sessions:
        monkeypatch.setattr(session, "barrier", barrier)
    for error in world.run(2, world.connect):
        assert isinstance(error, BarrierTimeoutError)
        assert error.retryable


def test_subgroups_and_streams_are_split_off_without_an_id(cupy: StandIn) -> None:
    nccl = FakeNccl(cupy.machine)
    backends = nccl_backends(cupy, 3, nccl)

    def body(rank: int) -> Any:
        backends[rank].open_stream(1)
        if rank == 1:
            return backends[rank].stay_out([0, 2], 77)
        part = backends[rank].split([2, 0], 77)
        return part.rank, part.size, part.world_ranks

    assert in_threads(3, body) == [(1, 2, (2, 0)), None, (0, 2, (2, 0))]
    assert nccl.minted == 1


@pytest.mark.parametrize("meets", ["at once", "in its wait"])
def test_a_division_that_the_end_of_the_generation_meets_raises_its_cause(
    cupy: StandIn, meets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The communicator is aborted then, and NCCL says no more than that."""
    backend, _ = nccl_backends(cupy, 2)
    parent = backend.context.program.communicator

    def end() -> None:
        if not parent.aborted:
            parent.abort()
            backend.latch.trip(PeerLostError(1, "its session ended"))

    if meets == "at once":
        end()
    else:
        state = parent.state
        monkeypatch.setattr(parent, "state", lambda: (end(), state())[1])
    connector = NcclConnector(backend.api, backend.session, contextlib.nullcontext, INIT, VERDICT)
    with pytest.raises(PeerLostError):
        connector.split(parent, "subgroup 5", [0, 1], 0)


def test_a_division_that_an_interrupt_strikes_leaves_no_part_behind(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _ = nccl_backends(cupy, 2)
    connector = NcclConnector(backend.api, backend.session, contextlib.nullcontext, INIT, VERDICT)
    waited = list[Any]()

    def waits(communicator: Any, *arguments: Any) -> None:
        waited.append(communicator)
        if len(waited) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(connector, "_await", waits)
    with pytest.raises(KeyboardInterrupt):
        connector.split(backend.context.program.communicator, "subgroup 5", [0, 1], 0)
    assert [communicator.aborted for communicator in waited] == [False, True]


def test_where_the_library_cannot_split_subgroups_get_an_id_of_their_own(cupy: StandIn) -> None:
    nccl = FakeNccl(cupy.machine, version=21700)
    backends = nccl_backends(cupy, 2, nccl)
    parts = in_threads(2, lambda rank: backends[rank].split([0, 1], 5))
    assert [part.rank for part in parts] == [0, 1]
    assert nccl.minted == 2
