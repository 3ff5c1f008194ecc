"""Small moves in shared memory lie in the slots, and a rank remembers what it saw there; others may bring more."""

from __future__ import annotations

import numpy as np
import pytest

from ferrorpc.collectives.arena import exchange
from ferrorpc.collectives.arena.arena import PROGRAM_CHANNELS
from ferrorpc.collectives.arena.control_blocks import RING, SLOT_BYTES
from ferrorpc.collectives.arena.prepared import ArenaPrepared
from ferrorpc.collectives.arena.select import prepare
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.testing.reference import reduced, values
from ferrorpc.types import DType, ReduceOp, TensorSpec
from tests.unit.collectives.shared_world import Running, SharedWorld, all_reduce_call, own

WORLDS = [2, 3, 5]
TABLE_BYTES = 320
"""What a table of one entry takes."""


@pytest.fixture
def narrow(monkeypatch):
    """Up to 80 bytes of one part fit a slot, up to 400 a ring as a whole, and more comes in rounds."""
    monkeypatch.setattr(exchange, "SLOT_BYTES", TABLE_BYTES + 80)
    monkeypatch.setattr(exchange, "RING_BYTES", 400)
    monkeypatch.setattr(exchange, "CHUNK_BYTES_MIN", 64)


def spec_of(array: np.ndarray) -> TensorSpec:
    return TensorSpec(DType.FLOAT32, array.shape)


def laid_out(world: SharedWorld, rank: int, call: Call) -> ArenaPrepared:
    found = prepare(world.arenas[rank], call)
    assert found is not None
    return found


def run(world: SharedWorld, prepared: list[ArenaPrepared], inputs, number: int) -> list[list[np.ndarray]]:
    """One operation, of calls that may have run before."""
    running = [Running(each, world.arenas[rank].bank(0), number, inputs[rank]) for rank, each in enumerate(prepared)]
    assert world.advance(running), "the operation never ends"
    for part in running:
        if part.error is not None:
            raise part.error
    return [part.results for part in running]


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("seed", range(6))
def test_ranks_that_bring_little_and_ranks_that_bring_much_meet_in_one_operation(size, seed):
    with SharedWorld(size, seed) as world:
        for _ in range(6):
            arrays = [values(DType.FLOAT32, world.chance.choice([0, 1, 20, 21, 90, 300]), rank, seed) for rank in range(size)]
            inputs = [[own(world, rank, each) if world.chance.random() < 0.3 else each] for rank, each in enumerate(arrays)]
            wanted = [array.tobytes() for array in arrays]
            for result in world.run([Call(Operation.ALL_GATHER, (spec_of(array),)) for array in arrays], inputs):
                assert [part.tobytes() for part in result] == wanted
            parts = [
                [values(DType.FLOAT32, world.chance.choice([0, 2, 30, 150]), rank, to) for to in range(size)]
                for rank in range(size)
            ]
            calls = [Call(Operation.ALL_TO_ALL, tuple(map(spec_of, row))) for row in parts]
            for rank, result in enumerate(world.run(calls, parts)):
                assert [part.tobytes() for part in result] == [row[rank].tobytes() for row in parts]


def test_the_largest_that_fits_a_slot_needs_no_ring_and_one_byte_more_does():
    with SharedWorld(2) as world:
        for number, (nbytes, ring) in enumerate([(SLOT_BYTES - TABLE_BYTES, 0), (SLOT_BYTES - TABLE_BYTES + 1, 1)], 1):
            array = values(DType.UINT8, nbytes, 0)
            calls = [
                Call(Operation.BROADCAST, (TensorSpec(DType.UINT8, array.shape),), root=0),
                Call(Operation.BROADCAST, root=0),
            ]
            results = run(world, [laid_out(world, rank, call) for rank, call in enumerate(calls)], [[array], []], number)
            assert results[1][0].tobytes() == array.tobytes()
            block = world.arenas[0].bank(0).channels[number % PROGRAM_CHANNELS].block
            assert bool(block[RING]) == bool(ring)


