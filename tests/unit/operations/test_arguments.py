"""What callers pass: results never overwrite what is still to be read, every result lands in the caller's own array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ferrorpc import InvalidRankError, ProcessGroup, SelfSendError, TensorMismatchError, UsageError
from ferrorpc.arrays.kinds import NUMPY
from ferrorpc.collectives.ranks_and_tags import TAG_MAX
from ferrorpc.operations.arguments import Arguments, shape_of
from ferrorpc.testing import run_world

GIVEN = Arguments(False)


def test_an_array_of_several_that_the_result_is_written_to_is_read_from_a_copy() -> None:
    parts = [np.full(4, number, np.float32) for number in range(3)]
    sources = GIVEN.parts(parts, 3)
    GIVEN.one_result(parts[1], NUMPY, sources[0].spec, sources)
    assert [np.shares_memory(source.data, part) for source, part in zip(sources, parts, strict=True)] == [True, False, True]
    assert sources[1].data.tolist() == [1.0] * 4


@pytest.mark.parametrize("shape", [b"ab", "ab", None, -1, (2, 1.5)])
def test_what_is_no_shape_is_refused(shape: Any) -> None:
    with pytest.raises(UsageError, match="is no shape"):
        shape_of(shape)


def test_the_only_array_may_be_the_result() -> None:
    x = np.ones(4, np.float32)
    sources = [GIVEN.view(x)]
    GIVEN.one_result(x, NUMPY, sources[0].spec, sources)
    assert np.shares_memory(sources[0].data, x)


@pytest.mark.parametrize("whole", [False, True], ids=["list", "whole"])
def test_an_array_that_one_of_several_results_is_written_to_is_read_from_a_copy(whole: bool) -> None:
    memory = np.arange(6, dtype=np.float32).reshape(3, 2)
    sources = [GIVEN.view(memory[1:2])]
    GIVEN.list_result(memory if whole else [memory[row : row + 1] for row in range(3)], NUMPY, 3, sources)
    assert not np.shares_memory(sources[0].data, memory)
    assert sources[0].data.tolist() == [[2.0, 3.0]]


def test_a_result_that_overlaps_an_array_in_part_is_refused_wherever_it_stands_in_the_list() -> None:
    memory = np.zeros(6, np.float32)
    with pytest.raises(UsageError, match="overlap"):
        GIVEN.list_result([memory[:3], memory[1:4]], NUMPY, 2, [GIVEN.view(memory[:3])])


@pytest.mark.parametrize(
    "out",
    [
        lambda memory: [memory[0:4], memory[4:8], memory[3:7]],
        lambda memory: [memory[0:4], memory[8:12], memory[3::-1]],
        lambda memory: [memory[0:8:2], memory[1:8:2], memory[2:9:2]],
    ],
    ids=["in part", "backwards", "strided"],
)
def test_results_that_would_overwrite_each_other_are_refused(out: Any) -> None:
    def body(group: ProcessGroup) -> None:
        x, given = np.full(4, group.rank), out(np.zeros(12, int))
        with pytest.raises(UsageError, match="overlap"):
            group.all_gather(x, out=given)
        with pytest.raises(UsageError, match="overlap"):
            group.all_to_all([x] * 3, out=given)
        group.barrier()

    run_world(3, body)


def test_results_that_share_a_matrix_or_have_no_elements_do_not_overlap() -> None:
    matrix = np.zeros((4, 3, 2))
    for out in ([matrix[:, column] for column in range(3)], [matrix[0, 0, :0]] * 2 + [matrix[0, 0, 0:0]]):
        GIVEN.list_result([part[...] for part in out], NUMPY, 3, [])


def test_results_land_in_arrays_that_are_strided() -> None:
    def body(group: ProcessGroup) -> Any:
        memory = np.zeros((2, 3, 2))
        rows = [memory[rank, :, 1] for rank in range(2)]
        assert group.all_gather(np.full(3, 1.0 + group.rank), out=rows) is rows
        parts = group.all_to_all(rows, out=[memory[rank, :, 0] for rank in range(2)])
        assert parts[0].tolist() == [1.0 + group.rank] * 3
        columns = np.zeros((4, 2))[:, 0]
        group.all_gather(np.full(2, 1.0 + group.rank), out=columns)
        assert group.all_reduce(memory[0, :, 1], out=memory[1, :, 0]).tolist() == [2.0] * 3
        return memory.tolist(), columns.tolist()

    for rank, (memory, columns) in enumerate(run_world(2, body)):
        mine = 1.0 + rank
        assert memory == [[[mine, 1.0]] * 3, [[2.0, 2.0]] * 3]
        assert columns == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("out", "message", "hint"),
    [
        (np.zeros((3, 4)), "the part of out for it is float64[2,4]", "pass out=list(rows)"),
        (np.zeros((2, 4)), "the part of out for it is float64[1,4]", "pass out=list(rows)"),
        (np.zeros(8, np.float32), "the part of out for it is float32[4]", "pass one that fits"),
        ([np.zeros((1, 4)), np.zeros((1, 4))], "out is float64[1,4]", "pass one that fits"),
    ],
    ids=["rows", "a row for each", "dtype", "list"],
)
def test_a_part_of_a_single_array_that_does_not_fit_is_not_taken_for_the_array(out: Any, message: str, hint: str) -> None:
    pieces = [np.ones(4)] * 2
    result, specs = GIVEN.list_result(out, NUMPY, 2, []), [GIVEN.view(piece).spec for piece in pieces]
    with pytest.raises(TensorMismatchError) as raised:
        result.give(pieces, specs, "it")
    assert raised.value.message == f"it gave float64[4], but {message}"
    assert hint in raised.value.hint


def test_a_group_of_one_gives_back_arrays_of_their_own() -> None:
    def body(group: ProcessGroup) -> None:
        x = np.ones(4)
        for result in (group.all_reduce(x), group.broadcast(x), group.all_gather(x)[0], group.reduce_scatter([x])):
            assert not np.shares_memory(result, x)
            assert result.flags.owndata
        assert group.all_reduce(x, out=x) is x

    run_world(1, body)


def test_a_call_that_differs_in_its_algorithm_or_codec_alone_is_another_call() -> None:
    """What was prepared for the first is not taken for the second."""

    def body(group: ProcessGroup) -> None:
        x = np.ones(4, np.float32)
        moves = (
            lambda **options: group.broadcast(x, **options),
            lambda **options: group.all_gather(x, **options),
            lambda **options: group.all_to_all([x] * 3, **options),
        )
        reductions = (
            lambda **options: group.all_reduce(x, **options),
            lambda **options: group.reduce(x, **options),
            lambda **options: group.reduce_scatter([x] * 3, **options),
        )
        for call in (*moves, *reductions):
            call()
            with pytest.raises(UsageError, match="has no algorithm 'none'"):
                call(algorithm="none")
        for call in reductions:
            with pytest.raises(UsageError):
                call(wire="none")

    run_world(3, body)


def test_peers_and_tags_that_cannot_be_are_refused_before_anything_is_sent() -> None:
    def body(group: ProcessGroup) -> float:
        mine, other = group.rank, 1 - group.rank
        for call in (lambda: group.send(1.0, mine), lambda: group.recv(mine), lambda: group.expect(mine)):
            with pytest.raises(SelfSendError, match=f"is {mine}, which is this rank itself"):
                call()
        for wrong in (2, -1, 0.0, None, True):
            with pytest.raises(InvalidRankError):
                group.send(1.0, wrong)
        for tag in (TAG_MAX + 1, -1, 1.5, True):
            with pytest.raises(UsageError, match="is no integer from 0"):
                group.send(1.0, other, tag=tag)
        group.send(7.0, other, tag=TAG_MAX)
        return float(group.recv(other, tag=TAG_MAX))

    assert run_world(2, body) == [7.0, 7.0]


def test_streams_tell_operations_apart_that_differ_in_their_root_alone() -> None:
    def body(group: ProcessGroup) -> list[float]:
        stream = group.stream()
        arrays = [np.full(4, float(group.rank)) for _ in range(3)]
        return [stream.broadcast(array, root, root=root).wait()[0] for root, array in enumerate(arrays)]

    assert run_world(3, body) == [[0.0, 1.0, 2.0]] * 3


def test_results_for_another_number_of_ranks_are_refused() -> None:
    def body(group: ProcessGroup) -> None:
        for count in (1, 3):
            with pytest.raises(TensorMismatchError, match=f"out has {count} arrays for 2 ranks"):
                group.all_gather(np.ones(2), out=[np.zeros(2) for _ in range(count)])

    run_world(2, body)


def test_what_is_no_array_is_refused_off_the_root_too() -> None:
    def body(group: ProcessGroup) -> None:
        if group.rank == 1:
            with pytest.raises(UsageError):
                group.broadcast(np.array(["text"]), root=0)
        with pytest.raises(UsageError):
            group.reduce(np.ones(4), root=0, out="nothing that could be written to")

    run_world(2, body)


def test_a_root_other_than_0_and_a_part_other_than_the_first_have_shapes_of_their_own() -> None:
    def body(group: ProcessGroup) -> None:
        parts = [np.ones(1 + rank) for rank in range(3)]
        out = np.zeros(1 + group.rank)
        assert group.reduce_scatter(parts, out=out) is out
        assert group.scatter(parts if group.rank == 2 else None, root=2, out=out) is out
        with pytest.raises(TensorMismatchError):
            group.reduce_scatter(parts, out=np.zeros(4))

    run_world(3, body)
