"""From a pipeline's actions to messages, and to a program that can be simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from ferrorpc.pipeline.actions import Action, Kind
from ferrorpc.pipeline.schedules.edges import Edges
from ferrorpc.plans.program import Need, Program, Task

Rows: TypeAlias = Sequence[Sequence[Action]]
Way: TypeAlias = tuple[int, int]
"""From rank, to rank."""
Message: TypeAlias = tuple[Action, int]
"""A send, and the piece that takes what it sends."""

NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward input",
    Kind.BACKWARD_WEIGHT: "backward weight",
}
"""The kinds of tasks, as pictures call them."""
_GIVES_GRADIENT = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def sources_of(each: Action, edges: Edges) -> list[int]:
    """The pieces whose results an action waits for: of the forward for a forward, of the backward for a backward."""
    if each.kind is Kind.FORWARD:
        return edges.before(each.stage)
    return edges.after(each.stage) if each.kind in _GIVES_GRADIENT else []


def takers_of(each: Action, edges: Edges) -> list[int]:
    """The pieces that wait for an action's result, or for what a send sends."""
    if each.kind in (Kind.FORWARD, Kind.SEND_FORWARD):
        return edges.after(each.stage)
    return edges.before(each.stage) if each.kind in (*_GIVES_GRADIENT, Kind.SEND_BACKWARD) else []


def message_after(each: Action, placement: Sequence[int], edges: Edges) -> Action | None:
    """The send that follows an action, where its result is wanted on another rank."""
    if not any(placement[taker] != placement[each.stage] for taker in takers_of(each, edges)):
        return None
    kind = Kind.SEND_FORWARD if each.kind is Kind.FORWARD else Kind.SEND_BACKWARD
    return Action(each.stage, kind, each.microbatch)


def message_before(each: Action, placement: Sequence[int], edges: Edges) -> Action | None:
    """The receive that precedes an action, where what it needs comes from another rank."""
    if not any(placement[source] != placement[each.stage] for source in sources_of(each, edges)):
        return None
    kind = Kind.RECV_FORWARD if each.kind is Kind.FORWARD else Kind.RECV_BACKWARD
    return Action(each.stage, kind, each.microbatch)


def has_messages(rows: Rows) -> bool:
    """Whether messages are spelled out in them."""
    return any(not each.kind.computes for row in rows for each in row)


def with_messages(rows: Rows, placement: Sequence[int], edges: Edges) -> list[list[Action]]:
    """The rows with every message spelled out; those that are so already, as they are."""
    return [list(row) for row in rows] if has_messages(rows) else [list(_spelled_out(row, placement, edges)) for row in rows]


def _spelled_out(row: Sequence[Action], placement: Sequence[int], edges: Edges) -> Iterator[Action]:
    for each in row:
        before, after = message_before(each, placement, edges), message_after(each, placement, edges)
        yield from [each for each in (before, each, after) if each is not None]


class Lowering:
    """The program of a schedule: a lane for each rank, and one for each way between two ranks.

    Args:
        rows: with messages spelled out, or without any: then results are there for all ranks at once.
        placement: the rank of each piece.
        edges: between the pieces.
        durations: (kind, piece) -> time units.
        latency, transfer: of a message, in time units.
        credits: messages that may be under way from one rank to another; None for any number.
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
        self._transfer = transfer
        self._credits = credits
        self._index: dict[Action, int] = {}
        self._ways: dict[Way, list[Message]] = {}
        self._chunk = self._chunks()
        self._number()

    def program(self) -> Program:
        """The program; the first lanes are the ranks."""
        tasks = [self._task(each, rank) for rank, row in enumerate(self._rows) for each in row]
        lanes = [f"rank {rank}" for rank in range(len(self._rows))]
        for (source, target), messages in self._ways.items():
            lanes.append(f"rank {source} to {target}")
            tasks += [self._travel(send, len(lanes) - 1) for send, _ in messages]
        return Program(tuple(lanes), tuple(tasks))

    def _chunks(self) -> list[int]:
        """Which chunk of its rank each piece is."""
        held: Counter[int] = Counter()
        chunks = []
        for rank in self._placement:
            chunks.append(held[rank])
            held[rank] += 1
        return chunks

    def _number(self) -> None:
        index = 0
        for row in self._rows:
            for each in row:
                self._index[each] = index
                index += 1
        for row in self._rows:
            for each in row:
                for taker in self._remote_takers(each) if each.kind.sends else ():
                    self._ways.setdefault(self._way(each, taker), []).append((each, taker))
        messages = (message for way in self._ways.values() for message in way)
        self._travels = {message: index + place for place, message in enumerate(messages)}

    def _remote_takers(self, send: Action) -> list[int]:
        own = self._placement[send.stage]
        return [taker for taker in takers_of(send, self._edges) if self._placement[taker] != own]

    def _way(self, send: Action, taker: int) -> Way:
        return self._placement[send.stage], self._placement[taker]

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
        """What an action waits for: messages, and results of other pieces on the same rank."""
        forward = each.kind is Kind.FORWARD
        direction = Kind.SEND_FORWARD if forward else Kind.SEND_BACKWARD
        for source in sources_of(each, self._edges):
            travel = self._travels.get((Action(source, direction, each.microbatch), each.stage))
            if travel is not None:
                yield Need(travel, self._latency)
                continue
            for kind in (Kind.FORWARD,) if forward else _GIVES_GRADIENT:
                yield from self._of(Action(source, kind, each.microbatch))

    def _of(self, other: Action) -> Iterator[Need]:
        if other in self._index:
            yield Need(self._index[other])

    def _credit(self, send: Action) -> Iterator[Need]:
        """With credits a send waits until the message so many before it on its way has been used."""
        if self._credits is None:
            return
        for taker in self._remote_takers(send):
            messages = self._ways[self._way(send, taker)]
            place = messages.index((send, taker)) - self._credits
            if place >= 0:
                yield from self._of(self._user(*messages[place]))

    def _user(self, send: Action, taker: int) -> Action:
        if send.kind is Kind.SEND_FORWARD:
            return Action(taker, Kind.FORWARD, send.microbatch)
        kinds = (kind for kind in _GIVES_GRADIENT if Action(taker, kind, send.microbatch) in self._index)
        return Action(taker, next(kinds, Kind.BACKWARD), send.microbatch)
