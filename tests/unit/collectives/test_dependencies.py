"""Actions done in any order that their flow allows, element by element, leave what they leave when done one after the other."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from ferrorpc.collectives.algorithms import barrier
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
from ferrorpc.collectives.call import Call, Operation, overwritable
from ferrorpc.collectives.dependencies import UNBOUNDED, bound, dependencies_of
from tests.unit.collectives.test_algorithms import case, rooted

Take = Receive | Fold | FoldUnder
IN, WORK, OUT = Buffer.IN, Buffer.WORK, Buffer.OUT


@dataclass
class Message:
    """How many elements a message has, and those that have been sent."""

    count: int
    elements: list[str] = field(default_factory=list)


class Rank:
    """One rank's arrays and how far its actions are. An element is a text that says how it came about."""

    def __init__(self, number: int, call: Call, plan: Plan, in_place: bool) -> None:
        self.number = number
        self.plan = plan
        self.steps = dependencies_of(plan.actions, overwritable(call.operation, number))
        self.done = [0] * len(plan.actions)
        self.arrays: dict[tuple[Buffer, int], list[str]] = {}
        self.counts: dict[Region, int] = {}
        for item, spec in enumerate(call.inputs):
            self.arrays[IN, item] = [f"x{number}.{item}.{place}" for place in range(spec.shape[0])]
        for item, count in enumerate(plan.work_items):
            self.arrays[WORK, item] = ["?"] * count
        own = (IN, number if call.operation is Operation.REDUCE_SCATTER else 0)
        together = in_place and plan.out_items == 1 and call.operation in REDUCTIONS and own in self.arrays
        self.arrays[OUT, 0] = self.arrays[own] if together else []
        for item in range(1, plan.out_items):
            self.arrays[OUT, item] = []

    def array(self, region: Region) -> list[str]:
        return self.arrays[region.buffer, region.item]

    def count(self, region: Region) -> int:
        """Elements of a region, which a message or a copy tells where it is a whole result."""
        if region.stop is not None:
            return region.stop - region.start
        return self.counts.get(region, len(self.array(region)))

    def write(self, region: Region, place: int, text: str) -> None:
        array, position = self.array(region), region.start + place
        array.extend(["?"] * (position + 1 - len(array)))
        array[position] = text


REDUCTIONS = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER)


