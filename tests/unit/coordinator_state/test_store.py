"""Edge cases of the store: unary calls, waits that fail, deleted keys, compacted history."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ferrorpc_coordinator.state.effects import Send
from ferrorpc_coordinator.state.events import Called, Cancelled, Received
from ferrorpc_coordinator.state.settings import SECOND, Limits, Settings

from ferrorpc.errors import ErrorCode
from ferrorpc.v1 import error_pb2, rendezvous_pb2, session_pb2, store_pb2
from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import add, error, join, set_, store


def unary(world: World, client: str = "tool", request_id: int = 0, **operation: object) -> int:
    request = store_pb2.StoreRequest(request_id=request_id, **operation)  # type: ignore[arg-type]
    return world.call(session_pb2.UnaryStoreRequest(job="job", client_id=client, request=request))


def test_a_unary_write_is_retried_safely_across_a_restart() -> None:
    world = World()
    increment = store_pb2.AddOperation(key="n", amount=1)
    unary(world, request_id=5, add=increment)
    world.restart()
    reply = world.replies[unary(world, request_id=5, add=increment)]
    assert isinstance(reply, session_pb2.UnaryStoreResponse)
    assert reply.response.number == 1
    other = world.replies[unary(world, client="another", request_id=5, add=increment)]
    assert isinstance(other, session_pb2.UnaryStoreResponse)
    assert other.response.number == 2


@pytest.mark.parametrize("client", ["tool#1", "call-1-2", ""])
def test_no_unary_client_is_given_the_results_of_another_client(client: str) -> None:
    """Whatever members and clients are called: a write that finds the result of another's is not carried out."""
    world = World()
    world.hello("~tool")
    add(world, "~tool", "members", 1)
    unary(world, client="", request_id=1, add=store_pb2.AddOperation(key="anonymous", amount=1))
    reply = world.replies[unary(world, client=client, request_id=1, add=store_pb2.AddOperation(key="n", amount=5))]
    assert isinstance(reply, session_pb2.UnaryStoreResponse)
    assert reply.response.number == 5


def test_results_of_a_member_that_is_gone_are_forgotten_after_a_restart_whatever_it_is_called() -> None:
    world = World()
    world.hello("~tool")
    add(world, "~tool", "n", 1)
    del world.rows["member", "job/~tool"]
    world.restart()
    assert world.coordinator.jobs["job"].store.write_results.clients() == []


def test_a_unary_wait_ends_with_its_caller() -> None:
    world = World()
    call = unary(world, get=store_pb2.GetOperation(key="k", wait_ms=60_000))
    world.step(Cancelled(call))
    unary(world, set=store_pb2.SetOperation(key="k", value=b"v"))
    assert call not in world.replies
    assert world.coordinator.next_deadline() is None


def nobody_waits(world: World) -> bool:
    kept = world.coordinator.jobs["job"].store
    return not kept._waiting and not kept._waiters_of and kept._waited_keys == 0


def test_all_waits_for_a_key_end_when_it_is_set_and_none_begins_after_that() -> None:
    world = World()
    world.hello("a")
    wait = store_pb2.WaitOperation(keys=["k", "l", "k"], wait_ms=60_000)
    waiting = [world.ask("a", store=store_pb2.StoreRequest(wait=wait)) for _ in range(2)]
    set_(world, "a", "k", b"")
    assert not set(waiting) & world.clients["a"].results.keys()
    set_(world, "a", "l", b"")
    assert all(world.clients["a"].results[number].store.found for number in waiting)
    at_once = store(world, "a", wait=wait)
    assert at_once is not None
    assert at_once.store.found


def test_the_wait_of_a_session_ends_with_it() -> None:
    world = World()
    join(world, "a", "b")
    store(world, "a", get=store_pb2.GetOperation(key="k", wait_ms=1_000_000))
    world.ask("a", leave={})
    assert nobody_waits(world)


