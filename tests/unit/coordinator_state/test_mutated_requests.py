"""The coordinator answers requests with any field set to any value, and its state stays valid."""

from __future__ import annotations

import random

import pytest
from ferrorpc_coordinator.state.events import Received, Tick
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from ferrorpc.v1 import session_pb2
from tests.simulation.checker import Violation
from tests.simulation.simulation import Simulation
from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import join, set_

NUMBERS = (0, 1, 2, 3, 7, 2**31 - 1)
TEXTS = ("", "a", "k", "x" * 600, "a b", "é", "a/b", "\x00")


def mutated(rng: random.Random, message: Message, depth: int = 0) -> None:
    """Sets some fields to extreme values."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.4 or depth > 3:
            continue
        present = getattr(message, field.name)
        repeated = hasattr(present, "extend")
        if field.message_type is not None:
            if not repeated:
                present.SetInParent()
            mutated(rng, present.add() if repeated else present, depth + 1)
        elif repeated:
            present.extend(value(rng, field) for _ in range(rng.randint(0, 3)))
        else:
            setattr(message, field.name, value(rng, field))


def value(rng: random.Random, field: FieldDescriptor) -> object:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        text = rng.choice(TEXTS)
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.random()
    number = rng.choice(NUMBERS)
    signed = field.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
    return -1 if signed and rng.random() < 0.2 else number


@pytest.mark.parametrize("seed", range(8))
def test_mutated_requests_break_nothing(seed: int) -> None:
    rng = random.Random(seed)
    world = World()
    join(world, "a", "b", "c")
    bodies = [field.name for field in session_pb2.ClientFrame.DESCRIPTOR.fields if field.message_type is not None]
    for number in range(400):
        name = rng.choice("abc")
        client = world.clients[name]
        if client.stream is None:
            client = world.hello(name, resume=bool(client.token) and not client.over, instance=str(number))
        frame = session_pb2.ClientFrame(sequence=rng.choice((0, number + 1000)))
        body = getattr(frame, rng.choice(bodies))
        body.SetInParent()
        mutated(rng, body)
        if client.stream is not None:
            world.step(Received(client.stream, frame))
        world.now += rng.randint(0, 200_000_000)
        world.step(Tick())
        try:
            Simulation.check_structure(None, world.coordinator)  # type: ignore[arg-type]
        except Violation as violation:
            pytest.fail(f"after {frame}: {violation}")
        world.take()
    world.restart()
    world.hello("z")
    set_(world, "z", "still", b"here")
    assert world.clients["z"].results[1].store.found
