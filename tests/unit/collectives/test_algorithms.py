"""Every algorithm of the catalogue, proven by the validator for every group size and kind of size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ferrorpc.collectives.algorithms.catalogue import CATALOGUE, Entry
from ferrorpc.collectives.algorithms.plan import Fold, FoldOwn, Load, Quantise, Receive, Send
from ferrorpc.collectives.algorithms.validate import findings
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.types import DType, ReduceOp, TensorSpec

GROUPS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33]
COUNTS = [0, 1, 2, 7, 1000, 1_310_720]
ALL = [(operation, entry) for operation, entries in CATALOGUE.items() for entry in entries]


def spec(count: int) -> TensorSpec:
    return TensorSpec(DType.FLOAT32, (count,))


def calls_of(operation: Operation, size: int, count: int, root: int, wire: str | None = None) -> list[Call]:
    """Each rank's call. Moves and parts are uneven: rank or part r has count + r elements."""
    uneven = tuple(spec(count + rank) for rank in range(size))
    if operation in (Operation.ALL_REDUCE, Operation.REDUCE):
        op_root = root if operation is Operation.REDUCE else None
        return [Call(operation, (spec(count),), ReduceOp.SUM, op_root, wire)] * size
    if operation is Operation.REDUCE_SCATTER:
        return [Call(operation, uneven, ReduceOp.SUM, None, wire)] * size
    if operation in (Operation.GATHER, Operation.ALL_GATHER):
        return [Call(operation, (part,), root=root if operation is Operation.GATHER else None) for part in uneven]
    if operation is Operation.ALL_TO_ALL:
        return [Call(operation, tuple(spec(count + rank * peer) for peer in range(size))) for rank in range(size)]
    if operation is Operation.BARRIER:
        return [Call(operation)] * size
    brought = uneven if operation is Operation.SCATTER else (spec(count),)
    return [Call(operation, brought if rank == root else (), root=root) for rank in range(size)]


def plans_of(entry: Entry, calls: list[Call]) -> list:
    return [entry.build(call, rank, len(calls)) for rank, call in enumerate(calls)]


def rooted(operation: Operation) -> bool:
    return operation in (Operation.REDUCE, Operation.BROADCAST, Operation.GATHER, Operation.SCATTER)


