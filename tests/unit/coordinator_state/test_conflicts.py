"""Who cannot be a rank beside others for the version of what ranks send each other."""

from __future__ import annotations

from ferrorpc_coordinator.state.settings import SECOND

from ferrorpc.errors import ErrorCode
from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import ask_elastic, error, join, labelled


def test_who_would_send_others_what_they_do_not_understand_gets_no_rank_beside_them() -> None:
    """An elastic world goes on without it, and does not even form another generation for it."""
    world = World()
    labelled(world, "data_protocol", "5", "a", "b")
    for name in ("a", "b"):
        ask_elastic(world, name, 2, 3)
    labelled(world, "data_protocol", "6", "newer")
    ask_elastic(world, "newer", 2, 3)
    refused = error(world, "newer")
    assert (refused.code, refused.retryable) == (ErrorCode.VERSION_MISMATCH, True)
    assert "newer speaks version 6 of the data plane's protocol, a version 5" in refused.message.replace(" (rank 0)", "")
    labelled(world, "data_protocol", "", "says-nothing")
    for name in ("says-nothing", "a", "b"):
        ask_elastic(world, name, 2, 3)
    assert [world.clients[name].generation for name in ("a", "b", "says-nothing", "newer")] == [2, 2, 2, 0]


def test_a_member_of_the_generation_is_not_refused_for_a_newcomer_of_another_release() -> None:
    """Which came while no member of the generation was connected."""
    world = World()
    labelled(world, "data_protocol", "5", "a", "b")
    join(world, "a", "b")
    for name in ("a", "b"):
        world.cut(name)
    labelled(world, "data_protocol", "6", "newer")
    join(world, "newer", size=2)
    for name in ("a", "b"):
        world.hello(name, resume=True)
    join(world, "a", size=2)
    assert error(world, "newer").code == ErrorCode.VERSION_MISMATCH
    join(world, "b", size=2)
    assert [world.clients[name].generation for name in ("a", "b")] == [2, 2]


def test_newcomers_of_two_releases_are_told_so_at_once() -> None:
    world = World()
    labelled(world, "data_protocol", "5", "a")
    labelled(world, "data_protocol", "6", "b")
    join(world, "a", "b", timeout_ms=5000)
    refused = error(world, "b")
    assert (refused.code, refused.retryable) == (ErrorCode.VERSION_MISMATCH, False)
    assert "b speaks version 6 of the data plane's protocol, a version 5, in the same job job" in refused.message
    world.tick(6 * SECOND)
    assert "Refused: b speaks version 6" in error(world, "a").message
