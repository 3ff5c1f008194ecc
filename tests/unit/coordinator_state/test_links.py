"""A broken data stream between two living ranks ends their generation, with all that belongs to it."""

from __future__ import annotations

import pytest
from ferrorpc_coordinator.state.settings import MILLISECOND, SECOND, Settings

from ferrorpc.errors import ErrorCode
from ferrorpc.generation_errors import PEER_LEFT
from ferrorpc.v1 import identity_pb2, nccl_pb2, session_pb2, store_pb2
from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import arrive, error, join, store


def report_a_lost_link(world: World, reason: str = "reset") -> None:
    """Rank 0 reports that it cannot reach rank 1."""
    lost = session_pb2.LinkLost(peer_rank=1, reason=reason)
    world.ask("a", report=session_pb2.ReportRequest(generation=world.clients["a"].generation, link_lost=lost))


def lose_a_link(world: World) -> None:
    """Rank 0 reports that it cannot reach rank 1, and the time until the decision passes."""
    report_a_lost_link(world)
    world.tick(3 * SECOND)


def test_barriers_of_the_generation_fail_at_once() -> None:
    world = World()
    join(world, "a", "b")
    number = arrive(world, "b", "epoch")
    lose_a_link(world)
    assert number in world.clients["b"].results
    assert error(world, "b").code == ErrorCode.GROUP_ABORTED


def test_id_exchanges_of_the_generation_fail_at_once() -> None:
    world = World()
    join(world, "a", "b")
    request = nccl_pb2.CommBootstrapRequest(generation=1, communicator="world", timeout_ms=60_000)
    world.ask("b", comm_bootstrap=request)
    lose_a_link(world)
    assert error(world, "b").code == ErrorCode.GROUP_ABORTED


def test_keys_of_the_generation_are_deleted() -> None:
    world = World()
    join(world, "a", "b")
    bound = store_pb2.SetOperation(key="k", value=b"v", binding=store_pb2.KEY_BINDING_GENERATION)
    store(world, "a", set=bound)
    lose_a_link(world)
    result = store(world, "b", get=store_pb2.GetOperation(key="k"))
    assert result is not None
    assert not result.store.found


def causes(world: World) -> list[int]:
    """The codes of the errors that ended generations, as rank 0 was told."""
    return [event.broken.cause.code for event in world.clients["a"].events if event.HasField("broken")]


@pytest.mark.parametrize("grace_seconds", [2, 20, 300])
def test_a_link_between_living_ranks_is_blamed_soon_however_long_the_grace(grace_seconds: int) -> None:
    world = World(Settings(grace_ns=grace_seconds * SECOND))
    join(world, "a", "b")
    lose_a_link(world)
    assert causes(world) == [ErrorCode.GROUP_ABORTED]


