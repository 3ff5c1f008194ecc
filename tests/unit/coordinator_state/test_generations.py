"""The end of a generation."""

from __future__ import annotations

from ferrorpc.errors import ErrorCode
from ferrorpc.v1 import error_pb2, session_pb2
from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import error, join


def test_a_failure_without_a_message_ends_the_generation_once() -> None:
    world = World()
    join(world, "a", "b")
    for name, code in (("a", error_pb2.ERROR_CODE_NCCL), ("b", error_pb2.ERROR_CODE_CODEC)):
        failure = error_pb2.ErrorDetail(code=code)
        world.ask(name, report=session_pb2.ReportRequest(generation=1, failure=failure))
    assert error(world, "b").code == ErrorCode.NCCL
    newest = world.coordinator.jobs["job"].generations.newest
    assert newest is not None
    assert newest.over
