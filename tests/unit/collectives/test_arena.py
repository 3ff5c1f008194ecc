"""Collectives in shared memory: right results from every interleaving, nothing read that may have changed, clear errors."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from ferrorpc.collectives.arena.all_reduce import CHUNK_BYTES, RING_CHUNKS, OneShot, TwoShot
from ferrorpc.collectives.arena.arena import PROGRAM_CHANNELS
from ferrorpc.collectives.arena.control_blocks import (
    BLOCK_BYTES,
    BLOCK_PAGE_BYTES,
    DIRECTORY_ENTRIES,
    NOTES,
    RING,
    SLOT_BYTES,
    TEXT,
    directory_of,
)
from ferrorpc.collectives.arena.select import prepare
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.errors import CollectiveMismatchError, GroupClosedError, LimitExceededError, UsageError
from ferrorpc.testing.reference import every_dtype, operators, reduced, values
from ferrorpc.types import DType, ReduceOp, TensorSpec
from ferrorpc.wire.frames import Key
from tests.unit.collectives.shared_world import Running, SharedWorld, all_reduce_call, own

WORLDS = [2, 3, 4, 8]
BARRIER = Call(Operation.BARRIER)


def stored(array: np.ndarray, dtype: DType) -> np.ndarray:
    return np.ascontiguousarray(array).view(dtype.storage)


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("dtype", every_dtype(), ids=lambda dtype: dtype.label)
def test_all_reduce_is_the_left_fold_for_every_dtype_and_operator(size, dtype):
    with SharedWorld(size) as world:
        for op in operators(dtype):
            for count in (0, 1, 7, 1000):
                arrays = [values(dtype, count, rank, salt=count) for rank in range(size)]
                expected = stored(reduced(arrays, op, dtype), dtype)
                calls = [all_reduce_call(dtype, count, op)] * size
                for result in world.run(calls, [[stored(array, dtype)] for array in arrays]):
                    assert result[0].tobytes() == expected.tobytes()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("registered", ["none", "source", "result", "both", "in place", "mixed"])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.INT8], ids=lambda dtype: dtype.label)
def test_large_all_reduce_from_any_memory_into_any(size, registered, dtype):
    for seed in range(6):
        with SharedWorld(size, seed) as world:
            for count in (1, size, 63, 64, 65, 777):
                arrays = [values(dtype, count, rank, salt=seed) for rank in range(size)]
                expected = reduced(arrays, ReduceOp.MEAN if dtype.is_half else ReduceOp.SUM, dtype)
                call = all_reduce_call(dtype, count, ReduceOp.MEAN if dtype.is_half else ReduceOp.SUM)
                inputs, outputs = [], []
                for rank, array in enumerate(arrays):
                    empty = world.memories[rank].own.empty
                    how = ["source", "result", "both"][rank % 3] if registered == "mixed" else registered
                    source = array.copy()
                    if how in ("source", "both", "in place"):
                        source = empty((count,), dtype.storage)
                        source[:] = array
                    inputs.append([source])
                    result = empty((count,), dtype.storage) if how in ("result", "both") else np.empty_like(array)
                    outputs.append([source if how == "in place" else result])
                results = world.run([call] * size, inputs, outputs)
                for rank in range(size):
                    assert results[rank][0] is outputs[rank][0]
                    assert results[rank][0].tobytes() == expected.tobytes(), f"seed {seed}, {count} elements, rank {rank}"
                    if registered != "in place":
                        assert inputs[rank][0].tobytes() == arrays[rank].tobytes()


@pytest.mark.parametrize(("size", "limit"), [(1, SLOT_BYTES), (2, SLOT_BYTES), (16, 64 << 10)])
def test_which_form_runs_is_decided_by_size_and_ranks(size, limit):
    with SharedWorld(size) as world:
        arena = world.arenas[0]
        assert isinstance(prepare(arena, all_reduce_call(DType.UINT8, limit)), OneShot)
        assert isinstance(prepare(arena, all_reduce_call(DType.UINT8, limit + 1)), TwoShot)


def test_what_only_messages_can_do_is_left_to_them():
    with SharedWorld(2) as world:
        arena = world.arenas[0]
        compressed = Call(Operation.ALL_REDUCE, (TensorSpec(DType.FLOAT32, (8,)),), ReduceOp.SUM, wire="bf16")
        assert prepare(arena, compressed) is None
        ring = Call(Operation.ALL_REDUCE, (TensorSpec(DType.FLOAT32, (8,)),), ReduceOp.SUM, algorithm="ring")
        assert prepare(arena, ring) is None


def test_above_sixteen_ranks_reductions_keep_the_order_that_messages_have():
    with SharedWorld(17) as world:
        assert prepare(world.arenas[0], all_reduce_call(DType.FLOAT32, 8)) is None
        assert prepare(world.arenas[0], Call(Operation.BARRIER)) is not None


# -- moves -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("registered", [False, True])
def test_moves_bring_what_was_sent_in_its_shape(size, registered):
    arrays = [values(DType.COMPLEX64, (rank, 3), rank) for rank in range(size)]
    with SharedWorld(size) as world:
        place = own if registered else lambda world, rank, array: array.copy()
        inputs = [[place(world, rank, array)] for rank, array in enumerate(arrays)]
        specs = [(TensorSpec(DType.COMPLEX64, array.shape),) for array in arrays]
        for result in world.run([Call(Operation.ALL_GATHER, spec) for spec in specs], inputs):
            assert [part.tobytes() for part in result] == [array.tobytes() for array in arrays]
            assert [part.shape for part in result] == [array.shape for array in arrays]
        root = size - 1
        gathered = world.run([Call(Operation.GATHER, spec, root=root) for spec in specs], inputs)
        assert [part.tobytes() for part in gathered[root]] == [array.tobytes() for array in arrays]
        assert gathered[0] == []
        calls = [Call(Operation.BROADCAST, specs[root] if rank == root else (), root=root) for rank in range(size)]
        sent = world.run(calls, [inputs[root] if rank == root else [] for rank in range(size)])
        assert all(result[0].tobytes() == arrays[root].tobytes() for result in sent)


@pytest.mark.parametrize("size", WORLDS)
def test_parts_go_where_they_belong(size):
    parts = [[values(DType.INT32, (rank + target, 2), rank, target) for target in range(size)] for rank in range(size)]
    specs = [tuple(TensorSpec(DType.INT32, part.shape) for part in row) for row in parts]
    with SharedWorld(size) as world:
        results = world.run([Call(Operation.ALL_TO_ALL, row) for row in specs], parts)
        for rank, result in enumerate(results):
            assert [part.tobytes() for part in result] == [parts[source][rank].tobytes() for source in range(size)]
        calls = [Call(Operation.SCATTER, specs[1] if rank == 1 else (), root=1) for rank in range(size)]
        results = world.run(calls, [parts[1] if rank == 1 else [] for rank in range(size)])
        assert [result[0].tobytes() for result in results] == [part.tobytes() for part in parts[1]]


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("registered", [False, True])
def test_reductions_to_one_rank_are_the_left_fold(size, registered):
    counts = [rank * 5 for rank in range(size)]
    parts = [[values(DType.BFLOAT16, count, rank, count) for count in counts] for rank in range(size)]
    specs = tuple(TensorSpec(DType.BFLOAT16, (count,)) for count in counts)
    with SharedWorld(size) as world:
        place = own if registered else lambda world, rank, array: array.copy()
        inputs = [[place(world, rank, stored(part, DType.BFLOAT16)) for part in row] for rank, row in enumerate(parts)]
        results = world.run([Call(Operation.REDUCE_SCATTER, specs, ReduceOp.MEAN)] * size, inputs)
        for rank, result in enumerate(results):
            assert result[0].tobytes() == reduced([row[rank] for row in parts], ReduceOp.MEAN, DType.BFLOAT16).tobytes()
        call = Call(Operation.REDUCE, specs[-1:], ReduceOp.SUM, root=1)
        results = world.run([call] * size, [row[-1:] for row in inputs])
        assert results[1][0].tobytes() == reduced([row[-1] for row in parts], ReduceOp.SUM, DType.BFLOAT16).tobytes()
        assert results[0] == []


@pytest.mark.parametrize("given", [np.zeros(4, np.float64), np.zeros(5, np.float32)], ids=["dtype", "shape"])
def test_what_does_not_fit_is_not_written_to_what_was_given(given):
    with SharedWorld(2) as world:
        calls = [Call(Operation.BROADCAST, (TensorSpec(DType.FLOAT32, (4,)),), root=0), Call(Operation.BROADCAST, root=0)]
        results = world.run(calls, [[np.ones(4, np.float32)], []], [None, [given]])
        assert results[1][0].tolist() == [1.0] * 4
        assert not given.any()


# -- order -----------------------------------------------------------------------------------------------------------------


def test_operations_of_different_channels_overtake_each_other():
    for seed in range(50):
        with SharedWorld(3, seed) as world:
            calls = [all_reduce_call(DType.INT64, 10 * (number + 1)) for number in range(4)]
            for arena in world.arenas:
                arena.open_stream(1, 4)
            running = []
            for rank in range(3):
                numbers = list(range(4))
                world.chance.shuffle(numbers)
                for number in numbers:
                    source = np.full(10 * (number + 1), rank + number, np.int64)
                    running.append((number, world.begin(rank, calls[number], [source], number=number, stream=1)))
            assert world.advance([part for _, part in running])
            for number, part in running:
                assert part.error is None
                assert (part.results[0] == 3 + 3 * number).all()


def test_a_promise_about_order_that_is_not_kept_is_an_error():
    with SharedWorld(2) as world:
        world.arenas[0].open_stream(1, 4)
        call, array = all_reduce_call(DType.INT64, 2), np.zeros(2, np.int64)
        world.begin(0, call, [array], number=6, stream=1)
        world.begin(0, call, [array], number=1, stream=1)
        for number in (2, 6):
            with pytest.raises(UsageError, match=f"operation {number} of this stream starts after operation 6"):
                world.begin(0, call, [array], number=number, stream=1)


def test_a_rank_that_is_many_operations_ahead_waits_and_nothing_is_overwritten():
    """Rank 1 may run ahead of rank 0 by as many broadcasts as there are channels, then waits."""
    with SharedWorld(2) as world:
        count = 3 * PROGRAM_CHANNELS
        sent = [np.full(100, number, np.int32) for number in range(count)]
        call = Call(Operation.BROADCAST, (TensorSpec(DType.INT32, (100,)),), root=1)
        ahead = [world.begin(1, call, [array], number=number + 1) for number, array in enumerate(sent)]
        # The channels' control blocks must be known to both before anybody can run ahead.
        behind = [world.begin(0, Call(Operation.BROADCAST, root=1), [], number=1)]
        assert not world.advance(ahead, limit=20_000)
        assert sum(part.over for part in ahead) <= PROGRAM_CHANNELS
        behind += [world.begin(0, Call(Operation.BROADCAST, root=1), [], number=number + 1) for number in range(1, count)]
        assert world.advance(ahead + behind)
        for array, part in zip(sent, behind, strict=True):
            assert (part.results[0] == array).all()


def test_an_operation_waits_for_its_own_ranks_part_of_the_one_before_it_on_the_channel():
    """A blocking call comes round to the channel of an asynchronous one that the progress thread has not looked at lately."""
    with SharedWorld(2) as world:
        call, ones = all_reduce_call(DType.FLOAT32, 4), np.ones(4, np.float32)
        first, theirs = (world.begin(rank, call, [ones * (1 + rank)], number=1) for rank in range(2))
        first.advance()
        assert world.advance([theirs])
        assert not first.over
        second = world.begin(0, call, [ones * 100], number=1 + PROGRAM_CHANNELS)
        assert not world.advance([second], limit=100)
        assert world.advance([first])
        assert first.results[0].tolist() == [3.0] * 4


def test_different_calls_are_a_mismatch_with_both_signatures():
    with SharedWorld(2) as world:
        sum_call, max_call = all_reduce_call(DType.FLOAT32, 4), all_reduce_call(DType.FLOAT32, 4, ReduceOp.MAX)
        array = np.zeros(4, np.float32)
        running = [world.begin(0, sum_call, [array], number=1), world.begin(1, max_call, [array], number=1)]
        assert world.advance(running)
        for part in running:
            assert isinstance(part.error, CollectiveMismatchError)
            assert part.error.signatures == {0: sum_call.signature, 1: max_call.signature}


@pytest.mark.parametrize(
    "calls",
    [
        (all_reduce_call(DType.FLOAT32, 4), all_reduce_call(DType.FLOAT32, 4, ReduceOp.MAX)),
        (all_reduce_call(DType.FLOAT32, 100_000), all_reduce_call(DType.FLOAT32, 100_000, ReduceOp.MAX)),
        (Call(Operation.BARRIER), Call(Operation.BARRIER, note="another")),
        (Call(Operation.ALL_GATHER, (TensorSpec(DType.FLOAT32, (4,)),)), Call(Operation.BARRIER)),
    ],
    ids=["one shot", "two shot", "barrier", "exchange"],
)
def test_a_mismatch_is_of_its_own_operation_whatever_waits_for_its_channel(calls):
    with SharedWorld(2) as world:
        inputs = [[np.zeros(spec.shape, spec.dtype.storage) for spec in call.inputs] for call in calls]
        running = [world.begin(rank, call, inputs[rank], number=1) for rank, call in enumerate(calls)]
        for rank in range(2):
            world.begin(rank, Call(Operation.BARRIER), [], number=1 + PROGRAM_CHANNELS)
        world.advance(running, limit=1000)
        errors = [part.error for part in running if part.error is not None]
        assert errors
        for error in errors:
            assert isinstance(error, CollectiveMismatchError)
            assert error.signatures == {rank: call.signature for rank, call in enumerate(calls)}
            assert error.fields["number"] == 1


def test_a_mismatch_does_not_accuse_a_rank_that_is_not_there_yet():
    """What stands in its control block is of an operation long over."""
    with SharedWorld(3) as world:
        for number in range(1, PROGRAM_CHANNELS + 1):
            assert world.advance([world.begin(rank, Call(Operation.BARRIER), [], number=number) for rank in range(3)])
        sum_call, max_call = all_reduce_call(DType.FLOAT32, 4), all_reduce_call(DType.FLOAT32, 4, ReduceOp.MAX)
        array = np.zeros(4, np.float32)
        running = [world.begin(1, max_call, [array], number=PROGRAM_CHANNELS + 1)]
        assert not world.advance(running, limit=100)
        running.append(world.begin(0, sum_call, [array], number=PROGRAM_CHANNELS + 1))
        world.advance(running, limit=1000)
        errors = [part.error for part in running if part.error is not None]
        assert errors
        for error in errors:
            assert isinstance(error, CollectiveMismatchError)
            assert error.signatures == {0: sum_call.signature, 1: max_call.signature}


def test_barrier_lets_nobody_through_before_all_are_there():
    with SharedWorld(3) as world:
        running = [world.begin(rank, Call(Operation.BARRIER), [], number=1) for rank in range(2)]
        assert not world.advance(running, limit=1000)
        assert not any(part.over for part in running)
        assert world.advance([*running, world.begin(2, Call(Operation.BARRIER), [], number=1)])


@pytest.fixture
def little_garbage():
    """What other tests have left on the heap is not looked through at each collection, here and until the end of the file."""
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("little_garbage")
@pytest.mark.parametrize("whole", [False, True], ids=["stream", "group"])
@pytest.mark.parametrize("count", [8, 100_000], ids=["slots", "rings"])
def test_a_stream_that_is_over_gives_its_memory_to_the_next(count, whole):
    call, ones = all_reduce_call(DType.FLOAT32, count), np.ones(count, np.float32)
    with SharedWorld(2) as world:
        used = []
        kept = [prepare(arena, call) for arena in world.arenas]
        for stream in range(1, 12):
            running = []
            for rank, prepared in enumerate(kept):
                running.append(Running(prepared, world.arenas[rank].bank(stream), 0, [ones]))
            assert world.advance(running)
            assert all((part.results[0] == 2).all() for part in running)
            for arena in world.arenas:
                arena.close() if whole else arena.let_go(stream)
            del running
            gc.collect()
            used.append([memory.own.used_bytes for memory in world.memories])
        assert used[-1] == used[1]
        assert all(len(arena.control._banks) <= 2 for arena in world.arenas)


def test_streams_that_were_opened_and_never_used_are_freed_too():
    with SharedWorld(2) as world:
        arena = world.arenas[0]
        for stream in range(1, 2 * BLOCK_PAGE_BYTES // BLOCK_BYTES // PROGRAM_CHANNELS):
            arena.open_stream(stream, PROGRAM_CHANNELS)
            arena.bank(stream)
            arena.let_go(stream)
        used = world.memories[0].own.used_bytes
        assert used <= 3 * (BLOCK_PAGE_BYTES + PROGRAM_CHANNELS * SLOT_BYTES), "more than control blocks is kept"
        assert len(arena.control._banks) <= 2
        assert not arena._channels


def test_signatures_that_control_blocks_name_outlive_their_stream():
    call, ones = all_reduce_call(DType.FLOAT32, 8), np.ones(8, np.float32)
    with SharedWorld(2) as world:
        assert world.advance([world.begin(rank, call, [ones], number=0, stream=1) for rank in range(2)])
        arena = world.arenas[0]
        offset = arena.bank(1).channels[0].block[TEXT]
        arena.let_go(1)
        arena.bank(2)
        gc.collect()
        assert arena.control.allocate(8)[0] != offset
        assert world.arenas[1].control.read_text(0, offset) == call.signature


@pytest.fixture
def no_collector():
    """Memory is given back by reference counts alone."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("count", [8, 100_000], ids=["slots", "rings"])