def test_the_end_of_a_session_or_a_call_ends_only_its_own_waits() -> None:
    world = World()
    join(world, "a", "b")
    get = store_pb2.GetOperation(key="k", wait_ms=60_000)
    cancelled, goes_on = unary(world, get=get), unary(world, get=get)
    for name in ("a", "b"):
        world.clients[name].sequence = cancelled - 1  # numbers of calls and of a session's requests are not related
        assert store(world, name, get=get) is None
    world.step(Cancelled(cancelled))
    world.ask("b", leave={})
    set_(world, "a", "k", b"v")
    assert world.clients["a"].results[cancelled].store.value == b"v"
    assert isinstance(world.replies[goes_on], session_pb2.UnaryStoreResponse)
    assert cancelled not in world.replies
    assert nobody_waits(world)


def test_a_wait_that_is_answered_or_times_out_is_not_kept_for_the_end_of_its_owner() -> None:
    world = World()
    world.hello("a")
    for wait_ms in (1_000, 60_000):
        store(world, "a", wait=store_pb2.WaitOperation(keys=["k", f"l{wait_ms}"], wait_ms=wait_ms))
        unary(world, get=store_pb2.GetOperation(key=f"l{wait_ms}", wait_ms=wait_ms))
    world.tick(2 * SECOND)
    assert not nobody_waits(world)
    for key in ("k", "l60000"):
        set_(world, "a", key, b"")
    assert nobody_waits(world)


@pytest.mark.parametrize(
    ("held", "expected", "expect_absent", "is_set"),
    [
        (None, b"", True, True),
        (None, b"", False, False),
        (b"v", b"v", False, True),
        (b"v", b"w", False, False),
        (b"v", b"v", True, False),
        (b"", b"", True, False),
    ],
)
def test_a_key_is_set_only_if_it_holds_what_is_expected(
    held: bytes | None, expected: bytes, expect_absent: bool, is_set: bool
) -> None:
    world = World()
    join(world, "a")
    if held is not None:
        set_(world, "a", "k", held)
    operation = store_pb2.CompareSetOperation(key="k", expected=expected, expect_absent=expect_absent, value=b"new")
    result = store(world, "a", compare_set=operation)
    assert result is not None
    assert (result.store.found, result.store.value) == (is_set, b"new" if is_set else held or b"")


def test_keys_of_a_session_and_a_generation_that_go_on_survive_a_restart() -> None:
    world = World()
    join(world, "a")
    for binding in (store_pb2.KEY_BINDING_SESSION, store_pb2.KEY_BINDING_GENERATION):
        store(world, "a", set=store_pb2.SetOperation(key=f"k{binding}", value=b"v", binding=binding))
    for _ in range(2):
        world.restart()
        world.hello("a", resume=True)
    result = store(world, "a", keys=store_pb2.KeysOperation(prefix="k"))
    assert result is not None
    assert len(result.store.keys) == 2
    world.ask("a", leave={})
    keyspace = world.coordinator.jobs["job"].store.keyspace
    assert (len(keyspace), keyspace.bindings()) == (0, [])


def test_a_store_timeout_names_the_client_the_time_and_the_keys() -> None:
    world = World()
    world.hello("a")
    world.tick(SECOND)
    store(world, "a", wait=store_pb2.WaitOperation(keys=["k", "l"], wait_ms=2_000))
    world.tick(2 * SECOND)
    assert error(world, "a").code == ErrorCode.STORE_TIMEOUT
    assert "waited 2.0 s for k, l" in error(world, "a").message


def test_keys_of_a_generation_are_deleted_when_all_its_members_left() -> None:
    world = World()
    join(world, "a", "b")
    bound = store_pb2.SetOperation(key="k", value=b"v", binding=store_pb2.KEY_BINDING_GENERATION)
    store(world, "a", set=bound)
    world.hello("c")
    world.ask("a", leave={})
    result = store(world, "c", get=store_pb2.GetOperation(key="k"))
    assert result is not None
    assert result.store.found
    world.ask("b", leave={})
    result = store(world, "c", get=store_pb2.GetOperation(key="k"))
    assert result is not None
    assert not result.store.found


