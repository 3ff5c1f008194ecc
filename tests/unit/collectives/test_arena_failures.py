"""Collectives in shared memory where a rank fails or says what cannot be: nothing is read that may have changed."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from ferrorpc.collectives.arena import control_blocks
from ferrorpc.collectives.arena.arena import PROGRAM_CHANNELS
from ferrorpc.collectives.arena.control_blocks import DIRECTORY_ENTRIES, REDUCED, RING, SLOT_BYTES, SOURCE, STAGED, directory_of
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.errors import CodecError
from ferrorpc.types import DType, ReduceOp, TensorSpec
from tests.interrupts import was_struck
from tests.unit.collectives.shared_world import Running, SharedWorld, all_reduce_call, own

MORE_THAN_A_SLOT = SLOT_BYTES // 4
"""Elements of four bytes that with their table take more than a slot."""


@pytest.mark.usefixtures("small_chunks")
def test_nobody_completes_with_what_a_failed_rank_may_have_changed():
    """Rank 1 gives up after it has staged registered memory; its caller then writes to the array."""
    staged = 0
    for seed in range(30):
        with SharedWorld(2, seed) as world:
            call = all_reduce_call(DType.FLOAT32, 500)
            array = own(world, 1, np.ones(500, np.float32))
            first = world.begin(0, call, [np.ones(500, np.float32)], number=1)
            second = world.begin(1, call, [array], [array], number=1)
            for _ in range(world.chance.randrange(2, 12)):
                second.advance()
                first.advance()
            if second.over:
                continue
            staged += second.channel.block[STAGED] > 0
            second.steps.close()
            second.channel.poison()
            array[:] = 777.0
            world.advance([first], limit=2000)
            assert first.results is None or (first.results[0] == 2.0).all()
    assert staged > 5


def fail(part: Running, array: np.ndarray) -> None:
    """Its rank gives up, and its caller writes to its array."""
    part.steps.close()
    part.channel.poison()
    array[:] = 777.0


def test_nobody_completes_with_what_a_failed_rank_may_have_changed_since_it_was_found():
    """Rank 0 knows where rank 1's array lies and waits for rank 2 when rank 1 fails."""
    with SharedWorld(3) as world:
        ones = np.ones(MORE_THAN_A_SLOT, np.float32)
        arrays = [ones, own(world, 1, ones), ones]
        call = Call(Operation.ALL_GATHER, (TensorSpec(DType.FLOAT32, ones.shape),))
        first, second, third = (world.begin(rank, call, [array], number=1) for rank, array in enumerate(arrays))
        second.advance()
        first.advance()
        fail(second, arrays[1])
        assert not world.advance([first, third], limit=500)
        assert first.results is third.results is None


@pytest.mark.usefixtures("small_chunks")
def test_nobody_completes_with_a_result_that_a_failed_rank_may_have_changed_since_it_was_reduced():
    with SharedWorld(2) as world:
        call, array = all_reduce_call(DType.FLOAT32, 50), own(world, 1, np.ones(50, np.float32))
        first = world.begin(0, call, [np.ones(50, np.float32)], number=1)
        second = world.begin(1, call, [array], [array], number=1)
        for part in (second, first, second):
            part.advance()
        assert not first.over
        assert second.channel.block[REDUCED] == first.channel.block[REDUCED]
        fail(second, array)
        assert not world.advance([first], limit=500)
        assert first.results is None


@pytest.mark.usefixtures("small_chunks")
def test_a_result_that_others_read_where_it_lies_is_given_out_when_they_have_read_it():
    with SharedWorld(2) as world:
        call, ones = all_reduce_call(DType.FLOAT32, 50), np.ones(50, np.float32)
        first = world.begin(0, call, [ones], [own(world, 0, np.zeros(50, np.float32))], number=1)
        second = world.begin(1, call, [ones], number=1)
        first.advance()
        second.advance()
        assert not world.advance([first], limit=500)
        assert not second.over
        assert world.advance([second])
        assert world.advance([first])
        assert first.results[0].tolist() == second.results[0].tolist() == [2.0] * 50


@pytest.mark.usefixtures("small_chunks")
def test_an_array_that_others_reduce_where_it_lies_is_given_back_before_they_have_read_the_result():
    with SharedWorld(2) as world:
        call, ones = all_reduce_call(DType.FLOAT32, 50), np.ones(50, np.float32)
        array = own(world, 0, ones)
        first = world.begin(0, call, [array], number=1)
        second = world.begin(1, call, [ones], number=1)
        first.advance()
        second.advance()
        assert world.advance([first], limit=500)
        array[:] = 777.0
        assert not second.over
        assert world.advance([second])
        assert first.results[0].tolist() == second.results[0].tolist() == [2.0] * 50


def test_an_array_that_others_read_where_it_lies_is_given_back_when_they_have_read_it():
    with SharedWorld(2) as world:
        array = own(world, 1, np.ones(MORE_THAN_A_SLOT, np.float32))
        call = Call(Operation.BROADCAST, (TensorSpec(DType.FLOAT32, (MORE_THAN_A_SLOT,)),), root=1)
        reader = world.begin(0, Call(Operation.BROADCAST, root=1), [], number=1)
        root = world.begin(1, call, [array], number=1)
        assert not world.advance([root], limit=100)
        assert world.advance([reader, root])
        assert reader.results[0].tolist() == [1.0] * MORE_THAN_A_SLOT


def test_a_small_array_is_given_back_before_others_have_read_it_and_they_get_what_it_was():
    with SharedWorld(2) as world:
        array = own(world, 1, np.ones(4, np.float32))
        call = Call(Operation.BROADCAST, (TensorSpec(DType.FLOAT32, (4,)),), root=1)
        reader = world.begin(0, Call(Operation.BROADCAST, root=1), [], number=1)
        root = world.begin(1, call, [array], number=1)
        assert world.advance([root])
        array[:] = 7
        assert world.advance([reader])
        assert reader.results[0].tolist() == [1.0] * 4


