"""Edge cases of barriers: unary arrivals, callers that go while they wait, and outcomes that survive a restart."""

from __future__ import annotations

import pytest
from ferrorpc_coordinator.state.events import Cancelled
from ferrorpc_coordinator.state.settings import SECOND

from ferrorpc.errors import ErrorCode
from ferrorpc.v1 import barrier_pb2, error_pb2, journal_pb2, rendezvous_pb2, session_pb2
from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import arrive, error, join


def tool(world: World, client: str, payload: bytes = b"", **more: object) -> int:
    """A unary arrival at the counting barrier "tool" of two."""
    fields = {"name": "tool", "ordinal": 1, "count": 2, "timeout_ms": 30_000, "payload": payload} | more
    request = barrier_pb2.BarrierRequest(**fields)  # type: ignore[arg-type]
    return world.call(session_pb2.UnaryBarrierRequest(job="job", client_id=client, request=request))


def test_tools_and_sessions_meet_by_count_in_order_of_arrival() -> None:
    world = World()
    join(world, "a")
    call = tool(world, "t", b"first")
    arrive(world, "a", "tool", generation=0, count=2, payload=b"second")
    reply = world.replies[call]
    assert isinstance(reply, session_pb2.UnaryBarrierResponse)
    assert list(reply.response.payloads) == [b"first", b"second"]
    assert reply.position.revision > 0


def test_an_arrival_that_was_cancelled_does_not_count() -> None:
    world = World()
    first = tool(world, "t")
    world.step(Cancelled(first))
    second = tool(world, "u")
    assert second not in world.replies
    third = tool(world, "v")
    assert isinstance(world.replies[third], session_pb2.UnaryBarrierResponse)


def test_the_deadline_of_a_cancelled_arrival_does_not_count() -> None:
    world = World()
    first = tool(world, "t", count=4, timeout_ms=1_000)
    second = tool(world, "u", count=4, timeout_ms=30_000)
    tool(world, "v", count=4, timeout_ms=60_000)
    world.step(Cancelled(first))
    world.tick(29 * SECOND)
    assert second not in world.replies
    world.tick(SECOND)
    reply = world.replies[second]
    assert isinstance(reply, error_pb2.ErrorDetail)
    assert reply.code == ErrorCode.BARRIER_TIMEOUT


def test_a_cancellation_after_the_retry_does_not_remove_the_arrival() -> None:
    world = World()
    first = tool(world, "t")
    tool(world, "t")
    world.step(Cancelled(first))
    other = tool(world, "u")
    assert isinstance(world.replies[other], session_pb2.UnaryBarrierResponse)


def test_a_cancelled_arrival_leaves_the_clients_arrivals_elsewhere() -> None:
    world = World()
    first = tool(world, "t")
    world.step(Cancelled(tool(world, "t", name="another")))
    tool(world, "u")
    assert isinstance(world.replies[first], session_pb2.UnaryBarrierResponse)


def test_a_session_that_ends_while_it_waits_in_a_counting_barrier_does_not_count() -> None:
    world = World()
    join(world, "a")
    arrive(world, "a", "tool", generation=0, count=2)
    world.ask("a", leave=rendezvous_pb2.LeaveRequest())
    call = tool(world, "t")
    assert call not in world.replies
    world.tick(31 * SECOND)
    reply = world.replies[call]
    assert isinstance(reply, error_pb2.ErrorDetail)
    assert reply.code == ErrorCode.BARRIER_TIMEOUT
    assert "1 of 2 arrived" in reply.message


def test_a_second_arrival_under_another_number_supersedes_the_first() -> None:
    world = World()
    join(world, "a", "b")
    first = arrive(world, "a", "x", payload=b"old")
    second = arrive(world, "a", "x", payload=b"new")
    arrive(world, "b", "x")
    assert world.clients["a"].results[first].error.code == ErrorCode.USAGE
    assert list(world.clients["a"].results[second].barrier.payloads) == [b"new", b""]


