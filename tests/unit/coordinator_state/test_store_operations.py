"""What holds for every operation of the store, also for one that comes later."""

from __future__ import annotations

from typing import Any

import pytest
from ferrorpc_coordinator.state import store as module
from ferrorpc_coordinator.state.events import Received

from ferrorpc.errors import ErrorCode
from ferrorpc.v1 import session_pb2, store_pb2
from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import set_, store

ONEOF = store_pb2.StoreRequest.DESCRIPTOR.oneofs_by_name["operation"]
OPERATIONS = [field.name for field in ONEOF.fields]
on_each_operation = pytest.mark.parametrize("name", OPERATIONS)


def body(name: str) -> dict[str, Any]:
    """A request of this operation for key k, whose value is 1."""
    request = store_pb2.StoreRequest()
    operation = getattr(request, name)
    for field in operation.DESCRIPTOR.fields:
        if field.name in ("expect_absent", "binding", "after", "from_revision"):
            continue
        value: Any = {field.TYPE_STRING: "k", field.TYPE_BYTES: b"1", field.TYPE_BOOL: True}.get(field.type, 1)
        if field.is_repeated:
            getattr(operation, field.name).append(value)
        else:
            setattr(operation, field.name, value)
    return {name: operation}


def world_with_a_key() -> World:
    world = World()
    world.hello("a")
    set_(world, "a", "k", b"1")
    return world


def revision(world: World) -> int:
    return world.coordinator.jobs["job"].store._context.durable_state.revision


def test_the_coordinator_knows_all_of_them() -> None:
    assert list(module._OPERATIONS) == OPERATIONS


@on_each_operation
def test_one_that_changes_something_takes_effect_once_however_often_it_is_sent(name: str) -> None:
    world = world_with_a_key()
    before = revision(world)
    first = store(world, "a", request_id=7, **body(name))
    after = revision(world)
    if after == before:
        return
    again = store(world, "a", request_id=7, **body(name))
    assert first is not None
    assert again is not None
    assert first.store == again.store
    assert revision(world) == after


@on_each_operation
def test_one_that_answers_with_values_or_keys_may_answer_much(name: str) -> None:
    result = store(world_with_a_key(), "a", **body(name))
    assert result is not None
    if result.store.value or result.store.keys:
        assert module.may_answer_much(store_pb2.StoreRequest(**body(name)))


@on_each_operation
def test_one_that_takes_room_is_refused_on_a_full_disk(name: str) -> None:
    world = world_with_a_key()
    before, client = revision(world), world.clients["a"]
    frame = session_pb2.ClientFrame(sequence=100, store=store_pb2.StoreRequest(**body(name)))
    world.step(Received(client.stream or 0, frame, full=True))
    result = client.results[100]
    if result.HasField("error"):
        assert result.error.code == ErrorCode.LIMIT_EXCEEDED
    else:
        assert name == "delete" or revision(world) == before
