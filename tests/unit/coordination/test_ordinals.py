from __future__ import annotations

import tracemalloc

from ferrorpc_coordinator.state.settings import Limits

from ferrorpc.coordination import ordinals
from ferrorpc.coordination.local import LocalWorld
from ferrorpc.coordination.ordinals import NAMES_MAX, Ordinals

WORLD, PAIR = (0, 1, 2), (0, 1)


def test_uses_of_a_name_are_counted_whoever_takes_part():
    numbers = Ordinals()
    assert [numbers.next("a", ranks) for ranks in (WORLD, WORLD, PAIR, WORLD)] == [1, 2, 3, 4]
    assert numbers.next("b", PAIR) == 1


def test_names_used_long_ago_are_numbered_anew(monkeypatch):
    monkeypatch.setattr(ordinals, "NAMES_MAX", 3)
    numbers = Ordinals()
    assert [numbers.next(name, WORLD) for name in ("a", "b", "c", "a", "d")] == [1, 1, 1, 2, 1]
    assert numbers.next("a", WORLD) == 3
    assert numbers.next("b", WORLD) == 1


def test_ranks_with_other_barriers_of_their_own_forget_the_same_names(monkeypatch):
    """Else a rank that also meets others would number the next use of a name otherwise than they do, and wait in vain."""
    monkeypatch.setattr(ordinals, "NAMES_MAX", 3)
    alone, busy = Ordinals(), Ordinals()
    for name in ("a", "b", "c"):
        assert alone.next(name, WORLD) == busy.next(name, WORLD) == 1
        for step in range(5):
            busy.next(f"{name}-{step}", PAIR)
    assert alone.next("a", WORLD) == busy.next("a", WORLD) == 2


def test_a_coordinator_knows_no_barrier_of_a_forgotten_name():
    """Else its first number would be that of a barrier that was released long ago, and nobody would wait at the next one."""
    limits = Limits()
    assert limits.open_barriers + limits.remembered_barriers < NAMES_MAX


def test_a_barrier_of_another_name_in_each_step_takes_no_memory(monkeypatch):
    monkeypatch.setattr(ordinals, "NAMES_MAX", 2_000)
    session = LocalWorld(1).session(0)

    def steps(numbers: range) -> int:
        for number in numbers:
            session.barrier(f"step-{number}")
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = steps(range(3_000))
        assert steps(range(3_000, 8_000)) - before < 100_000
    finally:
        tracemalloc.stop()


def test_numbers_begin_anew_with_each_generation():
    session = LocalWorld(1).session(0)
    first = session.membership
    session.barrier("a")
    session.rejoin(5)
    assert (first.ordinals.next("a", (0,)), session.membership.ordinals.next("a", (0,))) == (2, 1)