def test_a_unary_call_can_neither_watch_nor_bind() -> None:
    world = World()
    bound = store_pb2.SetOperation(key="k", value=b"", binding=store_pb2.KEY_BINDING_SESSION)
    for reply in (
        world.replies[unary(world, watch=store_pb2.WatchOperation(prefix=""))],
        world.replies[unary(world, set=bound)],
        world.replies[unary(world)],
    ):
        assert isinstance(reply, error_pb2.ErrorDetail)
        assert reply.code == ErrorCode.USAGE


def test_a_member_without_a_generation_cannot_bind_a_key_to_one() -> None:
    """A member of a generation continues through reform() at a coordinator that lost it, as after any end of a generation."""
    world = World()
    world.hello("a")
    store(world, "a", set=store_pb2.SetOperation(key="k", value=b"", binding=store_pb2.KEY_BINDING_GENERATION))
    assert error(world, "a").code == ErrorCode.STALE_GENERATION


def test_a_sum_that_does_not_fit_is_refused() -> None:
    world = World()
    join(world, "a")
    set_(world, "a", "n", str(2**63 - 1).encode())
    store(world, "a", add=store_pb2.AddOperation(key="n", amount=1))
    assert error(world, "a").code == ErrorCode.USAGE
    result = store(world, "a", get=store_pb2.GetOperation(key="n"))
    assert result is not None
    assert result.store.value == str(2**63 - 1).encode()


def test_a_retried_compare_set_succeeds_again() -> None:
    world = World()
    join(world, "a", "b")
    mine = store_pb2.CompareSetOperation(key="leader", expect_absent=True, value=b"a")
    store(world, "a", request_id=1, compare_set=mine)
    set_(world, "b", "leader", b"b")
    again = store(world, "a", request_id=1, compare_set=mine)
    assert again is not None
    assert (again.store.found, again.store.value) == (True, b"a")


def test_keys_of_a_session_that_died_during_an_outage_are_deleted_afterwards() -> None:
    world = World()
    join(world, "a")
    world.hello("b")
    store(world, "a", set=store_pb2.SetOperation(key="seat", value=b"a", binding=store_pb2.KEY_BINDING_SESSION))
    world.restart()
    world.hello("b", resume=True)
    world.tick(9 * SECOND)
    assert ("store", "job/seat") in world.rows
    world.tick(2 * SECOND)
    assert ("store", "job/seat") not in world.rows
    assert not any(table == "write" for table, _ in world.rows)


@pytest.mark.parametrize("binding", [store_pb2.KEY_BINDING_SESSION, store_pb2.KEY_BINDING_GENERATION])
@pytest.mark.parametrize("deleted", [False, True])
def test_setting_a_key_again_replaces_its_binding(binding: store_pb2.KeyBinding.ValueType, deleted: bool) -> None:
    world = World()
    join(world, "a", "b")
    store(world, "a", set=store_pb2.SetOperation(key="k", value=b"1", binding=binding))
    if deleted:
        store(world, "a", delete=store_pb2.DeleteOperation(key="k"))
    set_(world, "b", "k", b"2")
    join(world, "a", "b")
    world.ask("a", leave={})
    result = store(world, "b", get=store_pb2.GetOperation(key="k"))
    assert result is not None
    assert result.store.value == b"2"


@pytest.mark.parametrize("binding", [store_pb2.KEY_BINDING_SESSION, store_pb2.KEY_BINDING_GENERATION])
def test_a_counter_and_a_swapped_value_keep_the_binding_of_their_key(binding: store_pb2.KeyBinding.ValueType) -> None:
    world = World()
    join(world, "a", "b")
    for key in ("n", "k"):
        store(world, "a", set=store_pb2.SetOperation(key=key, value=b"1", binding=binding))
    add(world, "b", "n", request_id=1)
    store(world, "b", compare_set=store_pb2.CompareSetOperation(key="k", expected=b"1", value=b"2"))
    world.ask("a", leave={"reason": "killed"})
    assert len(world.coordinator.jobs["job"].store.keyspace) == 0


