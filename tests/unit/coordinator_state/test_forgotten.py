"""What a coordinator forgets first of what it may not keep for ever, also after it has restarted."""

from __future__ import annotations

from dataclasses import replace

from ferrorpc_coordinator.state.settings import Limits, Settings

from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import join


def forgetful(**limits: int) -> World:
    """A world whose coordinator has a journal and these limits."""
    return World(Settings(durable=True, limits=replace(Limits(), **limits)))


def test_after_a_restart_the_job_that_is_forgotten_for_a_new_one_still_ended_first() -> None:
    world = forgetful(jobs=3)
    for job in ("c", "a", "b"):
        world.job = job
        world.hello(f"of-{job}")
    for job in ("b", "c", "a"):
        world.ask(f"of-{job}", leave={})
    world.restart()
    for job, left in (("d", {"a", "c", "d"}), ("e", {"a", "d", "e"})):
        world.job = job
        world.hello(f"of-{job}")
        assert set(world.coordinator.jobs) == left


def test_after_a_restart_the_member_that_is_forgotten_still_left_first() -> None:
    world = forgetful(gone_members=2)
    join(world, "a", "b", "c", "d")
    for name in ("c", "b"):
        world.ask(name, leave={})
    world.restart()
    world.hello("a", resume=True)
    world.ask("a", leave={})
    assert {member.name for member in world.coordinator.jobs["job"].members} == {"a", "b", "d"}
