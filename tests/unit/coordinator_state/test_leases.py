"""What a member's silence leads to."""

from __future__ import annotations

from ferrorpc_coordinator.state.settings import SECOND, Settings

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


def test_a_lease_that_is_too_short_for_members_says_nothing_of_when_beats_are_missing() -> None:
    """Else the coordinator would take itself for cut off between any two beats, and spare the dead."""
    assert Settings(lease_ns=1).silence_ns == Settings(lease_ns=SECOND // 5).silence_ns