class World:
    """All ranks of one operation, and the messages between them."""

    def __init__(self, calls: list[Call], plans: list[Plan], in_place: bool) -> None:
        self.ranks = [Rank(number, call, plan, in_place) for number, (call, plan) in enumerate(zip(calls, plans, strict=True))]
        self.messages: dict[tuple[int, int, int], Message] = {}

    def advance(self, rank: Rank, index: int) -> bool:
        """Does one element of an action; False when it has to wait."""
        if rank.done[index] == UNBOUNDED or bound(rank.steps[index].waits, rank.done) <= rank.done[index]:
            return False
        action = rank.plan.actions[index]
        if isinstance(action, Send):
            return self.send(rank, index, action)
        if isinstance(action, Take):
            return self.take(rank, index, action)
        source = action.region if isinstance(action, Quantise) else action.source
        return self.compute(rank, index, action, source)

    def send(self, rank: Rank, index: int, action: Send) -> bool:
        count, place = rank.count(action.region), rank.done[index]
        message = self.messages.setdefault((rank.number, action.peer, action.slot), Message(count))
        if place < count:
            message.elements.append(rank.array(action.region)[action.region.start + place])
        self.step(rank, index, count)
        return True

    def take(self, rank: Rank, index: int, action: Take) -> bool:
        message = self.messages.get((action.peer, rank.number, action.slot))
        place = rank.done[index]
        if message is None or len(message.elements) <= place < message.count:
            return False
        rank.counts[action.region] = message.count
        if place < message.count:
            text = message.elements[place]
            if not isinstance(action, Receive):
                mine = rank.array(action.region)[action.region.start + place]
                text = f"({mine}+{text})" if isinstance(action, Fold) else f"({text}+{mine})"
            rank.write(action.region, place, text)
        self.step(rank, index, message.count)
        return True

    def compute(self, rank: Rank, index: int, action: Load | FoldOwn | Finish | Copy | Quantise, source: Region) -> bool:
        count, place = rank.count(source), rank.done[index]
        rank.counts[action.region] = count
        if place < count:
            text = rank.array(source)[source.start + place]
            if isinstance(action, FoldOwn):
                text = f"({rank.array(action.region)[action.region.start + place]}+{text})"
            rank.write(action.region, place, f"q({text})" if isinstance(action, Quantise) else text)
        self.step(rank, index, count)
        return True

    def step(self, rank: Rank, index: int, count: int) -> None:
        rank.done[index] += 1
        if rank.done[index] >= count:
            rank.done[index] = UNBOUNDED

    def run(self, chance: random.Random) -> list[dict[tuple[Buffer, int], list[str]]]:
        """Everybody's arrays in the end. Of what is allowed, some is done at once and some as late as possible."""
        left = [(rank, index) for rank in self.ranks for index in range(len(rank.plan.actions))]
        lazy = set(chance.sample(range(len(left)), len(left) // 2))
        eager = [entry for place, entry in enumerate(left) if place not in lazy]
        while left:
            moved = [self.advance(*entry) for entry in eager]
            if not any(moved):
                assert any(self.advance(*entry) for entry in chance.sample(left, len(left))), "nobody can go on"
            left = [(rank, index) for rank, index in left if rank.done[index] != UNBOUNDED]
        return [rank.arrays for rank in self.ranks]


def in_order(calls: list[Call], plans: list[Plan], in_place: bool) -> list[dict[tuple[Buffer, int], list[str]]]:
    """What is left when every rank does its actions one after the other."""
    world = World(calls, plans, in_place)
    position = [0] * len(plans)
    moved = True
    while moved:
        moved = False
        for rank in world.ranks:
            while position[rank.number] < len(rank.plan.actions):
                index = position[rank.number]
                rank.steps = tuple(step._replace(waits=()) for step in rank.steps)
                if not world.advance(rank, index):
                    break
                moved = True
                position[rank.number] += rank.done[index] == UNBOUNDED
    assert position == [len(plan.actions) for plan in plans]
    return [rank.arrays for rank in world.ranks]


ALL = [
    (operation, entry) for operation, entries in CATALOGUE.items() for entry in entries if operation is not Operation.BARRIER
]


@pytest.mark.parametrize(("operation", "entry"), ALL, ids=[f"{o.value}-{e.name}" for o, e in ALL])
@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in_place"])
def test_any_order_that_is_allowed_leaves_the_same(operation, entry, in_place):
    for size in (2, 3, 4, 5):
        for count in (1, 6):
            calls, plans = case(operation, entry, size, count, size - 1 if rooted(operation) else 0)
            expected = results(in_order(calls, plans, in_place))
            for seed in range(3):
                assert results(World(calls, plans, in_place).run(random.Random(seed))) == expected


def results(ranks: list[dict[tuple[Buffer, int], list[str]]]) -> list[list[list[str]]]:
    return [[array for (buffer, _), array in arrays.items() if buffer is OUT] for arrays in ranks]


def steps(*actions):
    return dependencies_of(actions, 0)


def test_what_was_reduced_may_be_sent_on_element_by_element():
    total, result = Region(WORK, 0, 0, 8), Region(OUT, 0, 8, 16)
    flow = steps(Receive(1, 0, total), Finish(total, result), Send(1, 1, result))
    assert bound(flow[1].waits, [3, 0, 0]) == 3
    assert bound(flow[2].waits, [3, 2, 0]) == 2
    assert bound(flow[2].waits, [UNBOUNDED, UNBOUNDED, 0]) == UNBOUNDED
    assert (flow[0].wakes, flow[1].wakes) == ((1,), (2,))


def test_only_the_elements_two_actions_share_are_waited_for():
    flow = steps(Receive(1, 0, Region(WORK, 0, 4, 8)), Send(1, 1, Region(WORK, 0, 0, 6)))
    assert [bound(flow[1].waits, [done, 0]) for done in (0, 1, 2, UNBOUNDED)] == [4, 5, UNBOUNDED, UNBOUNDED]


def test_a_writer_lets_readers_go_first_and_readers_pass_each_other():
    part = Region(WORK, 0, 0, 8)
    flow = steps(Send(1, 0, part), Send(2, 0, part), Receive(1, 1, part))
    assert flow[1].waits == ()
    assert bound(flow[2].waits, [5, 2, 0]) == 2


@pytest.mark.parametrize(
    ("operation", "item"),
    [(Operation.ALL_REDUCE, 0), (Operation.REDUCE, 0), (Operation.BROADCAST, 0), (Operation.REDUCE_SCATTER, 2)],
    ids=lambda value: getattr(value, "value", ""),
)
def test_results_may_be_the_memory_of_what_was_brought(operation, item):
    moves = (Send(1, 0, Region(IN, item, 0, 8)), Receive(1, 1, Region(OUT, 0, 0, 8)))
    assert bound(dependencies_of(moves, overwritable(operation, 2))[1].waits, [3, 0]) == 3
    assert bound(dependencies_of(moves, overwritable(Operation.ALL_TO_ALL, 2))[1].waits, [3, 0]) == UNBOUNDED


def test_nothing_overtakes_an_action_that_only_stands_for_an_order_in_time():
    flow = dependencies_of(barrier.dissemination(0, 8).actions, None)
    done = [0] * len(flow)
    for index, step in enumerate(flow):
        assert bound(step.waits, done) == UNBOUNDED
        for later in flow[index + 1 :]:
            assert bound(later.waits, done) == 0
        done[index] = UNBOUNDED


def test_what_moves_something_waits_for_an_action_that_only_stands_for_an_order_in_time():
    flow = steps(Receive(1, 0, Region(OUT, 0, 0, 0)), Send(1, 1, Region(IN, 0, 0, 8)))
    assert [bound(flow[1].waits, [done, 0]) for done in (0, UNBOUNDED)] == [0, UNBOUNDED]
