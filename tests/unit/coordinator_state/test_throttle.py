"""Broadcasts to all members: at once in a small world, collected in a large one."""

from __future__ import annotations

import pytest
from ferrorpc_coordinator.state.settings import SECOND

from ferrorpc.v1 import identity_pb2, rendezvous_pb2, session_pb2
from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import join

LEFT, ACTIVE = identity_pb2.MEMBER_STATE_LEFT, identity_pb2.MEMBER_STATE_ACTIVE


def world_of(size: int) -> tuple[World, list[str]]:
    world, names = World(), [f"m{rank:03}" for rank in range(size)]
    join(world, *names)
    for client in world.clients.values():
        client.events.clear()
    return world, names


def leave(world: World, name: str) -> None:
    world.ask(name, leave=rendezvous_pb2.LeaveRequest())


def told(world: World, name: str) -> list[dict[str, int]]:
    """The state events that this client received: member -> state."""
    events = [event for event in world.clients[name].events if event.HasField("standings")]
    return [{member.name: member.state for member in event.standings.members} for event in events]


def test_in_a_small_world_every_change_is_sent_at_once() -> None:
    world, names = world_of(4)
    for name in names[:2]:
        leave(world, name)
    assert told(world, names[3]) == [{names[0]: LEFT}, {names[1]: LEFT}]


def test_many_changes_in_a_large_world_are_sent_in_two_events() -> None:
    world, names = world_of(100)
    for name in names[:50]:
        leave(world, name)
    world.tick(SECOND)
    for name in names[50:]:
        assert told(world, name) == [{names[0]: LEFT}, dict.fromkeys(names[1:50], LEFT)]


def test_changes_far_apart_are_sent_one_by_one() -> None:
    world, names = world_of(100)
    for name in names[:3]:
        leave(world, name)
        world.tick(SECOND)
    assert told(world, names[99]) == [{name: LEFT} for name in names[:3]]


def test_an_event_has_the_state_of_the_time_it_is_sent() -> None:
    world, names = world_of(100)
    leave(world, names[0])
    world.cut(names[1])
    world.hello(names[1], resume=True)
    world.tick(SECOND)
    assert told(world, names[99]) == [{names[0]: LEFT}, {names[1]: ACTIVE}]
    assert told(world, names[1]) == [{names[0]: LEFT}, {names[0]: LEFT}], "from before, and caught up with after it came back"


def test_more_changes_than_fit_into_an_event_come_in_several() -> None:
    world, names = world_of(600)
    for name in names[:-1]:
        leave(world, name)
    world.tick(SECOND)
    assert [len(states) for states in told(world, names[-1])] == [1, 256, 256, 86]
    assert max(event.ByteSize() for event in world.clients[names[-1]].events) < world.settings.limits.frame_bytes


@pytest.mark.parametrize("ends", ["broken", "replaced"])
def test_no_changes_are_sent_after_the_generation_is_over(ends: str) -> None:
    world, names = world_of(100)
    leave(world, names[0])
    leave(world, names[1])
    if ends == "broken":
        world.ask(names[2], leave=rendezvous_pb2.LeaveRequest(reason="out of memory"))
    else:
        join(world, *names[2:], size=98)
        assert world.clients[names[99]].generation == 2
    world.tick(SECOND)
    assert told(world, names[99]) == [{names[0]: LEFT}]


def test_many_waiting_members_are_announced_in_two_events() -> None:
    world = World()
    old, new = [f"a{number:02}" for number in range(40)], [f"b{number:02}" for number in range(20)]

    def ask(name: str) -> None:
        policy = rendezvous_pb2.WorldPolicy(min_size=len(old), max_size=len(old) + len(new))
        world.hello(name)
        world.ask(name, join=rendezvous_pb2.JoinRequest(policy=policy, pinned_rank=-1, hinted_rank=-1, timeout_ms=60_000))

    for name in old:
        ask(name)
    world.tick(5 * SECOND)
    assert world.clients[old[0]].generation == 1
    for name in new:
        ask(name)
    world.tick(SECOND)
    for name in old:
        events: list[session_pb2.Event] = [event for event in world.clients[name].events if event.HasField("pending")]
        assert [list(event.pending.names) for event in events] == [new[:1], new]
