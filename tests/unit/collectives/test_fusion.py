"""Bringing a sum together is one task where nobody else looks at the accumulator, and stays several where somebody does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ferrorpc.collectives.algorithms import direct, tree
from ferrorpc.collectives.algorithms.catalogue import CATALOGUE
from ferrorpc.collectives.algorithms.plan import (
    Buffer,
    Copy,
    Finish,
    Fold,
    FoldOwn,
    FoldUnder,
    Load,
    Plan,
    Quantise,
    Receive,
    Region,
    Send,
)
from ferrorpc.collectives.call import example
from ferrorpc.collectives.fusion import Incoming, Reduce, fused, used_work

IN, WORK, OUT = Buffer.IN, Buffer.WORK, Buffer.OUT
OWN, TOTAL, RESULT = Region(IN, 0, 8, 16), Region(WORK, 0, 0, 8), Region(OUT, 0, 8, 16)


def test_an_owner_of_a_slice_folds_all_its_parts_at_once_in_rank_order():
    plan = direct.all_reduce_two_shot(12, 1, 3)
    (reduce,) = [task for task in fused(plan) if isinstance(task, Reduce)]
    own = Region(IN, 0, 4, 8)
    assert reduce == Reduce((Incoming(0, 0), own, Incoming(2, 0)), Region(OUT, 0, 4, 8))
    assert reduce.messages == [Incoming(0, 0), Incoming(2, 0)]
    assert used_work(fused(plan), plan) == (0,)
    assert [task for task in fused(plan) if not isinstance(task, Reduce)] == [
        action for action in plan.actions if isinstance(action, Send) or (isinstance(action, Receive) and action.slot == 1)
    ]


def test_what_is_sent_on_from_the_accumulator_or_folded_from_the_left_stays_as_it_is():
    chain = (Load(OWN, TOTAL), Fold(1, 0, TOTAL), Finish(TOTAL, RESULT))
    assert len(fused(Plan(chain, (8,)))) == 1
    for actions in (
        (*chain, Send(2, 1, TOTAL)),
        (*chain[:2], Send(2, 1, TOTAL), chain[2]),
        (chain[0], FoldUnder(1, 0, TOTAL), chain[2]),
        (chain[0], Fold(1, 0, Region(WORK, 0, 0, 4)), chain[2]),
        (*chain[:2], Finish(Region(WORK, 0, 0, 4), Region(OUT, 0, 8, 12))),
        (chain[0], chain[2]),
        chain[:2],
        (Load(Region(WORK, 1, 0, 8), TOTAL), *chain[1:]),
        (chain[0], FoldOwn(Region(WORK, 1, 0, 8), TOTAL), chain[2]),
    ):
        plan = Plan(actions, (8, 8))
        assert fused(plan) == actions
        assert used_work(actions, plan)[0] == 8


@pytest.mark.parametrize("size", range(1, 9))
def test_every_sum_of_a_compressed_plan_is_one_task(size: int):
    """A GPU has no kernels for others (compressed_on_device.py)."""
    calls = [example(operation.value, 40 * size, size) for operation in CATALOGUE]
    entries = [(call, entry) for call in calls for entry in CATALOGUE[call.operation] if entry.compresses]
    assert len(entries) == 3
    for call, entry in entries:
        for rank in range(size):
            tasks = fused(entry.build(replace(call, wire="bf16"), rank, size))
            assert all(isinstance(task, Send | Reduce | Quantise | Receive | Copy) for task in tasks)


def test_the_root_of_a_tree_folds_its_children_at_once_and_the_others_send_their_accumulators():
    root, inner = tree.reduce(8, 0, 8, 0), tree.reduce(8, 4, 8, 0)
    assert [type(task) for task in fused(root)] == [Reduce]
    assert fused(inner) == inner.actions
