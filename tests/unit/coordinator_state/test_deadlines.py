"""Deadlines: order, moves, and memory proportional to those that are set."""

from __future__ import annotations

from ferrorpc_coordinator.state.deadlines import Deadlines
from hypothesis import given, strategies as st


def test_deadlines_expire_in_order_and_once() -> None:
    deadlines, seen = Deadlines(), []
    for when in (30, 10, 20):
        deadlines.set(when, when, lambda when=when: seen.append(when))
    for action in deadlines.expired(20):
        action()
    assert seen == [10, 20]
    assert deadlines.earliest() == 30
    assert len(deadlines) == 1


def test_a_deadline_that_moved_later_does_not_expire_early() -> None:
    deadlines = Deadlines()
    deadlines.set("lease", 10, lambda: None)
    deadlines.set("lease", 50, lambda: None)
    assert list(deadlines.expired(49)) == []
    assert deadlines.earliest() == 50


def test_a_deadline_that_moved_earlier_expires_early() -> None:
    deadlines = Deadlines()
    deadlines.set("lease", 50, lambda: None)
    deadlines.set("lease", 10, lambda: None)
    assert len(list(deadlines.expired(10))) == 1
    assert deadlines.earliest() is None


def test_an_action_may_drop_what_is_due_after_it() -> None:
    deadlines, seen = Deadlines(), []
    deadlines.set("first", 1, lambda: deadlines.drop("second"))
    deadlines.set("second", 2, lambda: seen.append("second"))
    for action in deadlines.expired(5):
        action()
    assert seen == []


def test_memory_is_proportional_to_the_deadlines_that_are_set() -> None:
    deadlines = Deadlines()
    for number in range(100_000):
        deadlines.set(number, 10**9 + number, lambda: None)
        deadlines.drop(number)
    assert len(deadlines) == 0
    assert len(deadlines._heap) <= 100


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 100), st.booleans())))
def test_it_agrees_with_a_dictionary(actions: list[tuple[int, int, bool]]) -> None:
    deadlines, model = Deadlines(), {}
    for key, when, drop in actions:
        if drop:
            deadlines.drop(key)
            model.pop(key, None)
        else:
            deadlines.set(key, when, lambda: None)
            model[key] = when
        assert deadlines.earliest() == min(model.values(), default=None)
    expired = len(list(deadlines.expired(50)))
    assert expired == sum(when <= 50 for when in model.values())
    assert len(deadlines) == len(model) - expired
