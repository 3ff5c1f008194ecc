"""Simulates a program: when each task runs if nothing waits longer than it must.

Lanes are first in, first out, so every task starts when its lane is free and its needs are met. Neither depends on the order
in which tasks are visited, so one topological sweep is exact, and costs O(tasks + needs). Tasks that the sweep cannot reach are
deadlocked.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ferrorpc.plans.program import Program
from ferrorpc.plans.span import Span
from ferrorpc.plans.timeline import Timeline


class Blocked(NamedTuple):
    """The task that a deadlocked lane cannot start, and the unreachable tasks that this one needs."""

    task: str
    needs: tuple[str, ...]


def simulate(program: Program) -> Timeline:
    """The program's timeline, without the tasks that are `blocked` or behind one that is. It begins at 0."""
    spans = [
        Span(task.name, task.lane, start, start + task.duration, task.kind, task.text, task.shade)
        for task, start in zip(program.tasks, _starts(program), strict=True)
        if start is not None
    ]
    return Timeline(program.lanes, spans)


def blocked(program: Program) -> dict[int, Blocked]:
    """What each deadlocked lane, by its index, cannot start; nothing where the program runs to its end."""
    starts = _starts(program)
    found: dict[int, Blocked] = {}
    for task, start in zip(program.tasks, starts, strict=True):
        if start is None and task.lane not in found:
            needs = tuple(program.tasks[need.task].name for need in task.needs if starts[need.task] is None)
            found[task.lane] = Blocked(task.name, needs)
    return dict(sorted(found.items()))


def _starts(program: Program) -> list[float | None]:
    """The start of each task; None for unreachable ones."""
    tasks = program.tasks
    dependants: list[list[int]] = [[] for _ in tasks]
    missing = [len(task.needs) for task in tasks]
    last: dict[int, int] = {}
    for index, task in enumerate(tasks):
        if task.lane in last:
            dependants[last[task.lane]].append(index)
            missing[index] += 1
        last[task.lane] = index
        for need in task.needs:
            dependants[need.task].append(index)
    starts: list[float | None] = [None] * len(tasks)
    free = [0.0] * len(program.lanes)
    ready = deque(index for index, count in enumerate(missing) if count == 0)
    while ready:
        index = ready.popleft()
        task = tasks[index]
        start = free[task.lane]
        for need in task.needs:
            start = max(start, (starts[need.task] or 0.0) + tasks[need.task].duration + need.delay)
        starts[index] = start
        free[task.lane] = start + task.duration
        for other in dependants[index]:
            missing[other] -= 1
            if missing[other] == 0:
                ready.append(other)
    return starts
