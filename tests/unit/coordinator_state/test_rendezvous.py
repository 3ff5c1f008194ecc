"""Who is in a round when it closes, and what the others hear of those who wait."""

from __future__ import annotations

import pytest
from ferrorpc_coordinator.state.settings import SECOND

from ferrorpc.errors import ErrorCode
from ferrorpc.v1 import rendezvous_pb2
from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import error, join


def ask_elastic(world: World, name: str, low: int, high: int, timeout_ms: int = 60_000) -> int:
    """Asks to join a world of `low` to `high` members that closes at once; returns the request's number."""
    request = rendezvous_pb2.JoinRequest(
        policy=rendezvous_pb2.WorldPolicy(min_size=low, max_size=high),
        after_generation=world.clients[name].generation,
        pinned_rank=-1,
        hinted_rank=-1,
        timeout_ms=timeout_ms,
    )
    return world.ask(name, join=request)


def pending_names(world: World, name: str) -> list[list[str]]:
    """What a member was told of those who wait, in order."""
    return [list(event.pending.names) for event in world.clients[name].events if event.HasField("pending")]


@pytest.mark.parametrize(("low", "high"), [(0, 0), (0, 1), (2, 1)])
def test_a_world_of_a_size_that_cannot_be_is_refused(low: int, high: int) -> None:
    world = World()
    world.hello("a")
    ask_elastic(world, "a", low, high)
    assert error(world, "a").code == ErrorCode.INVALID_WORLD_SIZE


def test_who_asks_again_replaces_its_request() -> None:
    world = World()
    join(world, "a", size=2)
    first = world.clients["a"].sequence
    join(world, "a", size=2)
    assert world.clients["a"].results[first].error.code == ErrorCode.USAGE
    join(world, "b", size=2)
    assert [world.clients[name].rank for name in "ab"] == [0, 1]


def test_a_round_does_not_close_with_a_member_whose_stream_has_ended() -> None:
    world = World()
    join(world, "a", "b", size=3)
    world.cut("b")
    join(world, "c", size=3)
    assert world.coordinator.jobs["job"].generations.newest is None
    world.hello("b", resume=True)
    assert [world.clients[name].rank for name in "abc"] == [0, 1, 2]


def test_members_of_the_next_generation_are_told_anew_who_still_waits() -> None:
    """They assume that nobody does, and one whose stream had ended got no place."""
    world = World()
    world.hello("a")
    ask_elastic(world, "a", 1, 3)
    world.hello("d")
    ask_elastic(world, "d", 1, 3)
    assert pending_names(world, "a") == [["d"]]
    world.cut("d")
    ask_elastic(world, "a", 1, 3)
    assert world.clients["a"].generation == 2
    assert pending_names(world, "a") == [["d"], ["d"]]


def test_who_resumes_is_told_who_waits() -> None:
    world = World()
    world.hello("a")
    ask_elastic(world, "a", 1, 3)
    world.cut("a")
    world.hello("d")
    ask_elastic(world, "d", 1, 3)
    world.tick(SECOND)
    world.hello("a", resume=True)
    assert pending_names(world, "a") == [["d"]]
