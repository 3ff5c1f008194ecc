"""Which ranks are behind, by what heartbeats tell of waits."""

from __future__ import annotations

import pytest
from ferrorpc_coordinator.state.events import Received
from ferrorpc_coordinator.state.settings import MILLISECOND, SECOND, Settings

from ferrorpc.v1 import session_pb2
from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import join


def status_of(world: World) -> session_pb2.StatusResponse:
    return world.coordinator.jobs[world.job].status()


def behind(world: World) -> dict[str, float]:
    """Member -> seconds."""
    return {member.name: member.behind_ms / 1000 for member in status_of(world).members if member.behind_ms}


def world_at(**steps: int) -> World:
    """A world whose members have just begun these operations, as their beats tell."""
    world = World()
    join(world, *steps)
    for name, step in steps.items():
        world.clients[name].step = step
    world.tick(SECOND // 2)
    return world


def wait(world: World, *names: str) -> None:
    for name, client in world.clients.items():
        client.waits = name in names


@pytest.mark.parametrize("steps", [(4, 7, 4), (240, 480, 240)])
def test_a_hung_stage_of_a_pipeline_is_behind_those_that_wait_for_it(steps: tuple[int, int, int]) -> None:
    """It has more neighbours, so it has begun more operations than they."""
    world = world_at(a=steps[0], b=steps[1], c=steps[2])
    wait(world, "a", "c")
    world.tick(2 * SECOND)
    assert behind(world) == {}
    world.tick(5 * SECOND)
    assert behind(world) == {"b": 7}
    assert status_of(world).headline.title == "Rank 1 has been behind for 7 s"


def test_for_how_long_a_rank_is_behind_counts_from_when_most_others_wait() -> None:
    world = world_at(a=4, b=4, c=4)
    world.tick(50 * SECOND)
    wait(world, "a")
    world.tick(10 * SECOND)
    assert behind(world) == {}
    wait(world, "a", "c")
    world.tick(6 * SECOND)
    assert behind(world) == {"b": pytest.approx(6, abs=0.5)}


@pytest.mark.parametrize("steps", [(40, 40, 40, 40), (900, 300, 300, 300)])
def test_where_a_few_wait_for_those_to_whom_they_give_work_nobody_is_behind(steps: tuple[int, ...]) -> None:
    """A rank that gives out work or collects results, or two that are long at a message of their own."""
    world = world_at(a=steps[0], b=steps[1], c=steps[2], d=steps[3])
    wait(world, "a", *(["b"] if steps[0] == steps[1] else []))
    world.tick(180 * SECOND)
    assert behind(world) == {}
    assert status_of(world).headline.level == "good"


def test_who_waited_itself_and_works_now_is_behind() -> None:
    world = world_at(a=5, b=4)
    wait(world, "a", "b")
    world.tick(30 * SECOND)
    assert behind(world) == {}
    wait(world, "a")
    world.tick(4 * SECOND)
    assert behind(world) == {"b": pytest.approx(4, abs=0.5)}


def test_who_waits_and_goes_on_is_not_behind() -> None:
    world = world_at(a=4, b=4, c=4)
    for step in range(5, 10):
        wait(world, "a")
        world.clients["b"].step = step
        world.tick(SECOND)
    assert list(behind(world)) == ["c"]


def test_a_rank_that_fell_silent_is_not_taken_to_wait() -> None:
    """It may have left its operation since its last beat."""
    world = world_at(a=4, b=4, c=4)
    wait(world, "a", "b", "c")
    world.tick(3 * SECOND)
    world.clients["b"].frozen = True
    world.tick(4 * SECOND)
    assert behind(world) == {"b": 4}


def test_an_actor_with_a_long_episode_is_behind_only_once_the_others_have_stopped() -> None:
    """Whoever advances does not wait for it."""
    world = world_at(learner=900, long=300, short=600)
    for step in range(20):
        world.clients["learner"].step, world.clients["short"].step = 901 + step, 601 + step
        world.tick(SECOND)
        assert behind(world) == {}
    world.tick(7 * SECOND)
    assert behind(world) == {"long": pytest.approx(7, abs=1)}


def beat(world: World, name: str, at_ms: int, step: int, operation_ms: int) -> None:
    """Lets a beat arrive at this time."""
    world.tick(at_ms * MILLISECOND - world.now)
    stream = world.clients[name].stream
    assert stream is not None
    told = session_pb2.Beat(generation=1, step=step, operation_ms=operation_ms)
    world.step(Received(stream, session_pb2.ClientFrame(beat=told)))


def world_without_beats() -> World:
    world = World(Settings(lease_ns=20 * SECOND))
    join(world, "a", "b")
    for client in world.clients.values():
        client.frozen = True
    return world


def test_where_beats_are_rare_nobody_is_behind_before_a_second_one_tells_so() -> None:
    world = world_without_beats()
    beat(world, "a", 0, step=4, operation_ms=0)
    beat(world, "b", 3000, step=3, operation_ms=0)
    beat(world, "a", 5000, step=4, operation_ms=5000)
    world.tick(SECOND)
    assert behind(world) == {}
    beat(world, "b", 8000, step=3, operation_ms=5000)
    beat(world, "a", 10000, step=4, operation_ms=10000)
    assert behind(world) == {}
    beat(world, "b", 13000, step=3, operation_ms=5000)
    assert behind(world) == {"b": 5}


def test_a_late_beat_makes_nobody_behind() -> None:
    world = world_without_beats()
    for at_ms in range(0, 9000, 100):
        late_ms = 400 if at_ms % 500 == 0 else 0
        beat(world, "a", at_ms, step=4, operation_ms=at_ms)
        beat(world, "b", at_ms, step=3, operation_ms=max(0, at_ms - late_ms))
        assert behind(world) == {}


def test_in_a_generation_that_is_over_nobody_is_behind() -> None:
    """Some wait for the next one, and the others are told at once."""
    world = world_at(a=5, b=4, c=4)
    world.ask("c", leave={"reason": "a bug"})
    join(world, "a", "b", size=3)
    world.tick(5 * SECOND)
    assert behind(world) == {}


def test_who_waits_for_the_next_generation_is_not_behind_and_others_are() -> None:
    world = world_at(a=4, b=5, c=4)
    join(world, "a", "c", size=3)
    world.tick(2 * SECOND)
    assert behind(world) == {}
    world.tick(4 * SECOND)
    assert behind(world) == {"b": 6}
