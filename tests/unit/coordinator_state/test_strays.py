"""What those who wait are told of processes that did not get as far as to ask for a place."""

from __future__ import annotations

from ferrorpc_coordinator.state.settings import SECOND

from ferrorpc.v1 import rendezvous_pb2, session_pb2
from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import error, join


def early_exit(world: World, name: str, code: int = 1, reason: str = "ImportError: no torch", launch: str = "") -> None:
    ended = session_pb2.ProcessExit(name=name, returncode=code, reason=reason, instance_id=launch)
    world.call(session_pb2.UnaryReportRequest(job="job", request=session_pb2.ReportRequest(exit=ended)))


def test_who_waits_is_told_of_what_has_just_ended_before_its_hello() -> None:
    world = World()
    join(world, "a", size=2)
    rendezvous = world.coordinator.jobs["job"].rendezvous
    for _ in range(2):  # reports are repeated
        early_exit(world, "b\n\x1b[2J")
    early_exit(world, "c", code=0, reason="")
    told = "ended early: b\\n\\x1b[2J: exited with code 1: ImportError: no torch, before it said Hello; c: exited with code 0"
    assert told in rendezvous.waiting_reason()
    assert [note.text for note in world.notes if note.kind == "dead"] == [told.removeprefix("ended early: ").partition(";")[0]]
    wait_on(world, "a")
    assert "ended early" not in rendezvous.waiting_reason(), "that is too long ago"


def rendezvous_reason(world: World) -> str:
    return world.coordinator.jobs["job"].rendezvous.waiting_reason()


def wait_on(world: World, name: str) -> None:
    """It asks again and again for eleven minutes."""
    for _ in range(12):
        world.tick(55 * SECOND)
        join(world, name, size=2)
    assert "1 of 2 members ask to join" in rendezvous_reason(world)


def test_so_is_the_next_process_of_one_that_has_died() -> None:
    world = World()
    world.hello("a")
    world.hello("b", instance="run/1.aa")
    join(world, "a", "b")
    early_exit(world, "b", reason="ValueError: once", launch="run/1")
    join(world, "a", size=2)
    early_exit(world, "b", launch="run/2")
    reason = rendezvous_reason(world)
    assert "rank 1 (b): dead (exited with code 1: ValueError: once)" in reason
    assert reason.endswith("ended early: b: exited with code 1: ImportError: no torch, before it said Hello")
    world.hello("b", instance="run/3.cc")
    world.ask("b", leave=rendezvous_pb2.LeaveRequest())
    early_exit(world, "b", reason="told of late", launch="run/1")
    assert "told of late" not in rendezvous_reason(world)


def test_who_waits_later_is_told_of_one_that_was_refused_while_nobody_waited() -> None:
    """Also before anybody of the job came."""
    world = World()
    world.hello("b", protocol_version=9)
    world.tick(30 * SECOND)
    join(world, "a", size=2, timeout_ms=5000)
    assert "refused: 'b' speaks protocol 9" in rendezvous_reason(world)
    world.tick(6 * SECOND)
    join(world, "a", size=2, timeout_ms=5000)
    world.tick(6 * SECOND)
    assert "Refused: 'b' speaks protocol 9" in error(world, "a").message
    wait_on(world, "a")
    assert "refused" not in rendezvous_reason(world), "that is too long ago"


def test_of_who_was_refused_before_a_round_closed_the_next_one_hears_nothing() -> None:
    world = World()
    world.hello("z", protocol_version=9)
    join(world, "a", "b")
    join(world, "a", size=2)
    assert "1 of 2 members ask to join" in rendezvous_reason(world)
    assert "refused" not in rendezvous_reason(world)


def test_who_was_refused_and_ended_is_told_of_once() -> None:
    world = World()
    join(world, "a", size=2)
    world.hello("b", protocol_version=9, version="1\n\x1b[2J")
    early_exit(world, "b", code=64)
    reason = world.coordinator.jobs["job"].rendezvous.waiting_reason()
    assert "refused: 'b' speaks protocol 9 (ferrorpc '1\\n\\x1b[2J')" in reason
    assert "ended early" not in reason
    wait_on(world, "a")
    early_exit(world, "b")
    assert "ended early: b: exited with code 1" in rendezvous_reason(world), "that is the next one of its name"
