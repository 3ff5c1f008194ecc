"""From a pipeline's actions to messages, and to a program that can be simulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from ferrorpc.pipeline.actions import Action, Kind
from ferrorpc.plans.program import Need, Program, Task

Rows: TypeAlias = Sequence[Sequence[Action]]
Edge: TypeAlias = tuple[int, int]
"""From rank, to rank."""

NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward input",
    Kind.BACKWARD_WEIGHT: "backward weight",
}
"""The kinds of tasks, as pictures call them."""
_GIVES_GRADIENT = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def source_of(each: Action) -> tuple[Kind, int] | None:
    """(direction, stage) of the message an action waits for; None where it needs nobody else's result.

    The direction is that of the send: forward for activations, backward for gradients.
    """
    if each.kind is Kind.FORWARD and each.stage > 0:
        return Kind.SEND_FORWARD, each.stage - 1
    if each.kind in _GIVES_GRADIENT:
        return Kind.SEND_BACKWARD, each.stage + 1
    return None


def message_after(each: Action, placement: Sequence[int]) -> Action | None:
    """The send that follows an action, where its result is wanted on another rank."""
    target = -1
    if each.kind is Kind.FORWARD:
        target = each.stage + 1
    elif each.kind in _GIVES_GRADIENT:
        target = each.stage - 1
    if not 0 <= target < len(placement) or placement[target] == placement[each.stage]:
        return None
    kind = Kind.SEND_FORWARD if each.kind is Kind.FORWARD else Kind.SEND_BACKWARD
    return Action(each.stage, kind, each.microbatch)


def message_before(each: Action, placement: Sequence[int]) -> Action | None:
    """The receive that precedes an action, where what it needs comes from another rank."""
    source = source_of(each)
    if source is None or source[1] >= len(placement) or placement[source[1]] == placement[each.stage]:
        return None
    kind = Kind.RECV_FORWARD if source[0] is Kind.SEND_FORWARD else Kind.RECV_BACKWARD
    return Action(each.stage, kind, each.microbatch)


def has_messages(rows: Rows) -> bool:
    """Whether messages are spelled out in them."""
    return any(not each.kind.computes for row in rows for each in row)


def with_messages(rows: Rows, placement: Sequence[int]) -> list[list[Action]]:
    """The rows with every message spelled out; those that are so already, as they are."""
    return [list(row) for row in rows] if has_messages(rows) else [list(_spelled_out(row, placement)) for row in rows]


def _spelled_out(row: Sequence[Action], placement: Sequence[int]) -> Iterator[Action]:
    for each in row:
        before, after = message_before(each, placement), message_after(each, placement)
        yield from [each for each in (before, each, after) if each is not None]


class Lowering:
    """The program of a schedule: a lane for each rank, and one for each way between two ranks.

    Args:
        rows: with messages spelled out, or without any: then results are there for all ranks at once.
        placement: the rank of each piece.
        durations: (kind, piece) -> time units.
        latency, transfer: of a message, in time units.
        credits: messages that may be under way from one rank to another; None for any number.
    """

    def __init__(
        self,
        rows: Rows,
        placement: Sequence[int],
        durations: dict[tuple[Kind, int], float],
        latency: float = 0.0,
        transfer: float = 0.0,
        credits: int | None = None,
    ) -> None:
        self._rows = rows
        self._placement = placement
        self._durations = durations
        self._latency = latency
        self._transfer = transfer
        self._credits = credits
        self._index: dict[Action, int] = {}
        self._ways: dict[Edge, list[Action]] = {}
        self._chunk = self._chunks()
        self._number()

    def program(self) -> Program:
        """The program; the first lanes are the ranks."""
        tasks = [self._task(each, rank) for rank, row in enumerate(self._rows) for each in row]
        lanes = [f"rank {rank}" for rank in range(len(self._rows))]
        for (source, target), sends in self._ways.items():
            lanes.append(f"rank {source} to {target}")
            tasks += [self._travel(send, len(lanes) - 1) for send in sends]
        return Program(tuple(lanes), tuple(tasks))

    def _chunks(self) -> list[int]:
        """Which chunk of its rank each piece is."""
        return [sum(1 for other in self._placement[:stage] if other == rank) for stage, rank in enumerate(self._placement)]

    def _number(self) -> None:
        index = 0
        for row in self._rows:
            for each in row:
                self._index[each] = index
                index += 1
        for row in self._rows:
            for each in row:
                if each.kind.sends:
                    self._ways.setdefault(self._way(each), []).append(each)
        self._travels = {send: index + place for place, send in enumerate(each for way in self._ways.values() for each in way)}

    def _way(self, send: Action) -> Edge:
        target = send.stage + (1 if send.kind is Kind.SEND_FORWARD else -1)
        return self._placement[send.stage], self._placement[target]

    def _task(self, each: Action, rank: int) -> Task:
        duration = self._durations.get((each.kind, each.stage), 0.0)
        kind, shade = NAMES.get(each.kind, "message"), self._chunk[each.stage]
        return Task(str(each), rank, duration, tuple(self._needs(each)), kind, str(each.microbatch), shade)

    def _travel(self, send: Action, lane: int) -> Task:
        return Task(f"way of {send}", lane, self._transfer, (Need(self._index[send]),), "message")

    def _needs(self, each: Action) -> Iterator[Need]:
        if each.kind.sends:
            yield from self._credit(each)
        elif each.kind is Kind.BACKWARD_WEIGHT:
            yield from self._of(Action(each.stage, Kind.BACKWARD_INPUT, each.microbatch))
        elif each.kind.computes:
            if each.kind is not Kind.FORWARD:
                yield from self._of(Action(each.stage, Kind.FORWARD, each.microbatch))
            yield from self._arrival(each)

    def _arrival(self, each: Action) -> Iterator[Need]:
        """What an action waits for: a message, or the result of another piece on the same rank."""
        source = source_of(each)
        if source is None:
            return
        direction, stage = source
        travel = self._travels.get(Action(stage, direction, each.microbatch))
        if travel is not None:
            yield Need(travel, self._latency)
        elif direction is Kind.SEND_FORWARD:
            yield from self._of(Action(stage, Kind.FORWARD, each.microbatch))
        else:
            for kind in _GIVES_GRADIENT:
                yield from self._of(Action(stage, kind, each.microbatch))

    def _of(self, other: Action) -> Iterator[Need]:
        if other in self._index:
            yield Need(self._index[other])

    def _credit(self, send: Action) -> Iterator[Need]:
        """With credits a send waits until the message so many before it on its way has been used."""
        if self._credits is None:
            return
        sends = self._ways[self._way(send)]
        place = sends.index(send) - self._credits
        if place >= 0:
            yield from self._of(self._user(sends[place]))

    def _user(self, send: Action) -> Action:
        if send.kind is Kind.SEND_FORWARD:
            return Action(send.stage + 1, Kind.FORWARD, send.microbatch)
        kinds = (kind for kind in _GIVES_GRADIENT if Action(send.stage - 1, kind, send.microbatch) in self._index)
        return Action(send.stage - 1, next(kinds, Kind.BACKWARD), send.microbatch)