@pytest.mark.parametrize(("operation", "entry"), ALL, ids=[f"{o.value}-{e.name}" for o, e in ALL])
@pytest.mark.parametrize("size", GROUPS)
def test_every_plan_is_sound(operation, entry, size):
    roots = sorted({0, size // 2, size - 1}) if rooted(operation) else [0]
    for count in COUNTS:
        for root in roots:
            calls = calls_of(operation, size, count, root)
            assert findings(calls, plans_of(entry, calls), rank_order=entry.rank_order) == []


@pytest.mark.parametrize(
    ("operation", "entry"), [pair for pair in ALL if pair[1].compresses], ids=lambda v: getattr(v, "name", "")
)
@pytest.mark.parametrize("size", GROUPS)
def test_compressed_plans_leave_the_same_bits_on_all_ranks(operation, entry, size):
    for count in COUNTS:
        calls = calls_of(operation, size, count, 0, wire="int8")
        assert findings(calls, plans_of(entry, calls), rank_order=entry.rank_order) == []


@pytest.mark.parametrize("name", ["ring", "recursive_doubling", "tree"])
def test_algorithms_that_disclaim_rank_order_do_not_keep_it(name):
    """Otherwise the catalogue would be too modest, and the test above would not show that the claim is checked."""
    entry = next(entry for entry in CATALOGUE[Operation.ALL_REDUCE] if entry.name == name)
    calls = calls_of(Operation.ALL_REDUCE, 8, 64, 0)
    assert any("no left fold in rank order" in text for text in findings(calls, plans_of(entry, calls), rank_order=True))


@pytest.mark.parametrize(("operation", "entry"), ALL, ids=[f"{o.value}-{e.name}" for o, e in ALL])
def test_bytes_through_the_busiest_rank_are_those_of_the_catalogue(operation, entry):
    inwards = operation in (Operation.REDUCE, Operation.GATHER)
    for size in (2, 4, 8, 16):
        count = 1600
        calls = calls_of(operation, size, count, 0)
        if operation not in (Operation.ALL_REDUCE, Operation.BROADCAST, Operation.BARRIER):
            calls = [replace(call, inputs=tuple(spec(count) for _ in call.inputs)) for call in calls]
        plans = plans_of(entry, calls)
        whole = operation in (Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL)
        cost = entry.cost(size, 4 * count * (size if whole else 1))
        assert max(message_bytes(plan, count, inwards) for plan in plans) == cost.sent_bytes


def message_bytes(plan, count: int, inwards: bool) -> int:
    total = 0
    for action in plan.actions:
        if isinstance(action, Receive | Fold if inwards else Send):
            stop = count if action.region.stop is None else action.region.stop
            total += 4 * (stop - action.region.start)
    return total


# The validator itself: each kind of damage must be seen.


def two_shot(size: int = 3, count: int = 9, wire: str | None = None):
    calls = calls_of(Operation.ALL_REDUCE, size, count, 0, wire)
    entry = next(entry for entry in CATALOGUE[Operation.ALL_REDUCE] if entry.name == "two_shot")
    return calls, plans_of(entry, calls)


def damaged(plans: list, rank: int, change) -> list:
    actions = list(plans[rank].actions)
    change(actions)
    return [replace(plan, actions=tuple(actions)) if number == rank else plan for number, plan in enumerate(plans)]


def index(actions: list, kind: type, nth: int = 0) -> int:
    return [number for number, action in enumerate(actions) if isinstance(action, kind)][nth]


def test_a_send_left_out_is_a_wait_for_ever():
    calls, plans = two_shot()
    assert any("waits for ever" in text for text in findings(calls, damaged(plans, 1, lambda a: a.pop(index(a, Send)))))


def test_a_receive_left_out_is_a_message_nobody_takes():
    calls, plans = two_shot()
    assert any("never takes" in text for text in findings(calls, damaged(plans, 1, lambda a: a.pop(index(a, Receive, -1)))))


def test_a_fold_done_twice_is_seen():
    calls, plans = two_shot()
    broken = damaged(plans, 1, lambda a: a.insert(index(a, FoldOwn), a[index(a, FoldOwn)]))
    assert any("every rank once" in text for text in findings(calls, broken))


def test_folds_exchanged_are_no_longer_in_rank_order():
    calls, plans = two_shot()

    def exchange(actions):
        one, other = index(actions, FoldOwn), index(actions, Fold)
        actions[one], actions[other] = actions[other], actions[one]

    broken = damaged(plans, 1, exchange)
    assert any("no left fold" in text for text in findings(calls, broken, rank_order=True))


def test_one_slot_for_two_messages_is_seen():
    calls, plans = two_shot(size=2, count=8)
    broken = damaged(plans, 0, lambda a: a.insert(index(a, Send), a[index(a, Send)]))
    assert any("used twice" in text for text in findings(calls, broken))


def test_a_result_that_only_its_owner_did_not_round_is_seen():
    calls, plans = two_shot(wire="bf16")
    assert findings(calls, plans, rank_order=True) == []
    broken = damaged(plans, 2, lambda a: a.pop(index(a, Quantise)))
    assert any("ends with" in text for text in findings(calls, broken))


def test_an_input_sent_after_its_result_was_written_is_seen_in_place():
    """Harmless with two arrays, wrong with one: rank 0 would send the sum as its own part."""
    calls = calls_of(Operation.ALL_REDUCE, 2, 8, 0)
    plans = plans_of(CATALOGUE[Operation.ALL_REDUCE][0], calls)
    broken = damaged(plans, 0, lambda a: a.append(a.pop(index(a, Send))))
    found = findings(calls, broken, rank_order=True)
    assert found
    assert all(text.startswith("in place: ") for text in found)


def test_a_read_of_what_was_never_written_is_seen():
    calls, plans = two_shot()
    assert any("before it is written" in text for text in findings(calls, damaged(plans, 0, lambda a: a.pop(index(a, Load)))))
