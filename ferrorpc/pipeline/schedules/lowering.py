"""Lowers a pipeline's actions: to explicit messages, and to a program that can be simulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from ferrorpc.pipeline.actions import Action, Kind
from ferrorpc.pipeline.schedules.edges import Edges
from ferrorpc.plans.program import Need, Program, Task

Rows: TypeAlias = Sequence[Sequence[Action]]
Link: TypeAlias = tuple[int, int]
"""(from rank, to rank)."""
Message: TypeAlias = tuple[Action, int]
"""A send, and the piece that it sends to."""

KIND_LABELS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward input",
    Kind.BACKWARD_WEIGHT: "backward weight",
}
"""The kinds of tasks in pictures."""
_GIVES_GRADIENT = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def sources_of(each: Action, edges: Edges) -> list[int]:
    """The pieces whose results an action needs: of their forward for a forward, of their backward for a backward."""
    if each.kind is Kind.FORWARD:
        return edges.before(each.stage)
    return edges.after(each.stage) if each.kind in _GIVES_GRADIENT else []


def targets_of(each: Action, edges: Edges) -> list[int]:
    """The pieces that need an action's result, or what a send sends."""
    if each.kind in (Kind.FORWARD, Kind.SEND_FORWARD):
        return edges.after(each.stage)
    return edges.before(each.stage) if each.kind in (*_GIVES_GRADIENT, Kind.SEND_BACKWARD) else []


def has_messages(rows: Rows) -> bool:
    """Whether the rows have sends and receives among their actions."""
    return any(not each.kind.computes for row in rows for each in row)


def with_messages(rows: Rows, placement: Sequence[int], edges: Edges) -> list[list[Action]]:
    """The rows with sends and receives added; rows that have them are returned as they are."""
    return [list(row) for row in rows] if has_messages(rows) else [list(_with_messages(row, placement, edges)) for row in rows]


def _with_messages(row: Sequence[Action], placement: Sequence[int], edges: Edges) -> Iterator[Action]:
    for each in row:
        rank, forward = placement[each.stage], each.kind is Kind.FORWARD
        if any(placement[source] != rank for source in sources_of(each, edges)):
            yield Action(each.stage, Kind.RECV_FORWARD if forward else Kind.RECV_BACKWARD, each.microbatch)
        yield each
        if any(placement[target] != rank for target in targets_of(each, edges)):
            yield Action(each.stage, Kind.SEND_FORWARD if forward else Kind.SEND_BACKWARD, each.microbatch)


class Lowering:
    """The program of a schedule: a lane for each rank, and one for each link between two ranks.

    Args:
        rows: with sends and receives; without them, results are available on all ranks at once.
        placement: the rank of each piece.
        edges: between the pieces.
        durations: (kind, piece) -> time units.
        latency, transfer: of a message, in time units: how long it travels, and how long it occupies its link.
        credits: how many messages may be in flight from one rank to another; None for any number.
    """

    def __init__(
        self,
        rows: Rows,
        placement: Sequence[int],
        edges: Edges,
        durations: dict[tuple[Kind, int], float],
        latency: float = 0.0,
        transfer: float = 0.0,
        credits: int | None = None,
    ) -> None:
        self._rows = rows
        self._placement = placement
        self._edges = edges
        self._durations = durations
        self._latency = latency
        self._transfer_time = transfer
        self._credits = credits
        self._links: dict[Link, list[Message]] = {}
        self._chunk = [placement[:piece].count(rank) for piece, rank in enumerate(placement)]
        """For each piece, which chunk of its rank it is."""
        self._index_tasks()

    def program(self) -> Program:
        """The program. Its first lanes are the ranks."""
        tasks = [self._task(each, rank) for rank, row in enumerate(self._rows) for each in row]
        lanes = [f"rank {rank}" for rank in range(len(self._rows))]
        for (source, target), messages in self._links.items():
            lanes.append(f"rank {source} to {target}")
            tasks += [self._transfer_task(send, len(lanes) - 1) for send, _ in messages]
        return Program(tuple(lanes), tuple(tasks))

    def _index_tasks(self) -> None:
        actions = [each for row in self._rows for each in row]
        self._index = {each: index for index, each in enumerate(actions)}
        for each in actions:
            for target in self._remote_targets(each) if each.kind.sends else ():
                self._links.setdefault(self._link(each, target), []).append((each, target))
        messages = (message for link in self._links.values() for message in link)
        self._transfer_index = {message: index for index, message in enumerate(messages, len(actions))}

    def _remote_targets(self, send: Action) -> list[int]:
        own = self._placement[send.stage]
        return [target for target in targets_of(send, self._edges) if self._placement[target] != own]

    def _link(self, send: Action, target: int) -> Link:
        return self._placement[send.stage], self._placement[target]

    def _task(self, each: Action, rank: int) -> Task:
        duration = self._durations.get((each.kind, each.stage), 0.0)
        kind, shade = KIND_LABELS.get(each.kind, "message"), self._chunk[each.stage]
        return Task(str(each), rank, duration, tuple(self._needs(each)), kind, str(each.microbatch), shade)

    def _transfer_task(self, send: Action, lane: int) -> Task:
        return Task(f"transfer of {send}", lane, self._transfer_time, (Need(self._index[send]),), "message")

    def _needs(self, each: Action) -> Iterator[Need]:
        if each.kind.sends:
            yield from self._credit_needs(each)
        elif each.kind is Kind.BACKWARD_WEIGHT:
            yield from self._result_of(Action(each.stage, Kind.BACKWARD_INPUT, each.microbatch))
        elif each.kind.computes:
            if each.kind is not Kind.FORWARD:
                yield from self._result_of(Action(each.stage, Kind.FORWARD, each.microbatch))
            yield from self._input_needs(each)

    def _input_needs(self, each: Action) -> Iterator[Need]:
        """The messages, and the results of other pieces on the same rank, that an action waits for."""
        forward = each.kind is Kind.FORWARD
        direction = Kind.SEND_FORWARD if forward else Kind.SEND_BACKWARD
        for source in sources_of(each, self._edges):
            transfer = self._transfer_index.get((Action(source, direction, each.microbatch), each.stage))
            if transfer is not None:
                yield Need(transfer, self._latency)
            else:
                yield from self._pass_of(source, forward, each.microbatch)

    def _pass_of(self, stage: int, forward: bool, microbatch: int) -> Iterator[Need]:
        """The forward of a stage; or its backward, whole or of the input, whichever there is."""
        for kind in (Kind.FORWARD,) if forward else _GIVES_GRADIENT:
            yield from self._result_of(Action(stage, kind, microbatch))

    def _result_of(self, other: Action) -> Iterator[Need]:
        if other in self._index:
            yield Need(self._index[other])

    def _credit_needs(self, send: Action) -> Iterator[Need]:
        """With n credits a send waits until the message n places before it on its link has been used."""
        if self._credits is None:
            return
        for target in self._remote_targets(send):
            messages = self._links[self._link(send, target)]
            place = messages.index((send, target)) - self._credits
            if place >= 0:
                used, user = messages[place]
                yield from self._pass_of(user, used.kind is Kind.SEND_FORWARD, used.microbatch)
