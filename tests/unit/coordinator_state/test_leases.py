"""What a member's silence leads to."""

from __future__ import annotations

from ferrorpc_coordinator.state.settings import SECOND

from ferrorpc.v1 import identity_pb2
from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import join


def test_a_stalled_member_that_was_heard_again_is_watched_as_before() -> None:
    world = World()
    join(world, "a", "b")
    for frozen in (True, False, True):
        world.clients["b"].frozen = frozen
        world.tick(5 * SECOND)
    told = [member.state for event in world.clients["a"].events for member in event.standings.members]
    stalled, active = identity_pb2.MEMBER_STATE_STALLED, identity_pb2.MEMBER_STATE_ACTIVE
    assert told == [stalled, active, stalled]