def test_a_binding_of_a_later_version_is_refused() -> None:
    world = World()
    join(world, "a")
    store(world, "a", set=store_pb2.SetOperation(key="k", value=b"", binding=77))  # type: ignore[arg-type]
    assert error(world, "a").code == ErrorCode.USAGE
    assert len(world.coordinator.jobs["job"].store.keyspace) == 0


@pytest.mark.parametrize("limit", [{"history_events": 3}, {"history_bytes": 6}], ids=["events", "bytes"])
def test_a_watch_from_before_the_history_gets_compacted(limit: dict[str, int]) -> None:
    world = World(Settings(durable=True, limits=replace(Limits(), **limit)))
    join(world, "a")
    for _ in range(5):
        add(world, "a", "n", request_id=0)
    store(world, "a", watch=store_pb2.WatchOperation(prefix="n", from_revision=1))
    events = [event.store for event in world.clients["a"].events if event.HasField("store")]
    assert [event.compacted for event in events] == [True, False, False, False]
    assert [event.value for event in events[1:]] == [b"3", b"4", b"5"]
    newest = events[-1].revision
    store(world, "a", watch=store_pb2.WatchOperation(prefix="n", from_revision=newest))
    assert [event.store.value for event in world.clients["a"].events[len(events) :]] == [b"5"]
    for from_revision, forgotten in ((events[1].revision, []), (events[1].revision - 1, [True])):
        before = len(world.clients["a"].events)
        store(world, "a", watch=store_pb2.WatchOperation(prefix="n", from_revision=from_revision))
        told = [event.store.compacted for event in world.clients["a"].events[before:]]
        assert told == [*forgotten, False, False, False]


def test_after_a_restart_a_watch_gets_compacted() -> None:
    world = World()
    join(world, "a")
    set_(world, "a", "k", b"v")
    world.restart()
    world.hello("a", resume=True)
    store(world, "a", watch=store_pb2.WatchOperation(prefix="k", from_revision=1))
    assert [event.store.compacted for event in world.clients["a"].events if event.HasField("store")] == [True]


def test_of_a_job_that_has_ended_only_its_keys_are_kept() -> None:
    """Each kept megabytes of values that had been replaced, and of answers that nobody could ask for again."""
    world = World()
    join(world, "a", "b")
    for value in (b"first", b"second"):
        set_(world, "a", "k", value)
    store(world, "b", get=store_pb2.GetOperation(key="k"))
    members = world.coordinator.jobs["job"].members
    world.ask("a", leave=rendezvous_pb2.LeaveRequest())
    store(world, "b", watch=store_pb2.WatchOperation(prefix="k", from_revision=1))
    events = [event.store for event in world.clients["b"].events if event.HasField("store")]
    assert [event.value for event in events] == [b"first", b"second"], "others may still ask for them"
    world.ask("b", leave=rendezvous_pb2.LeaveRequest())
    assert [len(member.answers) for member in members] == [0, 0]
    world.hello("c")
    store(world, "c", watch=store_pb2.WatchOperation(prefix="k", from_revision=1))
    assert [event.store.compacted for event in world.clients["c"].events if event.HasField("store")] == [True]
    found = store(world, "c", get=store_pb2.GetOperation(key="k"))
    assert found is not None
    assert found.store.value == b"second"


def test_a_watch_ends_with_its_stream() -> None:
    world = World()
    join(world, "a", "b")
    store(world, "a", watch=store_pb2.WatchOperation(prefix=""))
    world.cut("a")
    world.hello("a", resume=True)
    set_(world, "b", "k", b"v")
    assert not any(event.HasField("store") for event in world.clients["a"].events)
    store(world, "a", watch=store_pb2.WatchOperation(prefix=""))
    world.hello("a", resume=True)  # the end of its last stream was not noticed yet
    assert not world.coordinator.jobs["job"].store.watches._watches  # or they would add up to the limit


REFUSED = {"set": {"key": "k"}, "add": {"key": "k", "amount": 1}, "compare_set": {"key": "k", "expect_absent": True}}
TAKEN = {"get": {"key": "k"}, "delete": {"key": "k"}, "keys": {"prefix": ""}}