def test_an_invalid_barrier_request_is_refused() -> None:
    world = World()
    join(world, "a", "b")
    for more in ({"ordinal": 0}, {"generation": 0, "count": 0}, {"generation": 0, "count": 1, "ranks": [0]}, {"ranks": [1]}):
        arrive(world, "a", "x", **more)
        assert error(world, "a").code == ErrorCode.USAGE
    arrive(world, "a", "")
    assert error(world, "a").code == ErrorCode.USAGE
    unary = world.replies[tool(world, "t", generation=1)]
    assert isinstance(unary, error_pb2.ErrorDetail)
    assert unary.code == ErrorCode.USAGE


def test_an_arrival_names_ranks_of_the_world_and_a_name_of_at_most_512_bytes() -> None:
    world = World()
    join(world, "a", "b")
    for name, more in (("x", {"ranks": [0, 2]}), ("n" * 513, {}), ("é" * 257, {})):
        arrive(world, "a", name, **more)
        assert error(world, "a").code == ErrorCode.USAGE
    number = arrive(world, "a", "n" * 512, generation=0, count=1)
    assert world.clients["a"].results[number].HasField("barrier")


def test_who_left_without_arriving_fails_a_barrier_at_once_and_breaks_nothing() -> None:
    world = World()
    join(world, "a", "b", "c")
    waits, elsewhere = arrive(world, "a", "x"), arrive(world, "c", "y", ranks=[0, 2])
    arrive(world, "b", "z")
    world.ask("b", leave={})
    assert world.clients["a"].results[waits].error.code == ErrorCode.PEER_LOST
    assert elsewhere not in world.clients["c"].results
    arrive(world, "a", "later")
    assert error(world, "a").code == ErrorCode.PEER_LOST
    for name in ("a", "c"):
        number = arrive(world, name, "z")
    assert world.clients["c"].results[number].HasField("barrier"), "who left had arrived"
    assert not any(event.HasField("broken") for event in world.clients["a"].events)


@pytest.mark.parametrize("gave_up", [False, True])
def test_who_calls_reform_without_arriving_fails_a_barrier_at_once_and_breaks_nothing(gave_up: bool) -> None:
    world = World()
    join(world, "a", "b", "c")
    waits, elsewhere = arrive(world, "a", "x"), arrive(world, "c", "y", ranks=[0, 2])
    arrive(world, "b", "z")
    join(world, "b", size=3, timeout_ms=1_000 if gave_up else 60_000)
    failure = world.clients["a"].results[waits].error
    assert failure.code == ErrorCode.GROUP_ABORTED
    assert "it called reform() already, and barrier 'x' still needs it" in failure.message
    world.tick(2 * SECOND)
    assert elsewhere not in world.clients["c"].results
    arrive(world, "a", "later")
    assert error(world, "a").code == ErrorCode.GROUP_ABORTED
    for name in ("a", "c"):
        number = arrive(world, name, "z")
    assert world.clients["c"].results[number].HasField("barrier"), "who called it had arrived"
    assert not any(event.HasField("broken") for event in world.clients["a"].events)


def test_the_first_deadline_ends_a_barrier_and_one_that_is_superseded_does_not() -> None:
    world = World()
    join(world, "a", "b", "c", "d")
    first, again = (arrive(world, "a", "x", timeout_ms=milliseconds) for milliseconds in (1_000, 20_000))
    others = {name: arrive(world, name, "x", timeout_ms=seconds * 1_000) for name, seconds in (("b", 30), ("c", 5))}
    assert world.clients["a"].results[first].error.code == ErrorCode.USAGE
    world.tick(4 * SECOND)
    assert again not in world.clients["a"].results
    world.tick(SECOND)
    assert world.clients["a"].results[again].error.code == ErrorCode.BARRIER_TIMEOUT
    assert all(number in world.clients[name].results for name, number in others.items())


def test_the_longest_wait_is_that_of_the_oldest_open_barrier() -> None:
    world = World()
    join(world, "a", "b")
    barriers = world.coordinator.jobs["job"].barriers
    for name in ("x", "y"):
        arrive(world, "a", name)
        world.tick(SECOND)
    assert (len(barriers), barriers.longest_ns) == (2, 2 * SECOND)