@pytest.mark.parametrize("operation", [Operation.ALL_REDUCE, Operation.ALL_GATHER])
def test_closed_control_blocks_keep_their_memory_for_operations_in_flight_only(operation, count):
    spec, ones = TensorSpec(DType.FLOAT32, (count,)), np.ones(count, np.float32)
    call = Call(operation, (spec,), ReduceOp.SUM if operation is Operation.ALL_REDUCE else None)
    with SharedWorld(2) as world:
        arena = world.arenas[0]
        assert world.advance([world.begin(rank, call, [ones], number=1) for rank in range(2)])
        running = [world.begin(rank, call, [ones], number=2) for rank in range(2)]
        kept = running[0].prepared
        assert not world.advance(running[:1], limit=50)
        arena.control.close()
        arena.control.close()
        assert world.advance(running)
        assert all((part.results[0] == (2 if call.op else 1)).all() for part in running)
        assert world.memories[0].own.used_bytes
        del running
        assert not world.memories[0].own.used_bytes
        for begin in (lambda: kept.claim(arena.bank(0), 3), lambda: arena.bank(5), lambda: prepare(arena, BARRIER)):
            with pytest.raises(GroupClosedError):
                begin()
        assert arena.entered(Key(0, 0, 2)).signature is None


@pytest.mark.usefixtures("no_collector")
def test_what_peers_may_still_read_of_closed_control_blocks_stays_as_it_was():
    """A slow peer may be copying a result when this rank, which needs nothing more, is interrupted or leaves."""
    call, ones = all_reduce_call(DType.FLOAT32, 1 << 18), np.ones(1 << 18, np.float32)
    with SharedWorld(2) as world:
        running = [world.begin(rank, call, [ones], number=1) for rank in range(2)]
        assert world.advance(running)
        seen = world.memories[1].memory(0)[running[0].channel.block[RING] :][: RING_CHUNKS * CHUNK_BYTES]
        kept = seen.copy()
        assert kept.any()
        del running
        world.arenas[0].control.close()
        assert not world.memories[0].own.used_bytes
        assert (seen == kept).all()


