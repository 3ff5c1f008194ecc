"""Requests of a session that cannot be carried out, and those that concern other members."""

from __future__ import annotations

import pytest
from ferrorpc_coordinator.state.effects import Close
from ferrorpc_coordinator.state.events import Connected, Received

from ferrorpc.errors import ErrorCode
from ferrorpc.v1 import identity_pb2, session_pb2, store_pb2
from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import error, join


def test_a_request_of_a_later_version_is_answered_as_one() -> None:
    world = World()
    join(world, "a")
    world.ask("a")
    assert error(world, "a").code == ErrorCode.VERSION_MISMATCH


@pytest.mark.parametrize("frame", [{"sequence": 5, "hello": {}}, {"sequence": 0, "leave": {}}], ids=["hello", "no number"])
def test_a_second_hello_and_a_request_without_a_number_are_refused(frame: dict[str, object]) -> None:
    world = World()
    join(world, "a")
    world.take()
    world.step(Received(world.clients["a"].stream or 0, session_pb2.ClientFrame(**frame)))  # type: ignore[arg-type]
    assert [sent.result.error.code for _, sent in world.take()] == [ErrorCode.USAGE]
    assert world.clients["a"].stream is not None


def test_a_request_that_waits_is_not_begun_again_when_it_is_repeated() -> None:
    world = World()
    join(world, "a")
    get = store_pb2.StoreRequest(get=store_pb2.GetOperation(key="k", wait_ms=9_000))
    number = world.ask("a", store=get)
    world.step(Received(world.clients["a"].stream or 0, session_pb2.ClientFrame(sequence=number, store=get)))
    (waiting,) = world.coordinator.jobs["job"].store._waiting.values()
    assert len(waiting) == 1


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-9, "killed by signal 9 (SIGKILL)"),
        (-99, "killed by signal 99"),
        (0, "exited with code 0 without leaving the job"),
        (3, "exited with code 3"),
    ],
)
def test_a_member_reports_the_exit_of_another_over_its_session(code: int, text: str) -> None:
    world = World()
    join(world, "a", "b")
    exited = session_pb2.ProcessExit(name="b", instance_id="1", returncode=code)
    world.ask("a", report=session_pb2.ReportRequest(exit=exited))
    (broken,) = [event.broken.cause for event in world.clients["a"].events if event.HasField("broken")]
    assert broken.code == ErrorCode.PEER_LOST
    assert broken.message.endswith(text)


def test_the_exit_of_a_member_that_has_left_changes_nothing() -> None:
    """A launcher reports the exit of every process."""
    world = World()
    join(world, "a", "b")
    world.ask("b", leave={})
    exited = session_pb2.ProcessExit(name="b", instance_id="1", returncode=0)
    world.call(session_pb2.UnaryReportRequest(job="job", request=session_pb2.ReportRequest(exit=exited)))
    members = world.coordinator.jobs["job"].members
    gone = members.get("b")
    assert gone is not None
    assert (gone.liveness.value, members.living) == ("left", 1)


def test_ranks_that_do_not_exist_are_left_out_of_a_description() -> None:
    world = World()
    join(world, "a", "b")
    number = world.ask("a", describe=session_pb2.DescribeRequest(ranks=[1, 2, 1_000_000]))
    assert [member.rank for member in world.clients["a"].results[number].describe.members] == [1]


def test_who_resumes_learns_who_has_left() -> None:
    world = World()
    join(world, "a", "b")
    world.cut("a")
    world.ask("b", leave={})
    world.hello("a", resume=True)
    (told,) = [member for event in world.clients["a"].events for member in event.standings.members]
    assert (told.rank, told.state) == (1, identity_pb2.MEMBER_STATE_LEFT)


def test_frames_of_a_stream_that_was_replaced_or_whose_member_is_dead_have_no_effect() -> None:
    """They may be on their way, or lie unread, until the end of the stream is noticed."""
    world = World()
    join(world, "a", "b")
    replaced, dead = (world.clients[name].stream or 0 for name in "ab")
    hello = session_pb2.Hello(protocol_version=1, job="job", name="a", resume_token=world.clients["a"].token)
    effects = world.coordinator.step(Connected(900, hello), world.now)
    assert Close(replaced) in effects
    exited = session_pb2.ReportRequest(exit=session_pb2.ProcessExit(name="b", returncode=-9))
    assert Close(dead) in world.coordinator.step(Received(900, session_pb2.ClientFrame(sequence=7, report=exited)), world.now)
    write = store_pb2.StoreRequest(set=store_pb2.SetOperation(key="k", value=b"v"))
    for stream in (replaced, dead, 12_345):
        frame = session_pb2.ClientFrame(sequence=8, store=write)
        assert world.coordinator.step(Received(stream, frame), world.now) == []
    assert not len(world.coordinator.jobs["job"].store.keyspace)


def test_a_report_of_nothing_is_refused() -> None:
    world = World()
    join(world, "a")
    world.ask("a", report=session_pb2.ReportRequest(generation=1))
    assert error(world, "a").code == ErrorCode.USAGE


def test_who_leaves_is_answered_before_its_stream_is_closed() -> None:
    world = World()
    join(world, "a")
    number = world.ask("a", leave={})
    assert world.clients["a"].results[number].WhichOneof("outcome") == "leave"
    assert world.clients["a"].stream is None


def test_a_change_of_state_is_told_without_labels() -> None:
    """They were in the answer to the join, and would make the change of many members too large for one frame."""
    world = World()
    world.hello("b", labels=[identity_pb2.Label(name="gpu", value="0")])
    join(world, "a", "b")
    world.cut("b")
    (changed,) = [event.standings.members[0] for event in world.clients["a"].events if event.HasField("standings")]
    assert (changed.name, list(changed.labels)) == ("b", [])