# -- what a peer may get wrong ----------------------------------------------------------------------------------------------


def line_of(world: SharedWorld, rank: int, number: int):
    return world.arenas[rank].bank(0).channels[number % PROGRAM_CHANNELS].block


@pytest.mark.parametrize("offset", [-1, 1 << 62, (64 << 20) - 8])
def test_a_place_outside_a_peers_memory_is_refused(offset, small_chunks):
    with SharedWorld(2) as world:
        call = all_reduce_call(DType.FLOAT32, 500)
        array = np.ones(500, np.float32)
        running = [world.begin(rank, call, [array], number=1) for rank in range(2)]
        running[1].advance()
        assert line_of(world, 1, 1)[RING]
        line_of(world, 1, 1)[SOURCE] = offset
        world.advance(running[:1], limit=2000)
        assert isinstance(running[0].error, CodecError)


def table_of(world: SharedWorld, rank: int, number: int):
    """Where a rank's operation describes its first part."""
    start = line_of(world, rank, number)[SOURCE]
    return world.segments[rank].memory[start : start + 35 * 8].view(np.int64)


@pytest.mark.parametrize("count", [10, MORE_THAN_A_SLOT])
@pytest.mark.parametrize(("word", "value"), [(1, 99), (2, 33), (2, -1), (3, -5), (0, 1 << 61)])
def test_a_table_that_no_rank_writes_is_refused(word, value, count):
    with SharedWorld(2) as world:
        call = Call(Operation.BROADCAST, (TensorSpec(DType.INT32, (count,)),), root=1)
        running = [
            world.begin(0, Call(Operation.BROADCAST, root=1), [], number=1),
            world.begin(1, call, [np.zeros(count, np.int32)], number=1),
        ]
        assert world.advance(running[1:])
        table_of(world, 1, 1)[word] = value
        world.advance(running[:1], limit=2000)
        assert isinstance(running[0].error, CodecError)


@pytest.mark.parametrize("count", [10, MORE_THAN_A_SLOT])
def test_a_part_of_another_shape_than_the_reductions_is_refused(count):
    with SharedWorld(2) as world:
        spec, array = TensorSpec(DType.INT32, (count,)), np.zeros(count, np.int32)
        call = Call(Operation.REDUCE, (spec,), ReduceOp.SUM, root=0)
        running = [world.begin(rank, call, [array], number=1) for rank in range(2)]
        assert world.advance(running[1:])
        table_of(world, 1, 1)[3] = 1
        world.advance(running[:1], limit=2000)
        assert isinstance(running[0].error, CodecError)


@pytest.mark.parametrize("count", [DIRECTORY_ENTRIES + 1, 1 << 62, -1])
def test_a_directory_that_claims_to_be_longer_than_any_is_searched_to_its_end(count):
    with SharedWorld(2) as world:
        world.arenas[1].bank(0)
        directory_of(world.segments[1].memory)[0] = count
        assert world.arenas[0].control.find(1, (0, 77), 1) is None


def test_each_entry_of_a_directory_is_read_once(monkeypatch):
    """Else the subgroups that a rank has already made would slow down each new one."""
    read = []

    class Counted:
        def __init__(self, words):
            self._words = words

        def __getitem__(self, place):
            read.append(place)
            return self._words[place]

    with SharedWorld(2) as world:
        mine, theirs = (arena.control for arena in world.arenas)
        monkeypatch.setattr(control_blocks, "directory_of", lambda memory: Counted(directory_of(memory)))
        for stream in range(100):
            assert mine.find(1, (7, stream), 1) is None
            with monkeypatch.context() as writing:
                writing.setattr(control_blocks, "directory_of", directory_of)
                theirs.bank(7, stream, (0, 1), 1)
            for _ in range(2):
                assert mine.find(1, (7, stream), 1) is not None
    assert len(read) <= 100 * (3 + 4)


@pytest.mark.parametrize("length", [-1, 4097, 1 << 62])
def test_the_name_of_a_call_is_read_as_far_as_a_name_can_go(length):
    with SharedWorld(2) as world:
        mine, theirs = (arena.control for arena in world.arenas)
        signature = theirs.sign("barrier()")
        offset = signature.offset
        assert mine.read_text(1, offset) == "barrier()"
        theirs.host_peers.own.memory[offset : offset + 8].view(np.int64)[0] = length
        assert len(mine.read_text(1, offset)) == min(max(length, 0), 4096)


@pytest.mark.parametrize("offset", [0, -8, 4, (64 << 20) - 7, 64 << 20, 1 << 62])
def test_a_name_that_lies_nowhere_is_not_looked_for(offset):
    with SharedWorld(2) as world:
        assert world.arenas[0].control.read_text(1, offset) == "an operation that it does not name"


def test_an_interrupt_while_an_ended_stream_is_freed_keeps_none_of_its_memory_after_the_generation():
    place, struck = 0, True
    while struck:
        place += 1
        with SharedWorld(2) as world:
            call = all_reduce_call(DType.FLOAT32, 10)
            assert world.advance([world.begin(rank, call, [np.ones(10, np.float32)], number=1, stream=1) for rank in (0, 1)])
            arena = world.arenas[0]
            bank = arena.bank(1)  # as a closed subgroup may keep it
            arena.let_go(1)
            struck = was_struck(place, partial(arena.bank, 2), ("control_blocks.py",))
            arena.control.host_peers.own.close = lambda: None  # the world closes it
            arena.control.close()
            assert (bank.channels, bank._places) == ([], {}), place
    assert place > 10
