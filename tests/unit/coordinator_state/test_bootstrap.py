"""The relay of NCCL ids at its edges."""

from __future__ import annotations

from ferrorpc.errors import ErrorCode
from ferrorpc.v1 import nccl_pb2
from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import join


def test_who_asks_again_while_it_waits_is_answered_both_times() -> None:
    world = World()
    join(world, "a", "b")
    request = nccl_pb2.CommBootstrapRequest(generation=1, communicator="world", timeout_ms=60_000)
    first, second = world.ask("b", comm_bootstrap=request), world.ask("b", comm_bootstrap=request)
    offer = nccl_pb2.CommBootstrapRequest(generation=1, communicator="world", unique_ids=[b"u" * 128], timeout_ms=60_000)
    world.ask("a", comm_bootstrap=offer)
    answers = world.clients["b"].results
    assert answers[first].error.code == ErrorCode.USAGE
    assert list(answers[second].comm_bootstrap.unique_ids) == [b"u" * 128]
    assert not world.clients["b"].pending
