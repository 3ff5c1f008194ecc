"""Every algorithm of the catalogue, proven by the validator for every group size and kind of size."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

import pytest

from ferrorpc.collectives.algorithms.algorithm import Algorithm, Order
from ferrorpc.collectives.algorithms.catalogue import CATALOGUE, algorithms_of
from ferrorpc.collectives.algorithms.plan import Fold, FoldOwn, Load, Quantise, Receive, Send
from ferrorpc.collectives.algorithms.validate import _enter, _ranks, findings, formulas
from ferrorpc.collectives.call import Call, Operation, example
from ferrorpc.collectives.select import select
from ferrorpc.types import DType, ReduceOp, TensorSpec
from ferrorpc.wire.limits import DATA_PROTOCOL_VERSION

GROUPS = range(1, 34)
ALL_COUNTS_UP_TO = 12
"""Ranks. The cost of a proof grows with their square."""
PRIME = 1009
SEVERAL_CHUNKS = 5 * (1 << 18) + 1
"""Elements of float32: more than five chunks, more than what goes without credit."""
ALL = [(operation, entry) for operation, found in CATALOGUE.items() for entry in found]
LAYOUTS = {
    "2+2": "aabb",
    "3+1": "aaab",
    "interleaved": "ababab",
    "4+4+4": "aaaabbbbcccc",
    "1+2+3 mixed": "abbccc",
    "5 hosts": "abcdeabcdeabc",
}


def counts_of(operation: Operation, size: int) -> list[int]:
    """Element counts that are awkward, also those around the group's size where arrays are cut into that many slices. Each of
    the larger groups has one, in turn, so every count occurs in several of them."""
    around = [size - 1, size, size + 1] if operation in (Operation.ALL_REDUCE, Operation.BROADCAST) else []
    every = [0, 1, PRIME, *around, SEVERAL_CHUNKS]
    return sorted(set(every)) if size <= ALL_COUNTS_UP_TO else [every[size % len(every)]]


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


def case(operation: Operation, entry: Algorithm, size: int, count: int, root: int, wire: str | None = None):
    """Calls and plans of one operation, even where the algorithm wants it so."""
    calls = calls_of(operation, size, count, root, wire)
    if entry.needs_alike:
        calls = [replace(call, inputs=(spec(count),) * len(call.inputs)) for call in calls]
    return calls, plans_of(entry, calls)


def plans_of(entry: Algorithm, calls: list[Call]) -> list:
    known = [calls[call.root or 0] for call in calls] if entry.needs_size else calls
    return [entry.build(call, rank, len(calls)) for rank, call in enumerate(known)]


def rooted(operation: Operation) -> bool:
    return operation in (Operation.REDUCE, Operation.BROADCAST, Operation.GATHER, Operation.SCATTER)


def ids(pairs: list[tuple[Operation, Algorithm]]) -> list[str]:
    return [f"{operation.value}-{entry.name}" for operation, entry in pairs]


@pytest.mark.parametrize(("operation", "entry"), ALL, ids=ids(ALL))
def test_every_plan_is_sound_in_groups_of_any_size(operation, entry):
    for size in GROUPS:
        for place, count in enumerate(counts_of(operation, size)):
            root = (size // 2 + place) % size if rooted(operation) else 0
            calls, plans = case(operation, entry, size, count, root)
            assert findings(calls, plans, rank_order=entry.order.is_canonical) == [], (
                f"{size} ranks, {count} elements, root {root}"
            )


@pytest.mark.parametrize(
    ("operation", "entry"), [pair for pair in ALL if rooted(pair[0])], ids=lambda v: getattr(v, "name", "")
)
def test_any_rank_may_be_the_root(operation, entry):
    for size in (2, 5, 8):
        for root in range(size):
            calls, plans = case(operation, entry, size, 11, root)
            assert findings(calls, plans, rank_order=entry.order.is_canonical) == []


@pytest.mark.parametrize(("operation", "entry"), ALL, ids=ids(ALL))
def test_a_cost_tells_whether_a_rank_talks_to_all_at_once(operation, entry):
    """Beyond sixteen ranks such algorithms are not chosen unless they are asked for: each of those streams has its threads."""
    for size in (17, 33):
        _, plans = case(operation, entry, size, SEVERAL_CHUNKS, 0)
        partners = [{action.peer for action in plan.actions if hasattr(action, "peer")} for plan in plans]
        at_once = max(map(len, partners)) == size - 1 and entry.cost(size, SEVERAL_CHUNKS).rounds < size - 1
        assert entry.reaches_all_at_once(size) == at_once


COMPRESSING = [pair for pair in ALL if pair[1].compresses]


@pytest.mark.parametrize(("operation", "entry"), COMPRESSING, ids=ids(COMPRESSING))
def test_compressed_plans_leave_the_same_bits_on_all_ranks(operation, entry):
    for size in (*range(1, 10), 16, 17, 33):
        for count in counts_of(operation, size):
            calls, plans = case(operation, entry, size, count, 0, wire="int8")
            assert findings(calls, plans, rank_order=entry.order.is_canonical) == []


def digest_of_plans() -> str:
    """Of every algorithm's plans, and of the choices between them."""
    text = []
    for size in (2, 3, 4, 5, 8, 17):
        on_hosts = [(operation, entry) for operation in CATALOGUE for entry in algorithms_of(operation, "aabb")[-1:]]
        for operation, entry in ALL + on_hosts * (size == len("aabb")):
            for wire in (None, "int8")[: 1 + entry.compresses]:
                for count in (0, 5, PRIME):
                    text.append(f"{entry.name} {wire} {case(operation, entry, size, count, size // 2, wire)[1]}")
        for operation in CATALOGUE:
            for nbytes in (0, 1 << 10, 1 << 16, 1 << 20, 1 << 26):
                text.append(select(example(operation.value, nbytes, size), size).name)
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def test_plans_are_part_of_the_protocol():
    """Ranks of two releases would take each other's parts for others, and return wrong sums in silence. Where this fails, raise
    DATA_PROTOCOL_VERSION, so that they refuse each other, and note the new digest beside it."""
    assert {DATA_PROTOCOL_VERSION: digest_of_plans()} == {5: "8d9af2cc134bc6ae"}


