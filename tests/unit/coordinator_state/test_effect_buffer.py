"""Requests are answered once, again when they are repeated, and by one encoding where many are answered alike."""

from __future__ import annotations

from ferrorpc_coordinator.state.effects import Note, Persist, Send
from ferrorpc_coordinator.state.events import Received

from ferrorpc.v1 import rendezvous_pb2, session_pb2, store_pb2
from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import add, arrive, join, set_


def test_an_overlay_completes_the_shared_frame() -> None:
    shared = session_pb2.ServerFrame()
    shared.result.join.generation = 7
    shared.result.join.peers.add(name="a")
    own = session_pb2.ServerFrame()
    own.result.sequence = 3
    own.result.join.rank = 2
    merged = session_pb2.ServerFrame.FromString(shared.SerializeToString() + own.SerializeToString()).result
    assert (merged.sequence, merged.join.generation, merged.join.rank) == (3, 7, 2)
    assert [peer.name for peer in merged.join.peers] == ["a"]


def test_a_repeated_request_number_is_answered_again_and_carried_out_once() -> None:
    world = World()
    join(world, "a")
    stream = world.clients["a"].stream
    assert stream is not None
    request = store_pb2.StoreRequest(add=store_pb2.AddOperation(key="k", amount=1))
    frame = session_pb2.ClientFrame(sequence=9, store=request)
    world.step(Received(stream, frame))
    first = world.clients["a"].results.pop(9)
    world.step(Received(stream, frame))
    assert world.clients["a"].results[9] == first
    assert first.store.number == 1


def test_a_repeated_request_that_still_waits_is_answered_once() -> None:
    world = World()
    join(world, "a", "b")
    world.ask("a", store=store_pb2.StoreRequest(get=store_pb2.GetOperation(key="k", wait_ms=20_000)))
    world.cut("a")
    world.hello("a", resume=True)
    world.take()
    set_(world, "b", "k", b"v")
    answers = [frame for name, frame in world.take() if name == "a"]
    assert [frame.result.store.value for frame in answers] == [b"v"]


def test_a_write_that_is_retried_after_a_restart_counts_once() -> None:
    world = World()
    join(world, "a")
    assert add(world, "a", "steps", request_id=1) == 1
    assert add(world, "a", "steps", request_id=2) == 2
    world.restart()
    world.hello("a", resume=True)
    assert add(world, "a", "steps", request_id=2) == 2
    assert add(world, "a", "steps", request_id=3) == 3


def test_rows_come_before_the_answers_that_depend_on_them() -> None:
    world = World()
    join(world, "a")
    set_(world, "a", "k", b"v", request_id=1)
    kinds = [type(effect) for effect in world.effects]
    assert kinds[-1] is Send
    assert kinds.count(Persist) == len(kinds) - 1
    persisted = {(effect.table, effect.key) for effect in world.effects if isinstance(effect, Persist)}
    assert persisted == {("store", "job/k"), ("write", "job/a#1/1"), ("meta", "revision")}


def test_a_beat_changes_no_row_and_is_not_answered() -> None:
    world = World()
    join(world, "a")
    stream = world.clients["a"].stream
    assert stream is not None
    assert world.step(Received(stream, session_pb2.ClientFrame(beat=session_pb2.Beat(step=4)))) == []


def test_many_arrivals_are_answered_by_one_encoding() -> None:
    world = World()
    names = [f"m{number}" for number in range(200)]
    join(world, *names)
    assert [type(effect) for effect in world.effects if not isinstance(effect, Persist | Note)] == [Send]
    assert sorted(client.rank for client in world.clients.values()) == list(range(200))
    for name in names:
        arrive(world, name, "epoch", payload=name.encode())
    many = [effect for effect in world.effects if isinstance(effect, Send)]
    assert [len(effect.recipients) for effect in many] == [200]
    for client in world.clients.values():
        assert list(client.results[client.sequence].barrier.payloads) == [name.encode() for name in names]


def test_a_position_has_epoch_generation_and_revision() -> None:
    world = World()
    join(world, "a")
    positions = world.clients["a"].positions
    assert {position.cluster_id for position in positions} == {"minted-1"}
    assert [position.generation for position in positions] == [0, 1]
    assert positions[0].revision < positions[1].revision
    world.restart()
    world.hello("a", resume=True)
    assert world.clients["a"].positions[-1].epoch == 2
    assert world.clients["a"].positions[-1].cluster_id == "minted-1"


def test_a_spare_that_takes_over_gets_the_rank_that_is_free() -> None:
    world = World()
    join(world, "a", "b")
    join(world, "s", size=2)
    world.ask("a", leave=rendezvous_pb2.LeaveRequest(reason="ValueError: x"))
    join(world, "b", size=2)
    assert (world.clients["s"].rank, world.clients["b"].rank) == (0, 1)


def test_a_repeated_watch_request_makes_a_new_watch_on_its_own_stream() -> None:
    world = World()
    join(world, "a")
    client = world.clients["a"]
    number = world.ask("a", store=store_pb2.StoreRequest(watch=store_pb2.WatchOperation(prefix="k")))
    lost = client.results.pop(number)
    client.pending[number] = session_pb2.ClientFrame(
        sequence=number, store=store_pb2.StoreRequest(watch=store_pb2.WatchOperation(prefix="k"))
    )
    world.cut("a")
    world.hello("a", resume=True)
    again = client.results[number].store.watch_id
    assert again != lost.store.watch_id
    set_(world, "a", "k", b"v")
    assert [event.store.watch_id for event in client.events if event.HasField("store")] == [again]
