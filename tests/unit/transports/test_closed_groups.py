"""Which operations of a closed group have begun, whatever the order of their numbers."""

from __future__ import annotations

import random

from ferrorpc.transports.closed_groups import GAPS_MAX, REASON_CHARACTERS_MAX, Begun, ClosedGroups
from ferrorpc.wire.frames import BESIDE, Key


def begun_with(numbers: list[int]) -> Begun:
    begun = Begun()
    for number in numbers:
        begun = begun.with_number(number)
    return begun


def test_numbers_begin_in_any_order_and_leave_gaps() -> None:
    numbers = random.Random(0).sample(range(60), 40)
    for count in range(len(numbers)):
        begun = begun_with(numbers[:count])
        assert {number for number in range(-1, 70) if begun.has(number)} - {-1} == set(numbers[:count])


def test_numbers_that_count_up_leave_none() -> None:
    assert begun_with(list(range(9))) == Begun(8)
    assert begun_with([3, 1, 2, 0, 2]) == Begun(3)


def test_only_the_latest_gaps_are_known() -> None:
    begun = begun_with(list(range(0, 1000, 2)))
    assert len(begun.gaps) == GAPS_MAX
    assert not begun.has(997)
    assert begun.has(1), "which is not known any more"


def test_of_a_long_reason_the_beginning_is_kept() -> None:
    closed = ClosedGroups()
    closed.add(7, [], "ValueError: " + "x" * 100_000)
    told = closed.explain(Key(7, 0, 3), "barrier()")
    assert told.startswith("it closed a subgroup in which others wait for it: barrier() #3; it had left by ValueError: xxx")
    assert len(told) < 2 * REASON_CHARACTERS_MAX


def test_what_a_closed_group_skipped_never_begins() -> None:
    closed = ClosedGroups()
    closed.add(7, [Begun(3), begun_with([0, 2])])
    never = [Key(7, 1, 1), Key(7, 1 | BESIDE, 1), Key(7, 1, 3), Key(7, 0, 4)]
    assert [closed.never_begins(key) for key in never] == [True] * 4
    assert [closed.never_begins(key) for key in (Key(7, 1, 0), Key(7, 1, 2), Key(7, 0, 3), Key(8, 1, 1))] == [False] * 4
