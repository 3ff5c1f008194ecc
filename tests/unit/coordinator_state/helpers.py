"""Helpers for the tests of the coordinator's state."""

from __future__ import annotations

from ferrorpc.v1 import barrier_pb2, error_pb2, identity_pb2, rendezvous_pb2, session_pb2, store_pb2
from tests.transcripts.world import World


def join(world: World, *names: str, size: int = 0, timeout_ms: int = 60_000) -> None:
    """These clients ask to join a fixed world of `size`, by default their own number; new ones send a Hello first."""
    size = size or len(names)
    for name in names:
        if name not in world.clients:
            world.hello(name)
        request = rendezvous_pb2.JoinRequest(
            policy=rendezvous_pb2.WorldPolicy(min_size=size, max_size=size),
            after_generation=world.clients[name].generation,
            pinned_rank=-1,
            hinted_rank=-1,
            timeout_ms=timeout_ms,
        )
        world.ask(name, join=request)


def ask_elastic(world: World, name: str, low: int, high: int, last_call_ms: int = 0, pinned_rank: int = -1) -> int:
    """Asks to join a world of `low` to `high` members; new ones send a Hello first. Returns the request's number."""
    if name not in world.clients:
        world.hello(name)
    request = rendezvous_pb2.JoinRequest(
        policy=rendezvous_pb2.WorldPolicy(min_size=low, max_size=high, last_call_ms=last_call_ms),
        after_generation=world.clients[name].generation,
        pinned_rank=pinned_rank,
        hinted_rank=-1,
        timeout_ms=60_000,
    )
    return world.ask(name, join=request)


def labelled(world: World, label: str, value: str, *names: str) -> None:
    """New processes with this label; without any where its value is empty."""
    for name in names:
        world.hello(name, labels=[identity_pb2.Label(name=label, value=value)] if value else [])


def store(world: World, name: str, request_id: int = 0, **operation: object) -> session_pb2.Result | None:
    """One store request; its answer, if there is one already."""
    request = store_pb2.StoreRequest(request_id=request_id, **operation)  # type: ignore[arg-type]
    return world.clients[name].results.get(world.ask(name, store=request))


def set_(world: World, name: str, key: str, value: bytes, request_id: int = 0) -> session_pb2.Result | None:
    """Sets a key."""
    return store(world, name, request_id, set=store_pb2.SetOperation(key=key, value=value))


def add(world: World, name: str, key: str, request_id: int) -> int:
    """Adds one."""
    result = store(world, name, request_id, add=store_pb2.AddOperation(key=key, amount=1))
    assert result is not None
    return result.store.number


def arrive(world: World, name: str, barrier: str, ordinal: int = 1, **more: object) -> int:
    """Arrives at a barrier of the client's generation; returns the request's number."""
    fields = {"generation": world.clients[name].generation, "timeout_ms": 30_000} | more
    request = barrier_pb2.BarrierRequest(name=barrier, ordinal=ordinal, **fields)  # type: ignore[arg-type]
    return world.ask(name, barrier=request)


def error(world: World, name: str) -> error_pb2.ErrorDetail:
    """The error that the client's last request was answered with."""
    client = world.clients[name]
    result = client.results[client.sequence]
    assert result.WhichOneof("outcome") == "error", result
    return result.error
