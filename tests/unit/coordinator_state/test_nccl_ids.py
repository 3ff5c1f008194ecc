"""Edge cases of the relay of NCCL ids."""

from __future__ import annotations

import pytest
from ferrorpc_coordinator.state import nccl_ids
from ferrorpc_coordinator.state.settings import SECOND

from ferrorpc.errors import ErrorCode
from ferrorpc.v1 import nccl_pb2, rendezvous_pb2
from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import error, join


def test_a_second_request_while_the_first_waits_answers_both() -> None:
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


def test_a_request_fails_at_once_when_the_leader_has_left() -> None:
    world = World()
    join(world, "a", "b", "c")
    request = nccl_pb2.CommBootstrapRequest(generation=1, communicator="world", timeout_ms=60_000)
    before = world.ask("b", comm_bootstrap=request)
    pair = nccl_pb2.CommBootstrapRequest(generation=1, communicator="pair", ranks=[1, 2], timeout_ms=60_000)
    without = world.ask("c", comm_bootstrap=pair)
    world.ask("a", leave=rendezvous_pb2.LeaveRequest(generation=1))
    assert before in world.clients["b"].results
    after = world.ask("c", comm_bootstrap=request)
    for client, number in (("b", before), ("c", after)):
        error = world.clients[client].results[number].error
        assert error.code == ErrorCode.PEER_LOST
        assert "rank 0 (a) left before it offered an id of communicator 'world' #0: it left the job" in error.message
    assert set(world.clients["c"].pending) == {without}, "its leader is there"


def test_ids_offered_by_a_leader_remain_available_after_it_left() -> None:
    world = World()
    join(world, "a", "b")
    request = nccl_pb2.CommBootstrapRequest(generation=1, communicator="world", timeout_ms=60_000)
    offer = nccl_pb2.CommBootstrapRequest(generation=1, communicator="world", unique_ids=[b"u" * 128], timeout_ms=60_000)
    world.ask("a", comm_bootstrap=offer)
    world.ask("a", leave=rendezvous_pb2.LeaveRequest(generation=1))
    late = world.ask("b", comm_bootstrap=request)
    assert list(world.clients["b"].results[late].comm_bootstrap.unique_ids) == [b"u" * 128]


@pytest.mark.parametrize(
    "wrong",
    [
        {"ranks": [1]},
        {"ranks": [0, 2]},
        {"ranks": [0, 1, 1]},
        {"unique_ids": [b"u" * 127]},
        {"unique_ids": [b"u" * 128] * 2},
    ],
)
def test_a_request_that_contradicts_itself_is_refused(wrong: dict[str, list[object]]) -> None:
    world = World()
    join(world, "a", "b")
    world.ask("a", comm_bootstrap={"generation": 1, "communicator": "world", "timeout_ms": 60_000} | wrong)
    assert error(world, "a").code == ErrorCode.USAGE


def test_ranks_that_name_different_members_of_a_communicator_are_told_so() -> None:
    world = World()
    join(world, "a", "b", "c")
    for name, ranks in (("a", [0, 1]), ("b", [0, 1, 2])):
        world.ask(name, comm_bootstrap={"generation": 1, "communicator": "c", "ranks": ranks, "timeout_ms": 60_000})
    assert error(world, "b").code == ErrorCode.USAGE
    assert world.clients["a"].pending


def test_one_leader_may_offer_the_ids_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ids, "RANKS_PER_NCCL_ID", 2)
    world = World()
    join(world, "a", "b", "c")
    ids = [b"u" * 128, b"v" * 128]
    world.ask("a", comm_bootstrap={"generation": 1, "communicator": "c", "unique_ids": ids})
    number = world.ask("b", comm_bootstrap={"generation": 1, "communicator": "c"})
    assert list(world.clients["b"].results[number].comm_bootstrap.unique_ids) == ids
    for name, unique_id in (("c", ids[1]), ("a", ids[0])):
        number = world.ask(name, comm_bootstrap={"generation": 1, "communicator": "each", "unique_ids": [unique_id]})
        assert (number in world.clients[name].results) == (name == "a")
    assert list(world.clients["a"].results[number].comm_bootstrap.unique_ids) == ids


def test_the_reason_for_which_a_leader_has_no_id_is_kept_shortened() -> None:
    """It is kept until the generation ends, for each of many communicators."""
    world = World()
    join(world, "a")
    request = nccl_pb2.CommBootstrapRequest(generation=1, communicator="world", failure="no socket: " + "x" * 200_000)
    world.ask("a", comm_bootstrap=request)
    detail = error(world, "a")
    assert detail.code == ErrorCode.NCCL
    assert "rank 0 could not create an id for communicator 'world' #0: no socket: xxx" in detail.message
    assert detail.ByteSize() < 5_000


def test_a_generation_has_as_many_communicators_as_the_limit_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ids, "COMMUNICATORS_MAX", 2)
    world = World()
    join(world, "a")
    numbers = [
        world.ask("a", comm_bootstrap={"generation": 1, "communicator": name, "unique_ids": [b"u" * 128]}) for name in "xyz"
    ]
    outcomes = [world.clients["a"].results[number].WhichOneof("outcome") for number in numbers]
    assert outcomes == ["comm_bootstrap", "comm_bootstrap", "error"]
    assert error(world, "a").code == ErrorCode.LIMIT_EXCEEDED


def test_who_times_out_is_told_how_long_it_has_waited_itself() -> None:
    world = World()
    join(world, "a", "b", "c")
    for name, seconds in [("b", 60), ("c", 5)]:
        request = nccl_pb2.CommBootstrapRequest(generation=1, communicator="world", timeout_ms=seconds * 1000)
        world.ask(name, comm_bootstrap=request)
        world.tick(50 * SECOND)
    assert "rank 2 waited 5.0 s for the ids" in error(world, "c").message