@pytest.mark.usefixtures("no_collector")
def test_closed_control_blocks_forget_calls_that_were_still_to_be_compared():
    with SharedWorld(2) as world:
        spec, ones = TensorSpec(DType.FLOAT32, (8,)), np.ones(8, np.float32)
        for rank in range(2):
            world.arenas[rank].bank(0)
        sent = world.begin(0, Call(Operation.BROADCAST, (spec,), root=0), [ones], number=1)
        assert world.advance([sent])
        assert world.arenas[0].bank(0).pending_checks
        world.arenas[0].control.close()
        del sent
        assert not world.memories[0].own.used_bytes


def test_what_a_peer_still_reads_is_not_given_away():
    call, ones = all_reduce_call(DType.FLOAT32, 8), np.ones(8, np.float32)
    with SharedWorld(2) as world:
        first, second = (world.begin(rank, call, [ones * (1 + rank)], number=0, stream=1) for rank in range(2))
        second.advance()
        while not first.over:
            first.advance()
        assert not second.over
        world.arenas[0].let_go(1)
        del first
        gc.collect()
        control = world.arenas[0].control
        control.bank(0, 2, (0, 1), 1)
        control.allocate(control.host_peers.own.size_bytes // 2)[1][: 4 << 20] = 0xFF
        assert world.advance([second])
        assert second.results[0].tolist() == [3.0] * 8
        before = control.host_peers.own.used_bytes
        control.bank(0, 3, (0, 1), 1)
        gc.collect()
        assert control.host_peers.own.used_bytes < before


def test_the_directory_says_when_it_is_full():
    with SharedWorld(2) as world:
        control = world.arenas[0].control
        directory_of(world.segments[0].memory)[0] = DIRECTORY_ENTRIES
        with pytest.raises(LimitExceededError, match="streams and subgroups"):
            control.bank(5, 5, (0, 1), 1)


def test_lines_have_room_for_every_word():
    assert BLOCK_BYTES % 64 == 0


def taken(world: SharedWorld, calls: list[Call], inputs) -> list[list[int]]:
    """Bytes that each rank (row) has given to each other (column) in one operation."""
    before = [arena.control.calls.taken_bytes() for arena in world.arenas]
    world.run(calls, inputs)
    gc.collect()  # calls that are gone count as before
    after = [arena.control.calls.taken_bytes() for arena in world.arenas]
    return [[now.get(peer, 0) - was.get(peer, 0) for peer in range(world.size)] for now, was in zip(after, before, strict=True)]


def test_what_peers_take_is_counted_as_sent_to_them() -> None:
    with SharedWorld(3) as world:
        large = SLOT_BYTES // 4 + 3
        small, big = np.ones(6, np.float32), np.ones(large, np.float32)
        assert taken(world, [all_reduce_call(DType.FLOAT32, 6)] * 3, [[small]] * 3) == [[0, 24, 24], [24, 0, 24], [24, 24, 0]]
        cuts = [size * 4 for size in (large // 3 + (large % 3 > rank) for rank in range(3))]
        folds = [[0 if rank == peer else cuts[rank] + cuts[peer] for peer in range(3)] for rank in range(3)]
        assert taken(world, [all_reduce_call(DType.FLOAT32, large)] * 3, [[big]] * 3) == folds
        spec = TensorSpec(DType.FLOAT32, (6,))
        from_one = [Call(Operation.BROADCAST, (spec,) if rank == 1 else (), root=1) for rank in range(3)]
        assert taken(world, from_one, [[], [small], []]) == [[0, 0, 0], [24, 0, 24], [0, 0, 0]]
        to_one = [Call(Operation.GATHER, (spec,), root=2)] * 3
        assert taken(world, to_one, [[small]] * 3) == [[0, 0, 24], [0, 0, 24], [0, 0, 0]]
        parts = [np.ones(count, np.float32) for count in (1, 2, 3)]
        each = Call(Operation.ALL_TO_ALL, tuple(TensorSpec(DType.FLOAT32, part.shape) for part in parts))
        assert taken(world, [each] * 3, [parts] * 3) == [[0, 8, 12], [4, 0, 12], [4, 8, 0]]
        assert taken(world, [Call(Operation.BARRIER)] * 3, [[]] * 3) == [[0] * 3] * 3


def test_what_peers_take_counts_while_the_call_may_be_run_again() -> None:
    with SharedWorld(2) as world:
        call, array = all_reduce_call(DType.FLOAT32, 6), np.ones(6, np.float32)
        running = [world.begin(rank, call, [array], number=1) for rank in range(2)]
        assert world.advance(running)
        assert [arena.control.calls.taken_bytes() for arena in world.arenas] == [{1: 24}, {0: 24}]
        assert all(part.prepared.runs == 1 for part in running)


def test_signatures_take_memory_only_as_long_as_they_can_be_read() -> None:
    """A job may reduce arrays of a new size in every step."""
    with SharedWorld(2) as world:
        used = []
        for count in range(1, 60):
            world.run([all_reduce_call(DType.INT8, count)] * 2, [[np.ones(count, np.int8)]] * 2)
            gc.collect()
            used.append(world.segments[0].used_bytes)
        assert used[-1] == used[PROGRAM_CHANNELS]
        to_root = Call(Operation.GATHER, (TensorSpec(DType.INT8, (3,)),), root=1)
        world.run([to_root] * 2, [[np.ones(3, np.int8)]] * 2)
        gc.collect()
        for number in range(99):  # they would take the memory of a signature that nobody holds
            world.arenas[0].control.sign(f"another({number})")
        channel = world.arenas[0].bank(0).channels[world.number % PROGRAM_CHANNELS]
        for text in (TEXT, NOTES[0] + 2):
            assert world.arenas[1].control.read_text(0, channel.block[text]) == "gather(int8, root=1)"