@pytest.mark.parametrize("parts_max", [exchange.PARTS_MAX, 3])
def test_what_a_rank_remembers_of_others_is_what_they_say_now(parts_max, monkeypatch):
    """One call on rank 0, run again and again on every channel; rank 1's shape changes in between, and its elements always."""
    monkeypatch.setattr(exchange, "PARTS_MAX", parts_max)
    with SharedWorld(2) as world:
        mine = np.arange(3, dtype=np.float32)
        first = laid_out(world, 0, Call(Operation.ALL_GATHER, (spec_of(mine),)))
        theirs = {
            shape: laid_out(world, 1, Call(Operation.ALL_GATHER, (TensorSpec(DType.FLOAT32, shape),)))
            for shape in [(4,), (2, 2), (), (0, 7), (6,)]
        }
        for number in range(1, 60):
            shape = world.chance.choice(list(theirs))
            array = np.full(shape, number, np.float32)
            results = run(world, [first, theirs[shape]], [[mine], [array]], number)
            for result in results:
                assert [part.shape for part in result] == [(3,), shape]
                assert result[0].tolist() == [0, 1, 2]
                assert result[1].tobytes() == array.tobytes()
                assert all(part.flags.owndata and part.flags.writeable for part in result)
            assert len(first._parts) <= parts_max


@pytest.mark.parametrize("shapes", [[(3,), (3,)], [(2, 2), (3,)], [(3,), (2, 2)], [(3,), (0,)]])
def test_the_callers_arrays_are_used_where_they_fit(shapes):
    with SharedWorld(2) as world:
        calls = [Call(Operation.ALL_GATHER, (TensorSpec(DType.FLOAT32, shape),)) for shape in shapes]
        arrays = [np.full(shape, rank, np.float32) for rank, shape in enumerate(shapes)]
        given = [[np.full(3, 9, np.float32) for _ in range(2)] for _ in range(2)]
        for result, outputs in zip(world.run(calls, [[array] for array in arrays], given), given, strict=True):
            for shape, found, out, array in zip(shapes, result, outputs, arrays, strict=True):
                assert (found is out) == (shape == (3,))
                assert found.tobytes() == array.tobytes()
                assert found is out or out.tolist() == [9, 9, 9]


def test_an_all_reduce_in_between_uses_the_same_slots():
    with SharedWorld(2) as world:
        gathered = [laid_out(world, rank, Call(Operation.ALL_GATHER, (TensorSpec(DType.FLOAT32, (4,)),))) for rank in range(2)]
        added = [laid_out(world, rank, all_reduce_call(DType.FLOAT32, 300)) for rank in range(2)]
        for number in range(1, 20):
            arrays = [values(DType.FLOAT32, 4 if number % 3 else 300, rank, number) for rank in range(2)]
            results = run(world, gathered if number % 3 else added, [[array] for array in arrays], number)
            for result in results:
                if number % 3:
                    assert [part.tobytes() for part in result] == [array.tobytes() for array in arrays]
                else:
                    assert result[0].tobytes() == reduced(arrays, ReduceOp.SUM, DType.FLOAT32).tobytes()


def test_slots_that_are_given_back_are_forgotten_by_a_call_that_lives_on():
    with SharedWorld(2) as world:
        call, array = Call(Operation.ALL_GATHER, (TensorSpec(DType.FLOAT32, (4,)),)), np.ones(4, np.float32)
        prepared = [laid_out(world, rank, call) for rank in range(2)]
        assert world.advance([Running(each, world.arenas[rank].bank(5), 1, [array]) for rank, each in enumerate(prepared)])
        assert all(each._slot_layouts for each in prepared)
        for arena in world.arenas:
            arena.let_go(5)
            arena.bank(6)  # a stream that opens takes what can be given back
        assert not any(each._slot_layouts for each in prepared)
