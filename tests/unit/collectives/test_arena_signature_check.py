"""Calls that differ where neither rank reads what the other brought are found all the same."""

import numpy as np
import pytest

from ferrorpc.collectives.arena.arena import PROGRAM_CHANNELS
from ferrorpc.collectives.arena.signature_check import SignatureCheck
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.errors import CollectiveMismatchError
from ferrorpc.types import DType, ReduceOp, TensorSpec
from tests.unit.collectives.shared_world import Running, SharedWorld

SPEC = TensorSpec(DType.FLOAT32, (4,))
BARRIER = Call(Operation.BARRIER)
ALL_REDUCE = Call(Operation.ALL_REDUCE, (SPEC,), ReduceOp.SUM)


def broadcast(root: int, rank: int) -> Call:
    return Call(Operation.BROADCAST, (SPEC,) if rank == root else (), root=root)


def scatter(root: int, rank: int, size: int) -> Call:
    return Call(Operation.SCATTER, (SPEC,) * size if rank == root else (), root=root)


def gather(root: int) -> Call:
    return Call(Operation.GATHER, (SPEC,), root=root)


def reduce(root: int) -> Call:
    return Call(Operation.REDUCE, (SPEC,), ReduceOp.SUM, root=root)


def begin(world: SharedWorld, rank: int, call: Call, number: int) -> Running:
    return world.begin(rank, call, [np.zeros(spec.shape, np.float32) for spec in call.inputs], number=number)


def first_error(world: SharedWorld, calls: list[Call], after: Call) -> BaseException | None:
    """What a rank learns first of these calls, by the end of the operation that each begins as soon as it is through."""
    running = [[begin(world, rank, call, 1)] for rank, call in enumerate(calls)]
    while not all(part.over for parts in running for part in parts) or any(len(parts) < 2 for parts in running):
        rank = world.chance.randrange(len(calls))
        part = running[rank][-1]
        part.advance()
        if part.error is not None:
            return part.error
        if part.over and len(running[rank]) < 2:
            running[rank].append(begin(world, rank, after, 2))
    return None


@pytest.mark.parametrize("after", [BARRIER, ALL_REDUCE], ids=["barrier", "all_reduce"])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "calls",
    [
        [broadcast(0, 0), reduce(0)],
        [broadcast(0, 0), gather(0)],
        [scatter(0, 0, 2), gather(0)],
        [broadcast(0, 0), broadcast(1, 1)],
        [broadcast(0, 0), scatter(1, 1, 2)],
        [gather(1), gather(0)],
        [reduce(1), gather(0)],
        [broadcast(0, 0), broadcast(0, 1), broadcast(2, 2)],
        [scatter(0, 0, 3), reduce(0), reduce(0)],
    ],
    ids=lambda calls: " ".join(call.signature.partition("(")[0] for call in calls),
)
def test_ranks_that_only_send_learn_that_they_differ_by_the_end_of_the_next_operation(calls, seed, after):
    with SharedWorld(len(calls), seed) as world:
        error = first_error(world, calls, after)
    assert isinstance(error, CollectiveMismatchError)
    assert error.fields["number"] == 1
    assert len(set(error.signatures.values())) > 1
    for rank, signature in error.signatures.items():
        assert signature == calls[rank].signature


def test_a_rank_that_runs_ahead_learns_it_when_it_comes_back_to_the_channel():
    with SharedWorld(2) as world:
        assert world.advance([begin(world, rank, BARRIER, 0) for rank in range(2)])
        assert world.advance([begin(world, 0, broadcast(0, 0), number) for number in range(1, PROGRAM_CHANNELS + 1)])
        assert world.advance([begin(world, 1, reduce(0), 1)])
        again = begin(world, 0, broadcast(0, 0), PROGRAM_CHANNELS + 1)
        assert world.advance([again])
        assert isinstance(again.error, CollectiveMismatchError)
        assert again.error.signatures == {0: "broadcast(root=0)", 1: reduce(0).signature}
        assert again.error.fields["number"] == 1


@pytest.mark.parametrize("after", [BARRIER, ALL_REDUCE], ids=["barrier", "all_reduce"])
def test_ranks_that_both_look_too_early_learn_it_although_every_channel_knows_the_next_call(after, monkeypatch):
    """A processor may read the other's note before its own is seen there, also as the next operation begins."""
    with SharedWorld(2) as world:
        for number in range(1, 1 + PROGRAM_CHANNELS):
            assert world.advance([begin(world, rank, after, number) for rank in range(2)])
        number = 1 + PROGRAM_CHANNELS
        with monkeypatch.context() as early:
            early.setattr(SignatureCheck, "settle", lambda *_: False)
            assert world.advance([begin(world, 0, broadcast(0, 0), number), begin(world, 1, reduce(0), number)])
            parts = [begin(world, rank, after, number + 1) for rank in range(2)]
            for part in parts:
                part.advance()
        assert world.advance(parts)
        assert isinstance(parts[0].error, CollectiveMismatchError)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_equal_calls_are_never_accused(size, seed):
    """Every rank starts what it may start, far ahead of the others."""
    with SharedWorld(size, seed) as world:
        calls = [
            [broadcast(0, r), gather(0), broadcast(1, r), reduce(0), scatter(1, r, size), BARRIER, broadcast(0, r), ALL_REDUCE]
            for r in range(size)
        ]
        waiting = [[*mine * 6] for mine in calls]
        running: list[list[Running]] = [[] for _ in range(size)]
        while any(waiting) or any(part for parts in running for part in parts):
            rank = world.chance.randrange(size)
            parts = running[rank]
            if waiting[rank] and len(parts) < PROGRAM_CHANNELS:
                number = 1 + len(calls[rank]) * 6 - len(waiting[rank])
                parts.append(begin(world, rank, waiting[rank].pop(0), number))
            for part in parts:
                part.advance()
                assert part.error is None
            running[rank] = [part for part in parts if not part.over]
        for arena in world.arenas:
            arena.bank(0).settle()
            assert not arena.bank(0).pending_checks