@pytest.mark.parametrize("operation", [*REFUSED, *TAKEN])
def test_a_full_disk_refuses_writes_of_sessions_and_unary_calls(operation: str) -> None:
    world = World()
    client = world.hello("a")
    request = store_pb2.StoreRequest(request_id=1, **{operation: {**REFUSED, **TAKEN}[operation]})  # type: ignore[arg-type]
    world.step(Received(client.stream or 0, session_pb2.ClientFrame(sequence=7, store=request), full=True))
    world.step(Called(1000, session_pb2.UnaryStoreRequest(job="job", request=request), full=True))
    result, reply = client.results[7], world.replies[1000]
    if operation in TAKEN:
        assert (result.HasField("store"), isinstance(reply, session_pb2.UnaryStoreResponse)) == (True, True)
        return
    assert isinstance(reply, error_pb2.ErrorDetail)
    for refusal in (result.error, reply):
        assert (refusal.code, refusal.retryable) == (ErrorCode.LIMIT_EXCEEDED, True)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_retried_write_is_answered_though_the_disk_is_full_now(restarted: bool) -> None:
    """Its answer was lost with the connection; if it were refused now, its caller would repeat it later."""
    world = World()
    client = world.hello("a")
    assert add(world, "a", "n", request_id=1) == 1
    if restarted:
        world.restart()
    else:
        world.cut("a")
    world.hello("a", resume=True)
    increment = store_pb2.StoreRequest(request_id=1, add=store_pb2.AddOperation(key="n", amount=1))
    world.step(Received(client.stream or 0, session_pb2.ClientFrame(sequence=1, store=increment), full=True))
    assert client.results[1].store.number == 1


def copies_of(world: World, value: bytes) -> int:
    """How many frames of the last step contain this value."""
    frames = [effect.frame for effect in world.effects if isinstance(effect, Send)]
    return sum(value in (frame.event.store.value, frame.result.store.value) for frame in frames)


def test_a_change_is_held_once_for_all_watches_that_get_it() -> None:
    """A value may have 1 MiB, and a job a thousand watches."""
    world, value = World(), b"x" * 100_000
    join(world, "a", "b")
    store(world, "a", watch=store_pb2.WatchOperation(prefix=""))
    for prefix in ("k", "other", "k"):
        store(world, "b", watch=store_pb2.WatchOperation(prefix=prefix))
    set_(world, "a", "k", value)
    assert copies_of(world, value) == 1
    seen = {
        name: [(event.store.watch_id, event.store.key, event.store.value) for event in world.clients[name].events]
        for name in ("a", "b")
    }
    assert seen == {"a": [(1, "k", value)], "b": [(2, "k", value), (4, "k", value)]}


def test_a_large_value_is_held_once_for_all_that_wait_for_it() -> None:
    world, value = World(), b"x" * 100_000
    join(world, "a", "b")
    waiting = {
        name: world.ask(name, store=store_pb2.StoreRequest(get=store_pb2.GetOperation(key="k", wait_ms=9_000)))
        for name in ("a", "b")
    }
    call = unary(world, get=store_pb2.GetOperation(key="k", wait_ms=9_000))
    set_(world, "a", "k", value)
    assert copies_of(world, value) == 1
    assert all(world.clients[name].results[number].store.value == value for name, number in waiting.items())
    assert world.replies[call].response.value == value  # type: ignore[union-attr]


def test_the_answer_to_a_wait_for_a_small_value_is_kept_for_a_repeated_request() -> None:
    world = World()
    join(world, "a", "b")
    number = world.ask("a", store=store_pb2.StoreRequest(get=store_pb2.GetOperation(key="k", wait_ms=9_000)))
    set_(world, "b", "k", b"v")
    store(world, "b", delete=store_pb2.DeleteOperation(key="k"))
    stream = world.clients["a"].stream
    assert stream is not None
    del world.clients["a"].results[number]
    again = store_pb2.StoreRequest(get=store_pb2.GetOperation(key="k", wait_ms=9_000))
    world.step(Received(stream, session_pb2.ClientFrame(sequence=number, store=again)))
    assert world.clients["a"].results[number].store.value == b"v"