@pytest.mark.parametrize("hosts", LAYOUTS.values(), ids=LAYOUTS)
def test_hierarchical_plans_are_sound_on_any_layout(hosts):
    size = len(hosts)
    for operation in (Operation.ALL_REDUCE, Operation.BROADCAST):
        (entry,) = set(algorithms_of(operation, hosts)) - set(CATALOGUE[operation])
        for count in counts_of(operation, size):
            for root in range(size) if operation is Operation.BROADCAST else [0]:
                calls, plans = case(operation, entry, size, count, root)
                assert findings(calls, plans) == [], f"{operation}, {count} elements, root {root}"


def layouts_of(size: int) -> dict[str, str]:
    """Hosts of each rank: whole and broken blocks, one rank apart, ranks dealt out, and any."""
    dice = random.Random(size)
    return {
        "pairs": "".join(chr(97 + rank // 2) for rank in range(size)),
        "blocks of five": "".join(chr(97 + rank // 5) for rank in range(size)),
        "one apart": "a" + "b" * (size - 1),
        "dealt to three": "".join("abc"[rank % 3] for rank in range(size)),
        "any": "".join(dice.choice("abcdefg") for _ in range(size)),
    }


def test_hierarchical_plans_are_sound_in_groups_of_any_size():
    seen = set()
    for size in GROUPS:
        for name, hosts in layouts_of(size).items():
            for operation in (Operation.ALL_REDUCE, Operation.BROADCAST):
                for entry in set(algorithms_of(operation, hosts)) - set(CATALOGUE[operation]):
                    seen.add(size)
                    for place, count in enumerate(counts_of(operation, size)):
                        root = (size // 2 + place) % size if rooted(operation) else 0
                        calls, plans = case(operation, entry, size, count, root)
                        assert findings(calls, plans) == [], f"{operation} on {name}: {hosts}, {count} elements, root {root}"
    assert seen == set(range(3, max(GROUPS) + 1))


def test_hierarchical_is_offered_only_where_hosts_are_known_and_differ():
    for hosts in ((), "aaaa", "abcd"):
        assert algorithms_of(Operation.ALL_REDUCE, hosts) == CATALOGUE[Operation.ALL_REDUCE]
    assert algorithms_of(Operation.ALL_REDUCE, "aabb")[-1].name == "hierarchical"
    assert algorithms_of(Operation.GATHER, "aabb") == CATALOGUE[Operation.GATHER]


def test_hierarchical_sends_across_hosts_what_one_rank_of_each_must():
    """On 2 hosts of 4 ranks, each rank exchanges its quarter: half of it each way, and nothing else crosses."""
    hosts = "aaaabbbb"
    entry = algorithms_of(Operation.ALL_REDUCE, hosts)[-1]
    for rank, plan in enumerate(case(Operation.ALL_REDUCE, entry, 8, 1600, 0)[1]):
        across = [action for action in plan.actions if isinstance(action, Send) and hosts[action.peer] != hosts[rank]]
        assert {action.peer for action in across} == {(rank + 4) % 8}
        assert sum(action.region.stop - action.region.start for action in across) == 400


@pytest.mark.parametrize("order", [Order.PAIRS, Order.RANKS])
def test_algorithms_of_the_same_order_give_the_same_bits(order):
    """That is what lets a measurement choose between them."""
    same = [entry for entry in CATALOGUE[Operation.ALL_REDUCE] if entry.order is order]
    assert len(same) > 1
    for size in GROUPS:
        found = [elementwise(*case(Operation.ALL_REDUCE, entry, size, 50, 0)) for entry in same]
        assert all(texts == found[0] for texts in found)


def elementwise(calls, plans) -> list[str]:
    """The formula of every element of rank 0's result."""
    return [text for count, text in formulas(calls, plans)[0][0] for _ in range(count)]


def test_formulas_say_how_a_result_comes_about():
    entry = next(entry for entry in CATALOGUE[Operation.ALL_REDUCE] if entry.name == "recursive_doubling")
    calls, plans = case(Operation.ALL_REDUCE, entry, 4, 6, 0)
    assert formulas(calls, plans) == [[[(6, "((x0+x1)+(x2+x3))")]]] * 4


def blocked_by(calls, plans, late: int) -> list[int]:
    """The ranks that cannot finish before rank `late` has entered: they need what it brings, or its credit."""
    ranks = _ranks(calls, plans, in_place=False)
    others = [number for number in range(len(ranks)) if number != late]
    for number in others:
        _enter(number, ranks)
    return [number for number in others if ranks[number].position < len(ranks[number].plan.actions)]


def test_what_a_late_rank_holds_up_depends_on_credit():
    """Small arrays for a root that is late lie there already; large ones wait for its credit."""
    (gather,) = CATALOGUE[Operation.GATHER]
    assert blocked_by(*case(Operation.GATHER, gather, 4, 100, 2), late=2) == []
    assert blocked_by(*case(Operation.GATHER, gather, 4, SEVERAL_CHUNKS, 2), late=2) == [0, 1, 3]
    assert blocked_by(*case(Operation.GATHER, gather, 4, 100, 2), late=0) == [2]


@pytest.mark.parametrize("name", ["ring", "recursive_doubling", "rabenseifner", "tree"])
def test_algorithms_that_disclaim_rank_order_do_not_keep_it(name):
    """Otherwise the catalogue would be too modest, and the test above would not show that the claim is checked."""
    entry = next(entry for entry in CATALOGUE[Operation.ALL_REDUCE] if entry.name == name)
    calls, plans = case(Operation.ALL_REDUCE, entry, 8, 64, 0)
    assert any("no left fold in rank order" in text for text in findings(calls, plans, rank_order=True))


LAID_OUT = [
    ("aabb", Operation.ALL_REDUCE),
    ("aaaabbbbcccc", Operation.ALL_REDUCE),
    ("abcabc", Operation.BROADCAST),
    ("aaaabbbb", Operation.BROADCAST),
]


@pytest.mark.parametrize(("hosts", "operation"), LAID_OUT, ids=[f"{hosts}-{o.value}" for hosts, o in LAID_OUT])
def test_bytes_through_the_busiest_rank_of_a_hierarchy_are_those_of_the_catalogue(hosts, operation):
    entry = algorithms_of(operation, hosts)[-1]
    _, plans = case(operation, entry, len(hosts), 2400, 0)
    cost = entry.cost(len(hosts), 4 * 2400)
    assert max(message_bytes(plan, 2400, inwards=False) for plan in plans) == pytest.approx(cost.sent_bytes)


@pytest.mark.parametrize(("operation", "entry"), ALL, ids=ids(ALL))
def test_bytes_through_the_busiest_rank_are_those_of_the_catalogue(operation, entry):
    inwards = operation in (Operation.REDUCE, Operation.GATHER)
    for size in (1, 2, 4, 8, 16):
        count = 1600 * 15 if entry.name == "two_shot" else 1600
        calls = calls_of(operation, size, count, 0)
        if operation not in (Operation.ALL_REDUCE, Operation.BROADCAST, Operation.BARRIER):
            calls = [replace(call, inputs=tuple(spec(count) for _ in call.inputs)) for call in calls]
        whole = operation in (Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL)
        cost = entry.cost(size, 4 * count * (size if whole else 1))
        assert max(message_bytes(plan, count, inwards) for plan in plans_of(entry, calls)) == pytest.approx(cost.sent_bytes)


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
