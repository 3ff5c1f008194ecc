"""Large moves and reductions to one rank in shared memory: in rounds through a small ring, with the results of one go."""

from __future__ import annotations

import numpy as np
import pytest

from ferrorpc.collectives.arena import exchange
from ferrorpc.collectives.arena.control_blocks import CHUNK_BITS, LEFT, SLOT_BYTES, STAGED
from ferrorpc.collectives.arena.exchange import RING_BYTES, SLOTS
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.errors import CodecError, CollectiveMismatchError
from ferrorpc.testing.reference import reduced, values
from ferrorpc.types import DType, ReduceOp, TensorSpec
from tests.unit.collectives.shared_world import Running, SharedWorld, all_reduce_call, own

WORLDS = [2, 3, 5]
Array = np.ndarray


@pytest.fixture(autouse=True, params=[1, 2, 3], ids=lambda slots: f"{slots} slots")
def small_rings(request, monkeypatch):
    """So that a few hundred bytes come in several rounds, and fewer as a whole through the ring."""
    monkeypatch.setattr(exchange, "SLOT_BYTES", 0)
    monkeypatch.setattr(exchange, "RING_BYTES", 256)
    monkeypatch.setattr(exchange, "CHUNK_BYTES_MIN", 64)
    monkeypatch.setattr(exchange, "SLOTS", request.param)


def placed(world: SharedWorld, rank: int, arrays: list[Array], registered: str) -> list[Array]:
    """The arrays in ordinary memory, in shared memory, or now here and now there."""
    return [
        own(world, rank, array) if registered == "all" or (registered == "some" and (rank + item) % 2) else array.copy()
        for item, array in enumerate(arrays)
    ]


def call_of(
    operation: Operation, arrays: list[Array], dtype: DType, root: int | None = None, op: ReduceOp | None = None
) -> Call:
    return Call(operation, tuple(TensorSpec(dtype, array.shape) for array in arrays), op, root=root)


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("registered", ["none", "some", "all"])
@pytest.mark.parametrize("seed", range(4))
def test_moves_of_any_sizes_bring_what_was_sent(size, registered, seed):
    dtype = DType.COMPLEX64
    with SharedWorld(size, seed) as world:
        rows = [world.chance.choice([0, 1, 7, 40, 100]) for _ in range(size)]
        arrays = [values(dtype, (count, 3), rank, seed) for rank, count in enumerate(rows)]
        inputs = [placed(world, rank, [array], registered) for rank, array in enumerate(arrays)]
        root = seed % size
        wanted = [array.tobytes() for array in arrays]
        for result in world.run([call_of(Operation.ALL_GATHER, [array], dtype) for array in arrays], inputs):
            assert [part.tobytes() for part in result] == wanted
        gathered = world.run([call_of(Operation.GATHER, [array], dtype, root) for array in arrays], inputs)
        assert [part.tobytes() for part in gathered[root]] == wanted
        calls = [call_of(Operation.BROADCAST, [arrays[root]] if rank == root else [], dtype, root) for rank in range(size)]
        for result in world.run(calls, [inputs[root] if rank == root else [] for rank in range(size)]):
            assert result[0].tobytes() == wanted[root]
        assert [array.tobytes() for (array,) in inputs] == wanted


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("registered", ["none", "some", "all"])
@pytest.mark.parametrize("seed", range(4))
def test_parts_of_any_sizes_go_where_they_belong(size, registered, seed):
    dtype = DType.INT32
    with SharedWorld(size, seed) as world:
        shapes = [[(world.chance.choice([0, 2, 30, 150]),) for _ in range(size)] for _ in range(size)]
        parts = [[values(dtype, shape, rank, item) for item, shape in enumerate(row)] for rank, row in enumerate(shapes)]
        inputs = [placed(world, rank, row, registered) for rank, row in enumerate(parts)]
        results = world.run([call_of(Operation.ALL_TO_ALL, row, dtype) for row in parts], inputs)
        for rank, result in enumerate(results):
            assert [part.tobytes() for part in result] == [row[rank].tobytes() for row in parts]
        root = seed % size
        calls = [call_of(Operation.SCATTER, parts[root] if rank == root else [], dtype, root) for rank in range(size)]
        results = world.run(calls, [inputs[root] if rank == root else [] for rank in range(size)])
        assert [result[0].tobytes() for result in results] == [part.tobytes() for part in parts[root]]


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("registered", ["none", "some", "all"])
@pytest.mark.parametrize(("dtype", "op"), [(DType.FLOAT32, ReduceOp.SUM), (DType.BFLOAT16, ReduceOp.MEAN)], ids=["f32", "bf16"])
def test_reductions_are_the_left_fold(size, registered, dtype, op):
    for seed in range(4):
        with SharedWorld(size, seed) as world:
            counts = [world.chance.choice([0, 3, 64, 65, 333]) for _ in range(size)]
            parts = [[values(dtype, count, rank, item) for item, count in enumerate(counts)] for rank in range(size)]
            raw = [[np.ascontiguousarray(part).view(dtype.storage) for part in row] for row in parts]
            inputs = [placed(world, rank, row, registered) for rank, row in enumerate(raw)]
            results = world.run([call_of(Operation.REDUCE_SCATTER, raw[0], dtype, op=op)] * size, inputs)
            for rank, result in enumerate(results):
                assert result[0].tobytes() == reduced([row[rank] for row in parts], op, dtype).tobytes()
            root = seed % size
            for item in range(size):
                call = call_of(Operation.REDUCE, [raw[0][item]], dtype, root, op)
                into = [[row[item]] if rank == root else None for rank, row in enumerate(inputs)]
                if seed % 2:  # in place at the root
                    results = world.run([call] * size, [[row[item]] for row in inputs], into)
                    inputs[root][item] = inputs[root][item].copy()
                    inputs[root][item][...] = raw[root][item]
                else:
                    results = world.run([call] * size, [[row[item]] for row in inputs])
                assert results[root][0].tobytes() == reduced([row[item] for row in parts], op, dtype).tobytes()


