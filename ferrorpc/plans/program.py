"""A program: tasks on lanes, each with a duration and with what it needs first.

Plans of every sort are lowered to a program to be simulated and drawn: a pipeline schedule, a collective's steps. A lane does
its tasks one at a time, in the order of the program; tasks of different lanes depend on each other only by needs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Need:
    """Another task that must have ended.

    Attributes:
        task: its index in the program.
        delay: time units between its end and the moment this need is met, such as the latency of a message.
    """

    task: int
    delay: float = 0.0


@dataclass(frozen=True, slots=True)
class Task:
    """A task of one lane.

    Attributes:
        name: in full, as in tables and traces: "2F0".
        lane: index of the lane that does it.
        duration: time units, 0 or more.
        needs: what must have ended before it starts.
        kind: of task; pictures give each kind a colour.
        text: in its box in pictures.
        shade: 0, 1, ...: distinguishes tasks of one kind, such as the chunks of a stage.
    """

    name: str
    lane: int
    duration: float
    needs: tuple[Need, ...] = ()
    kind: str = ""
    text: str = ""
    shade: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    """Tasks and their lanes.

    Attributes:
        lanes: their names.
        tasks: each lane does its own in this order. A need may point at a task that is listed later.
    """

    lanes: tuple[str, ...]
    tasks: tuple[Task, ...]
