"""The measured operations: a system with a wrong value anywhere is detected."""

from functools import partial

import numpy as np
import pytest

from ferrorpc.cli.bench import task
from ferrorpc.cli.bench.case import ALL_REDUCE, ALL_TO_ALL, BARRIER, BROADCAST, EXCHANGES, ROUND_TRIP, SEND, Case
from ferrorpc.cli.bench.runners.base import Runner
from ferrorpc.cli.bench.runners.ferrorpc import FerrorpcRunner
from ferrorpc.errors import BackendUnavailableError, FerroError, UsageError
from ferrorpc.testing import run_world


class Alone(Runner):
    """Rank 0 of `size` equal ranks, none of which exists: sums are computed from what one rank would see of its like."""

    name = "alone"
    version = "0"
    rank = 0

    def __init__(self, size=2, spoil=lambda array: None):
        self.size = size
        self.spoil = spoil

    def all_reduce(self, array, wire):
        return partial(self._sum, array)

    def _sum(self, array):
        # Of the pattern, rank r holds r + 1 times rank 0's; of ones, everyone holds the same.
        factor = self.size if np.all(array == array[0]) else sum(range(1, self.size + 1))
        array *= array.dtype.type(factor)
        self.spoil(array)

    def close(self):
        pass


def spoil_at(index):
    def spoil(array):
        array[index] += 1

    return spoil


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_right_sums_pass_after_every_number_of_repetitions(size, dtype):
    made = task.make(Alone(size), Case(ALL_REDUCE, size, 4000, dtype), "ordinary", None)
    assert made.arrays_bytes == 4000
    for count in (1, 2, made.repeats_max):
        made.refill()
        made.run(count)
        made.check(count)
    if size > 1:
        made.verify()


def test_repetitions_stay_where_the_dtype_is_finite():
    for dtype, largest in (("float32", 3.4e38), ("float16", 65504)):
        made = task.make(Alone(4), Case(ALL_REDUCE, 4, 64, dtype), "ordinary", None)
        assert made.repeats_max > 1
        assert 4.0**made.repeats_max <= largest


def test_one_wrong_element_among_many_is_found():
    count = 3 * task.PIECE + 5
    for index in (0, 7, task.PIECE, count - 1):
        made = task.make(Alone(spoil=spoil_at(index)), Case(ALL_REDUCE, 2, 4 * count), "ordinary", None)
        with pytest.raises(FerroError, match=r"1 of .* values are wrong"):
            made.verify()


def test_nan_is_a_wrong_value():
    def spoil(array):
        array[7] = np.nan

    made = task.make(Alone(spoil=spoil), Case(ALL_REDUCE, 2, 4000), "ordinary", None)
    with pytest.raises(FerroError, match=r"1 of .* values are wrong, such as nan for"):
        made.verify()


def test_a_block_is_checked_at_its_ends_and_its_middle():
    for index in (0, 499, 999):
        made = task.make(Alone(spoil=spoil_at(index)), Case(ALL_REDUCE, 2, 4000), "ordinary", None)
        made.run(1)
        with pytest.raises(FerroError, match="values are wrong"):
            made.check(1)


def test_what_a_system_does_not_have_it_refuses():
    with pytest.raises(BackendUnavailableError, match="alone has no barrier"):
        task.make(Alone(), Case(BARRIER), "ordinary", None)
    made = task.make(Alone(), Case(SEND, 2, 64), "ordinary", None)
    with pytest.raises(BackendUnavailableError, match="alone has no send"):
        made.run(1)
    with pytest.raises(BackendUnavailableError, match="registered"):
        task.make(Alone(), Case(ALL_REDUCE, 2, 64), "registered", None)
    with pytest.raises(UsageError, match="between 2 ranks"):
        task.make(Alone(3), Case(ROUND_TRIP, 3, 64), "ordinary", None)
    with pytest.raises(UsageError, match="no operation 'dance'"):
        task.make(Alone(), Case("dance"), "ordinary", None)


class InWorld(FerrorpcRunner):
    """A rank of a group that is there already. `spoil` changes what the operation left."""

    def __init__(self, group, spoil=lambda array: None):
        self.group, self.rank, self.size = group, group.rank, group.size
        self.spoil = spoil

    def exchange(self, operation, source, target):
        act = super().exchange(operation, source, target)

        def spoiled():
            act()
            self.spoil(target)

        return spoiled


@pytest.mark.parametrize("operation", EXCHANGES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_right_moves_pass_and_one_wrong_element_is_found(operation, size):
    count = 5 * 12

    def body(group):
        right = task.make(InWorld(group), Case(operation, size, 4 * count), "ordinary", None)
        right.run(2)
        right.check(2)
        right.verify()
        right.refill()
        with pytest.raises(FerroError, match="values are wrong"):
            task.make(InWorld(group, spoil_at(7)), Case(operation, size, 4 * count), "ordinary", None).verify()
        for place in (0, -1):
            wrong = task.make(InWorld(group, spoil_at(place)), Case(operation, size, 4 * count), "ordinary", None)
            wrong.run(1)
            with pytest.raises(FerroError, match="values are wrong"):
                wrong.check(1)
        return right.arrays_bytes

    wanted = {BROADCAST: 4 * count, ALL_TO_ALL: 8 * count}.get(operation, 4 * count + 4 * count // size)
    assert run_world(size, body) == [wanted] * size


def test_an_array_with_fewer_elements_than_ranks_is_not_moved():
    with pytest.raises(UsageError, match="fewer elements than ranks"):
        task.make(Alone(3), Case(ALL_TO_ALL, 3, 8), "ordinary", None)


class Wire(Alone):
    """A send that arrives as `change` makes it."""

    def __init__(self, rank, change):
        super().__init__()
        self.rank = rank
        self.change = change
        self.sent = []

    def send(self, array, count):
        self.sent.append(count)

    def receive(self, array, count):
        return self.change(count)


def test_a_send_is_checked_where_it_arrives():
    case = Case(SEND, 2, 16)
    right = task.make(Wire(1, lambda count: np.full(4, 2.0, np.float32)), case, "ordinary", None)
    right.refill()  # the first block's value is 2, the second's 3
    right.run(5)
    with pytest.raises(FerroError, match=r"2\.0 for 3\.0"):
        right.check(5)
    pattern = np.array([1, 2, 3, 4], np.float32)
    task.make(Wire(1, lambda count: pattern), case, "ordinary", None).verify()
    with pytest.raises(FerroError, match="wrong"):
        task.make(Wire(1, lambda count: pattern[::-1].copy()), case, "ordinary", None).verify()


def test_a_round_trip_answers_each_and_a_send_all_at_once():
    for operation, counts in ((SEND, [3]), (ROUND_TRIP, [1, 1, 1])):
        runner = Wire(0, None)
        task.make(runner, Case(operation, 2, 64), "ordinary", None).run(3)
        assert runner.sent == counts