@pytest.mark.parametrize("grace_seconds", [2, 20])
@pytest.mark.parametrize(
    ("heard_ms", "ended_ms"),
    [(0, 0), (0, 1_000), (0, 2_500), (100, 2_000), (600, 3_000), (700, 2_300)],
    ids=["killed", "killed soon after", "stopped", "vanished", "stopped soon after", "vanished soon after"],
)
@pytest.mark.parametrize("lost", ["a", "b"])
def test_a_link_is_not_blamed_for_the_death_of_one_of_its_ends(
    lost: str, heard_ms: int, ended_ms: int, grace_seconds: int
) -> None:
    """It is silent some time after the report, and its stream ends at once, or when its silence is noticed."""
    world = World(Settings(grace_ns=grace_seconds * SECOND))
    join(world, "a", "b", "c")
    world.tick(SECOND // 5)  # between two beats
    report_a_lost_link(world)
    world.tick(heard_ms * MILLISECOND)
    world.clients[lost].frozen = True
    world.tick((ended_ms - heard_ms) * MILLISECOND)
    world.cut(lost)
    world.tick(4 * SECOND)
    (cause,) = [event.broken.cause for event in world.clients["c"].events if event.HasField("broken")]
    assert cause.code == ErrorCode.PEER_LOST
    assert f"({lost}) was lost" in cause.message


def test_a_link_to_a_silent_peer_is_blamed_once_its_lease_is_over() -> None:
    """Its session is still there: it may hold its interpreter lock."""
    world = World()
    join(world, "a", "b")
    world.clients["b"].frozen = True
    report_a_lost_link(world)
    world.tick(5 * SECOND // 2)
    assert causes(world) == []
    world.tick(SECOND)
    assert causes(world) == [ErrorCode.GROUP_ABORTED]


@pytest.mark.parametrize("lease_ms", [200, 500, 3000])
@pytest.mark.parametrize("phase_ms", [0, 50, 150, 240])
def test_beats_are_missed_by_the_lease_of_their_member_not_by_the_usual_one(lease_ms: int, phase_ms: int) -> None:
    """Who has a longer lease than others beats less often."""
    world = World(Settings(lease_ns=lease_ms * MILLISECOND))
    for name in "ab":
        world.hello(name, lease_ms=3000)
    join(world, "a", "b")
    world.tick(SECOND + phase_ms * MILLISECOND)
    report_a_lost_link(world)
    world.tick(3 * SECOND)
    assert causes(world) == [ErrorCode.GROUP_ABORTED]


@pytest.mark.parametrize("peer", [0, 2])
def test_a_link_to_itself_or_to_a_rank_that_is_not_there_cannot_be_lost(peer: int) -> None:
    world = World()
    join(world, "a", "b")
    world.ask("a", report=session_pb2.ReportRequest(generation=1, link_lost=session_pb2.LinkLost(peer_rank=peer)))
    assert error(world, "a").code == ErrorCode.USAGE


def test_who_reports_a_link_to_a_peer_that_has_left_is_told_so() -> None:
    world = World()
    join(world, "a", "b")
    world.ask("b", leave={})
    del world.clients["a"].events[:]
    report_a_lost_link(world)
    (told,) = [member for event in world.clients["a"].events for member in event.standings.members]
    assert (told.rank, told.state) == (1, identity_pb2.MEMBER_STATE_LEFT)
    world.tick(9 * SECOND)
    assert not any(event.HasField("broken") for event in world.clients["a"].events)


@pytest.mark.parametrize(("reason", "after"), [("reset", SECOND), (PEER_LEFT, 5 * SECOND // 2)])
def test_a_peer_that_leaves_before_the_decision_ends_nothing(reason: str, after: int) -> None:
    """It finished first, and closed its streams before its goodbye reached the coordinator.

    Where the reporter has read the goodbye of its streams, the one to the coordinator may take longer than the grace, as on a
    starved host. The network between the two is not to blame.
    """
    world = World()
    join(world, "a", "b")
    report_a_lost_link(world, reason)
    world.tick(after)
    world.ask("b", leave={})
    world.tick(9 * SECOND)
    assert not any(event.HasField("broken") for event in world.clients["a"].events)


def test_who_said_goodbye_to_one_that_needs_it_and_stays_ends_the_generation() -> None:
    world = World()
    join(world, "a", "b")
    report_a_lost_link(world, PEER_LEFT)
    world.tick(9 * SECOND)
    (cause,) = [event.broken.cause for event in world.clients["a"].events if event.HasField("broken")]
    assert cause.code == ErrorCode.PEER_LOST
    assert "it left the job, and an operation here still needs it" in cause.message


@pytest.mark.parametrize("gave_up", [False, True])
def test_who_asked_for_the_next_generation_has_not_left_also_if_it_gave_up(gave_up: bool) -> None:
    world = World()
    join(world, "a", "b")
    join(world, "b", size=2, timeout_ms=1_000 if gave_up else 60_000)
    world.tick(2 * SECOND)
    report_a_lost_link(world, PEER_LEFT)  # at once: who asked has little time itself
    (cause,) = [event.broken.cause for event in world.clients["a"].events if event.HasField("broken")]
    assert cause.code == ErrorCode.GROUP_ABORTED
    assert "it called reform() already" in cause.message


def test_who_says_goodbye_before_it_asks_for_the_next_generation_is_known_to_have_asked_soon() -> None:
    world = World()
    join(world, "a", "b")
    report_a_lost_link(world, PEER_LEFT)
    world.tick(SECOND)
    join(world, "b", size=2)
    world.tick(SECOND // 2)
    (cause,) = [event.broken.cause for event in world.clients["a"].events if event.HasField("broken")]
    assert "it called reform() already" in cause.message


def test_who_resumes_learns_who_is_stalled() -> None:
    """It was told when that happened, but had no stream."""
    world = World()
    join(world, "a", "b")
    world.clients["b"].frozen = True
    world.tick(2 * SECOND)
    world.cut("a")
    world.tick(3 * SECOND // 2)
    world.hello("a", resume=True)
    told = [member for event in world.clients["a"].events for member in event.standings.members if member.rank == 1]
    assert [member.state for member in told] == [identity_pb2.MEMBER_STATE_STALLED]
