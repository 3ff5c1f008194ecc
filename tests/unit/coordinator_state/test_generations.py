"""The end of a generation."""

from __future__ import annotations

import pytest
from ferrorpc_coordinator.state.settings import SECOND

from ferrorpc.errors import ErrorCode
from ferrorpc.v1 import error_pb2, session_pb2
from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import arrive, ask_elastic, error, join


def test_a_failure_without_a_message_ends_the_generation_once() -> None:
    world = World()
    join(world, "a", "b")
    for name, code in (("a", error_pb2.ERROR_CODE_NCCL), ("b", error_pb2.ERROR_CODE_CODEC)):
        failure = error_pb2.ErrorDetail(code=code)
        world.ask(name, report=session_pb2.ReportRequest(generation=1, failure=failure))
    assert error(world, "b").code == ErrorCode.NCCL
    newest = world.coordinator.jobs["job"].generations.newest
    assert newest.over


def test_a_fixed_world_waits_for_the_survivors_of_a_broken_generation() -> None:
    """Newcomers enough for a whole world do not take their places."""
    world = World()
    join(world, "a", "b")
    failure = error_pb2.ErrorDetail(code=int(ErrorCode.GROUP_ABORTED), message="stop")
    world.ask("a", report=session_pb2.ReportRequest(generation=1, failure=failure))
    join(world, "c", "d")
    world.tick(10 * SECOND)
    assert [world.clients[name].rank for name in ("c", "d")] == [-1, -1]
    join(world, "a", "b")
    assert [world.clients[name].rank for name in ("a", "b", "c", "d")] == [0, 1, -1, -1]


def test_members_are_told_when_nobody_waits_for_them_any_more() -> None:
    """They would reform for a process that has given up."""
    world = World()
    for name in "abc":
        ask_elastic(world, name, 2, 3)
    world.tick(61 * SECOND)
    told = [list(event.pending.names) for event in world.clients["a"].events if event.HasField("pending")]
    assert told == [["c"], []]


def test_who_asks_again_for_a_place_in_a_generation_that_broke_meanwhile_gets_its_end_too() -> None:
    """Its first answer was lost. Without the end it would wait in the generation until a timeout."""
    world = World()
    join(world, "a", "b")
    failure = error_pb2.ErrorDetail(code=int(ErrorCode.GROUP_ABORTED), message="stop")
    world.ask("b", report=session_pb2.ReportRequest(generation=1, failure=failure))
    told = len(world.clients["a"].events)
    world.clients["a"].generation = 0
    join(world, "a", size=2)
    assert world.clients["a"].generation == 1
    assert [event.broken.generation for event in world.clients["a"].events[told:]] == [1]


@pytest.mark.parametrize("again", [False, True], ids=["left", "its name joined again"])
def test_after_a_restart_it_is_known_who_had_left_the_generation(again: bool) -> None:
    """The others would wait for it until their deadline."""
    world = World()
    join(world, "a", "b")
    world.ask("b", leave={})
    if again:
        world.hello("b", instance="2")
    world.restart()
    world.hello("a", resume=True)
    arrive(world, "a", "x")
    assert error(world, "a").code == ErrorCode.PEER_LOST


@pytest.mark.parametrize("restarted", [False, True])
def test_a_name_gets_the_rank_back_that_it_had(restarted: bool) -> None:
    world = World()
    join(world, "a", "b", "c")
    for name in ("a", "b", "c"):
        world.ask(name, leave={})
    if restarted:
        world.restart()
    for name in ("c", "b", "a"):
        world.hello(name, instance="2")
        join(world, name, size=3)
    assert [world.clients[name].rank for name in "abc"] == [0, 1, 2]


def test_a_member_without_a_rank_cannot_use_the_generation_of_others() -> None:
    world = World()
    join(world, "a", "b")
    waiting = arrive(world, "a", "epoch")
    world.hello("c")
    arrive(world, "c", "epoch", generation=1)
    assert error(world, "c").code == ErrorCode.STALE_GENERATION
    assert waiting not in world.clients["a"].results
    arrive(world, "b", "epoch")
    assert world.clients["a"].results[waiting].WhichOneof("outcome") == "barrier"


def test_a_generation_named_before_there_is_any_is_stale() -> None:
    world = World()
    world.hello("a")
    arrive(world, "a", "epoch", generation=1)
    assert error(world, "a").code == ErrorCode.STALE_GENERATION


def test_after_a_restart_a_name_still_has_its_rank_of_an_earlier_generation() -> None:
    world = World()
    for name in ("a", "b", "c"):
        ask_elastic(world, name, 2, 4, 1_000)
    world.tick(2 * SECOND)
    world.cut("c")
    world.tick(5 * SECOND)
    for name in ("a", "b"):
        ask_elastic(world, name, 2, 4, 1_000)
    world.tick(2 * SECOND)
    assert world.clients["a"].generation == 2
    world.restart()
    for name in ("a", "b"):
        world.hello(name, resume=True)
    world.hello("d")
    world.hello("c", instance="2")
    for name in ("d", "c", "a", "b"):
        ask_elastic(world, name, 2, 4, 1_000)
    assert {name: client.rank for name, client in world.clients.items()} == {"a": 0, "b": 1, "c": 2, "d": 3}
