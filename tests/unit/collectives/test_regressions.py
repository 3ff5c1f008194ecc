"""Defects of an earlier design of collectives, each as the sentence that must stay true."""

from __future__ import annotations

import pytest

from ferrorpc.collectives.algorithms.plan import Fold, FoldUnder, Receive, Send
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.select import plan_for
from ferrorpc.types import DType, ReduceOp, TensorSpec


def traffic(plan, count: int) -> int:
    """Elements that go through one rank's link, both ways together."""
    moving = [action for action in plan.actions if isinstance(action, Send | Receive | Fold | FoldUnder)]
    return sum((count if action.region.stop is None else action.region.stop) - action.region.start for action in moving)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 17, 32])
def test_no_rank_is_the_hub_of_a_large_all_reduce(size):
    """Gathering at rank 0 and fanning out would move 2 (p-1) n through it; spread over all it is 4 n (p-1)/p each."""
    count = 10_000_000
    call = Call(Operation.ALL_REDUCE, (TensorSpec(DType.FLOAT32, (count,)),), ReduceOp.SUM)
    loads = [traffic(plan_for(call, rank, size), count) for rank in range(size)]
    assert max(loads) - min(loads) <= 4 * size
    assert max(loads) <= 4 * count * (size - 1) / size + 4 * size


@pytest.mark.parametrize("size", [3, 8])
def test_all_to_all_goes_straight_between_any_two_ranks(size):
    """A star of connections had no lane from rank 1 to rank 2."""
    call = Call(Operation.ALL_TO_ALL, (TensorSpec(DType.FLOAT32, (4,)),) * size)
    for rank in range(size):
        sends = {action.peer for action in plan_for(call, rank, size).actions if isinstance(action, Send)}
        assert sends == set(range(size)) - {rank}


def test_a_group_may_be_of_any_size_and_an_array_of_any_length():
    """No rank's share is rounded away: the slices of an all_reduce cover every element exactly once."""
    for size in (3, 5, 7, 16):
        for count in (size - 1, size + 1, 3_000_001):
            call = Call(Operation.ALL_REDUCE, (TensorSpec(DType.FLOAT32, (count,)),), ReduceOp.SUM, algorithm="two_shot")
            owned = sum(plan_for(call, rank, size).work_items[0] for rank in range(size))
            assert owned == count


def test_a_message_slot_belongs_to_one_message_only():
    """Untagged messages of equal length could be swapped; within an operation every message from one rank has its own slot."""
    for operation in (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER):
        for name in ("ring", "direct"):
            size = 8
            inputs = (TensorSpec(DType.FLOAT32, (64,)),) * (size if operation is Operation.REDUCE_SCATTER else 1)
            call = Call(operation, inputs, ReduceOp.SUM, algorithm=name)
            for rank in range(size):
                sends = [(a.peer, a.slot) for a in plan_for(call, rank, size).actions if isinstance(a, Send)]
                assert len(sends) == len(set(sends))
