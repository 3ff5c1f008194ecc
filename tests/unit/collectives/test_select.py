"""The choice of an algorithm: pure, the same on every rank, in rank order up to sixteen ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from ferrorpc.collectives.algorithms.catalogue import CATALOGUE
from ferrorpc.collectives.arena.select import explain as explain_in_memory
from ferrorpc.collectives.call import BUNDLING, Call, Operation
from ferrorpc.collectives.select import RANK_ORDER_RANKS, explain, is_announced, plan_for, select
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.types import DType, ReduceOp, TensorSpec


def reduction(count: int, operation: Operation = Operation.ALL_REDUCE, size: int = 4, **more) -> Call:
    spec = TensorSpec(more.pop("dtype", DType.FLOAT32), (count,))
    inputs = (spec,) * (size if operation is Operation.REDUCE_SCATTER else 1)
    root = 0 if operation is Operation.REDUCE else None
    return Call(operation, inputs, more.pop("op", ReduceOp.SUM), root, **more)


@given(st.integers(1, RANK_ORDER_RANKS), st.integers(0, 10**9))
def test_defaults_keep_rank_order_up_to_sixteen_ranks(size, count):
    for operation in (Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER):
        assert select(reduction(count, operation, size), size).order.is_canonical


def test_small_arrays_go_in_one_round_and_large_ones_in_two():
    for size in (2, 4, 8, 16):
        assert select(reduction(16), size).name == "one_shot"
        assert select(reduction(10_000_000), size).name == "two_shot"


def test_beyond_sixteen_ranks_no_rank_talks_to_all():
    for count in (1, 10_000_000):
        assert select(reduction(count), 17).name in ("ring", "recursive_doubling", "rabenseifner", "tree")
    assert select(reduction(10_000_000), 17).name == "ring"
    assert select(reduction(1), 17).name == "recursive_doubling"
    assert select(Call(Operation.BARRIER), 17).name == "dissemination"
    assert select(Call(Operation.BARRIER), 16).name == "direct"


def test_choice_of_a_move_does_not_depend_on_what_only_some_ranks_know():
    small, large = TensorSpec(DType.INT8, (1,)), TensorSpec(DType.FLOAT64, (10**8,))
    for operation in (Operation.BROADCAST, Operation.GATHER, Operation.SCATTER, Operation.ALL_GATHER, Operation.ALL_TO_ALL):
        for size in (2, 16, 17, 33):
            calls = [Call(operation, inputs, root=0) for inputs in ((), (small,) * size, (large,) * size)]
            announced = {is_announced(call, size) for call in calls}
            assert len(announced) == 1
            if not announced.pop():
                assert len({select(call, size).name for call in calls}) == 1


def test_a_broadcast_goes_by_its_size_once_that_is_announced():
    def chosen(nbytes: int, size: int) -> str:
        return select(Call(Operation.BROADCAST, (TensorSpec(DType.INT8, (nbytes,)),), root=0), size).name

    assert not is_announced(Call(Operation.BROADCAST, root=0), 2)
    for size in (3, 8, 33):
        assert is_announced(Call(Operation.BROADCAST, root=0), size)
        assert chosen(1000, size) == "tree"
    assert chosen(64 << 20, 4) == "chain"
    assert chosen(1 << 20, 3) == "two_shot"
    assert chosen(1 << 20, 16) == "tree"
    assert chosen(256 << 10, 33) == "tree"
    assert chosen(8 << 20, 33) == "scatter_all_gather"
    assert chosen(256 << 20, 33) == "chain"


def test_a_broadcast_by_an_algorithm_that_cuts_is_announced_and_others_are_not():
    for name, announced in (("tree", False), ("direct", False), ("chain", False), ("two_shot", True)):
        assert is_announced(Call(Operation.BROADCAST, root=0, algorithm=name), 4) is announced


def test_what_bundles_arrays_is_never_chosen_unasked():
    """Whether arrays are of one shape is not known beforehand."""
    for operation in (Operation.ALL_GATHER, Operation.ALL_TO_ALL):
        for size in (2, 16, 17, 33):
            assert select(Call(operation, (TensorSpec(DType.INT8, (1,)),) * size), size).name != "bruck"
    with pytest.raises(TensorMismatchError, match="one shape"):
        plan_for(
            Call(Operation.ALL_TO_ALL, (TensorSpec(DType.INT8, (1,)), TensorSpec(DType.INT8, (2,))), algorithm="bruck"), 0, 2
        )


def test_signatures_fix_the_shape_where_arrays_are_bundled():
    names = {entry.name for found in CATALOGUE.values() for entry in found if entry.needs_alike}
    assert names == set(BUNDLING)
    spec = TensorSpec(DType.INT8, (5,))
    assert Call(Operation.ALL_GATHER, (spec,), algorithm="bruck").signature == "all_gather(int8[5], algorithm=bruck)"
    assert Call(Operation.ALL_GATHER, (spec,), algorithm="ring").signature == "all_gather(int8, algorithm=ring)"


def test_an_algorithm_that_is_asked_for_runs():
    for operation, entries in CATALOGUE.items():
        for entry in entries:
            call = reduction(100, operation, 4, algorithm=entry.name) if operation.value.find("reduce") >= 0 else None
            if call is not None:
                assert plan_for(call, 1, 4) == entry.build(call, 1, 4)


def test_an_unknown_algorithm_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="one_shot, two_shot, ring, recursive_doubling, rabenseifner, tree, direct"):
        plan_for(reduction(4, algorithm="butterfly"), 0, 2)
    with pytest.raises(UsageError, match="use one of: direct, ring, bruck"):
        plan_for(Call(Operation.ALL_GATHER, (TensorSpec(DType.INT8, (1,)),), algorithm="tree"), 0, 2)


def test_direct_all_reduce_stands_for_the_better_of_both_forms():
    assert select(reduction(4, algorithm="direct"), 17).name == "one_shot"
    assert select(reduction(10_000_000, algorithm="direct"), 17).name == "two_shot"


def test_compressed_calls_take_an_algorithm_that_rounds_twice_at_most():
    for size in (2, 16, 17, 33):
        assert select(reduction(4, wire="bf16"), size).name == "two_shot"
    assert select(reduction(4, wire="bf16", algorithm="direct"), 4).name == "two_shot"
    with pytest.raises(UsageError, match="partial sums") as refused:
        plan_for(reduction(4, wire="bf16", algorithm="ring"), 0, 4)
    assert refused.value.hint.endswith("or use: two_shot, direct")
    with pytest.raises(UsageError, match=r"use: direct$"):
        plan_for(reduction(4, Operation.REDUCE, wire="bf16", algorithm="tree"), 0, 4)
    with pytest.raises(TensorMismatchError, match="float64"):
        plan_for(reduction(4, wire="bf16", dtype=DType.FLOAT64), 0, 4)
    with pytest.raises(UsageError, match="no wire codec"):
        plan_for(Call(Operation.BROADCAST, root=0, wire="bf16"), 0, 4)


def test_an_operator_without_meaning_is_refused_before_anything_is_laid_out():
    with pytest.raises(TensorMismatchError, match="bits"):
        plan_for(reduction(4, op=ReduceOp.BXOR), 0, 4)


def test_explain_names_the_choice_its_order_and_the_alternatives():
    text = explain(reduction(1000), 4)
    assert text.splitlines()[0] == "all_reduce(op=sum, float32[1000]) on 4 ranks: one_shot, in rank order"
    assert "* one_shot" in text
    assert text.splitlines()[-1] == "  * the algorithm that is chosen"
    for name in ("two_shot", "ring", "recursive_doubling", "tree"):
        assert name in text
    assert "(asked for)" in explain(reduction(1000, algorithm="ring"), 4)
    assert "moves only" in explain(Call(Operation.BROADCAST, root=0), 4)


def test_explain_counts_one_rank_and_one_round_in_the_singular():
    text = explain(reduction(1000), 1)
    assert " on 1 rank: " in text.splitlines()[0]
    assert "  1 round, " in explain(reduction(1000), 4)
    assert "  2 rounds," in explain(reduction(1000), 4)
    assert "on 1 rank: in shared memory" in explain_in_memory(reduction(1000), 1)