def test_a_round_of_a_part_that_would_take_too_many_is_larger(monkeypatch):
    monkeypatch.setattr(exchange, "_PART_ROUNDS_MAX", 4)
    with SharedWorld(2) as world:
        array = values(DType.UINT8, 5000, 0)
        calls = [call_of(Operation.BROADCAST, [array] if rank == 0 else [], DType.UINT8, 0) for rank in range(2)]
        root, reader = (world.begin(rank, call, [array] if rank == 0 else [], number=1) for rank, call in enumerate(calls))
        progress = set()
        while not (root.over and reader.over):
            root.advance()
            reader.advance()
            progress.add(reader.channel.block[LEFT])
        assert reader.results[0].tobytes() == array.tobytes()
        assert len(progress) <= 5


def test_a_rank_lays_out_as_many_rounds_as_there_are_slots_whoever_has_not_come():
    """Rank 2 of a gather, which reads nothing of rank 1's; the root waits for it, so there it ends until it comes."""
    with SharedWorld(3) as world:
        array = values(DType.FLOAT32, 1000, 1)
        call = call_of(Operation.GATHER, [array], DType.FLOAT32, 0)
        root, sender = (world.begin(rank, call, [array], number=1) for rank in range(2))
        world.arenas[2].bank(0)
        assert not world.advance([root, sender], limit=500)
        assert sender.channel.block[STAGED] & ((1 << CHUNK_BITS) - 1) == exchange.SLOTS
        third = world.begin(2, call, [array], number=1)
        assert world.advance([root, sender, third])
        assert [part.tobytes() for part in root.results] == [array.tobytes()] * 3


def stopped(world: SharedWorld, parts: list[Running], turns: int) -> None:
    for _ in range(turns):
        world.chance.choice(parts).advance()