def test_a_released_barrier_is_remembered_across_a_restart() -> None:
    world = World()
    join(world, "a", "b")
    for ordinal in (1, 2):
        arrive(world, "a", "x/y", ordinal, payload=b"a%d" % ordinal)
        arrive(world, "b", "x/y", ordinal, payload=b"b%d" % ordinal)
    world.restart()
    world.hello("a", resume=True)
    number = arrive(world, "a", "x/y", 2)
    assert list(world.clients["a"].results[number].barrier.payloads) == [b"a2", b"b2"]


def test_outcomes_are_forgotten_with_their_generation() -> None:
    world = World()
    join(world, "a", "b")
    arrive(world, "a", "x")
    arrive(world, "b", "x")
    assert any(table == "barrier" for table, _ in world.rows)
    join(world, "a", "b")
    assert world.clients["a"].generation == 2
    assert not any(table == "barrier" for table, _ in world.rows)


def test_waiting_arrivals_fail_when_their_generation_is_replaced() -> None:
    world = World()
    join(world, "a", "b")
    number = arrive(world, "a", "x")
    join(world, "a", "b")
    assert world.clients["a"].results[number].error.code == ErrorCode.STALE_GENERATION


def test_the_status_names_the_missing_ranks() -> None:
    world = World()
    join(world, "a", "b", "c")
    arrive(world, "b", "x")
    world.tick(SECOND)
    reply = world.replies[world.call(session_pb2.StatusRequest(job="job"))]
    assert isinstance(reply, session_pb2.StatusResponse)
    [open_barrier] = reply.barriers
    assert (list(open_barrier.arrived_ranks), list(open_barrier.missing_ranks)) == ([1], [0, 2])
    assert open_barrier.age_ms == 1_000


def payload_rows(world: World) -> int:
    """How many barriers with payloads the journal has."""
    rows = [journal_pb2.BarrierRow.FromString(data) for (table, _), data in world.rows.items() if table == "barrier"]
    return sum(any(row.response.payloads) for row in rows)


@pytest.mark.parametrize("first", [b"", b"p"], ids=["nothing", "a payload"])
def test_a_full_disk_refuses_payloads_and_all_who_meet_there_are_told(first: bytes) -> None:
    """What is refused to one is refused to all, also who had come before the disk was full, and who comes later."""
    world = World()
    join(world, "a", "b", "c")
    waiting = arrive(world, "a", "x", payload=first)
    world.full = True
    arrive(world, "b", "x", payload=b"" if first else b"p")
    world.full = False
    late = arrive(world, "c", "x")
    for refusal in (world.clients["a"].results[waiting].error, error(world, "b"), world.clients["c"].results[late].error):
        assert (refusal.code, refusal.retryable) == (ErrorCode.LIMIT_EXCEEDED, True)
        assert "barrier 'x' #1" in refusal.message
    assert payload_rows(world) == 0
    for name in "abc":
        number = arrive(world, name, "x", ordinal=2, payload=b"p")
    assert list(world.clients["c"].results[number].barrier.payloads) == [b"p"] * 3


def test_a_full_disk_refuses_payloads_of_unary_arrivals() -> None:
    world = World()
    world.full = True
    reply = world.replies[tool(world, "t", b"p")]
    assert isinstance(reply, error_pb2.ErrorDetail)
    assert (reply.code, reply.retryable) == (ErrorCode.LIMIT_EXCEEDED, True)


@pytest.mark.parametrize(("name", "payload"), [("x", b""), ("ferrorpc/shared_memory/offers", b"p")])
def test_a_job_goes_on_though_the_disk_is_full(name: str, payload: bytes) -> None:
    """Barriers without payloads take little room, and ferrorpc's own are few: members can still join by them."""
    world = World()
    world.full = True
    join(world, "a", "b")
    for client in "ab":
        number = arrive(world, client, name, payload=payload)
    assert list(world.clients["b"].results[number].barrier.payloads) == [payload] * 2
    assert payload_rows(world) == bool(payload)
