"""Programs, when their tasks run, and what happens when they cannot."""

from __future__ import annotations

import random

import pytest

from ferrorpc.plans.program import Need, Program, Task
from ferrorpc.plans.simulate import blocked, simulate

LANES = ("left", "right")


def times(program: Program) -> dict[str, tuple[float, float]]:
    return {span.name: (span.start, span.stop) for span in simulate(program).spans}


def test_a_lane_does_its_tasks_one_after_the_other():
    program = Program(("only",), (Task("a", 0, 2.0), Task("b", 0, 3.0)))
    assert times(program) == {"a": (0.0, 2.0), "b": (2.0, 5.0)}


def test_a_task_waits_for_what_it_needs_and_for_the_way_between():
    program = Program(LANES, (Task("a", 0, 2.0), Task("b", 1, 1.0, (Need(0, delay=0.5),))))
    assert times(program)["b"] == (2.5, 3.5)


def test_a_lane_is_first_in_first_out_even_when_a_later_task_could_start():
    program = Program(LANES, (Task("slow", 0, 5.0), Task("waits", 1, 1.0, (Need(0),)), Task("free", 1, 1.0)))
    assert times(program)["free"] == (6.0, 7.0)


def test_a_need_may_point_at_a_task_that_is_listed_later():
    program = Program(LANES, (Task("second", 0, 1.0, (Need(1),)), Task("first", 1, 4.0)))
    assert times(program)["second"] == (4.0, 5.0)


def test_a_circle_blocks_every_lane_of_it_and_what_comes_before_has_run():
    tasks = (
        Task("a", 0, 1.0),
        Task("b", 0, 1.0, (Need(4),)),
        Task("c", 0, 1.0),
        Task("d", 1, 1.0, (Need(2),)),
        Task("e", 1, 1.0),
    )
    program = Program(LANES, tasks)
    assert blocked(program) == {0: ("b", ("e",)), 1: ("d", ("c",))}
    assert times(program) == {"a": (0.0, 1.0)}


def test_a_program_that_ends_blocks_nobody():
    assert blocked(Program(LANES, (Task("a", 0, 1.0), Task("b", 1, 1.0, (Need(0),))))) == {}


@pytest.mark.parametrize("seed", range(20))
def test_any_program_keeps_the_rules_and_never_waits_longer_than_it_must(seed: int):
    """A random program: every start is the latest of its lane's previous stop and of its needs, and nothing later."""
    draw = random.Random(seed)
    tasks = []
    for index in range(60):
        needs = tuple(Need(other, draw.random()) for other in draw.sample(range(index), min(index, draw.randrange(3))))
        tasks.append(Task(f"t{index}", draw.randrange(4), draw.random(), needs))
    found = times(Program(("a", "b", "c", "d"), tuple(tasks)))
    free = [0.0] * 4
    for task in tasks:
        start, stop = found[task.name]
        met = [found[tasks[need.task].name][1] + need.delay for need in task.needs]
        assert start == pytest.approx(max([free[task.lane], *met]))
        assert stop - start == pytest.approx(task.duration)
        free[task.lane] = stop