def test_nobody_completes_with_what_an_owner_that_failed_in_between_brought():
    """Rank 1's ring may hold anything from then on."""
    failed = 0
    for seed in range(40):
        with SharedWorld(2, seed) as world:
            array = np.ones(500, np.float32)
            call = call_of(Operation.ALL_GATHER, [array], DType.FLOAT32)
            first, second = (world.begin(rank, call, [array], number=1) for rank in range(2))
            stopped(world, [first, second], world.chance.randrange(3, 40))
            if second.over or not second.channel.ring.size:
                continue
            failed += 1
            second.steps.close()
            second.channel.poison()
            second.channel.ring[37 * 8 :] = 77
            world.advance([first], limit=1000)
            assert first.results is None or (first.results[1] == 1.0).all()
    assert failed > 10


def test_a_ring_that_lies_outside_its_owners_memory_is_refused():
    with SharedWorld(2) as world:
        array = np.ones(500, np.float32)
        calls = [call_of(Operation.BROADCAST, [array] if rank == 1 else [], DType.FLOAT32, 1) for rank in range(2)]
        reader, root = (world.begin(rank, call, [array] if rank == 1 else [], number=1) for rank, call in enumerate(calls))
        root.advance()
        table = root.channel.ring[: 36 * 8].view(np.int64)
        assert table[35] == 1
        table[0] = world.segments[1].size_bytes - 32
        world.advance([reader], limit=500)
        assert isinstance(reader.error, CodecError)


@pytest.mark.parametrize("late", [0, 1])
def test_another_call_is_told_in_the_midst_of_rounds(late):
    array = np.ones(500, np.float32)
    gather = call_of(Operation.ALL_GATHER, [array], DType.FLOAT32)
    with SharedWorld(2) as world:
        calls = [gather, all_reduce_call(DType.FLOAT32, 500)]
        running = {}
        for rank in (1 - late, late):
            running[rank] = world.begin(rank, calls[rank], [array], number=1)
            for _ in range(5):
                running[rank].advance()
        world.advance(list(running.values()), limit=2000)
        errors = [part.error for part in running.values() if part.error is not None]
        assert errors
        for error in errors:
            assert isinstance(error, CollectiveMismatchError)
            assert error.signatures == {rank: call.signature for rank, call in enumerate(calls)}


def test_ranks_that_only_send_much_to_each_other_learn_that_they_differ():
    array, barrier = np.ones(500, np.float32), Call(Operation.BARRIER)
    with SharedWorld(2) as world:
        first = [
            world.begin(rank, call_of(Operation.BROADCAST, [array], DType.FLOAT32, rank), [array], number=1)
            for rank in range(2)
        ]
        assert world.advance(first)
        second = [world.begin(rank, barrier, [], number=2) for rank in range(2)]
        world.advance(second, limit=500)
        errors = [part.error for part in (*first, *second) if part.error is not None]
        assert errors
        assert all(isinstance(error, CollectiveMismatchError) for error in errors)


@pytest.mark.parametrize("operation", [Operation.ALL_GATHER, Operation.ALL_TO_ALL, Operation.BROADCAST])
def test_large_moves_take_no_more_memory_than_a_ring(operation, monkeypatch):
    monkeypatch.setattr(exchange, "RING_BYTES", RING_BYTES)
    monkeypatch.setattr(exchange, "SLOTS", SLOTS)
    with SharedWorld(2) as world:
        arrays = [values(DType.FLOAT64, (3 << 17,), 0, item) for item in range(2 if operation is Operation.ALL_TO_ALL else 1)]
        root = 0 if operation is Operation.BROADCAST else None
        calls = [call_of(operation, [] if root == 1 - rank else arrays, DType.FLOAT64, root) for rank in range(2)]
        running = [world.begin(rank, call, arrays if call.inputs else [], number=1) for rank, call in enumerate(calls)]
        used = 0
        while not all(part.over for part in running):
            world.chance.choice(running).advance()
            used = max(used, *(segment.used_bytes for segment in world.segments))
        assert [part.error for part in running] == [None, None]
        assert RING_BYTES < used <= RING_BYTES + 4 * SLOT_BYTES + (16 << 10)
