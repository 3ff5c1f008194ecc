"""The messages of one step on one rank: sent without waiting, received a little ahead of their use.

Every message has a tag of its own, made from its wire, so the order in which messages arrive means nothing, and no order of
actions can make two ranks wait for each other's sends. Between GPUs arrays may take a way of their own (direct.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ferrorpc.arrays.base import Kind as ArrayKind
from ferrorpc.errors import CollectiveMismatchError, CollectiveTimeoutError
from ferrorpc.group import ProcessGroup
from ferrorpc.operations.expected import Expected
from ferrorpc.pipeline import direct
from ferrorpc.pipeline.messages import Letter, Message, pack, pack_apart, read
from ferrorpc.pipeline.schedules.lowering import Way
from ferrorpc.pipeline.wire import Sort, Wire
from ferrorpc.work import Work

NO_LANES: Final[Mapping[Way, ProcessGroup]] = {}
NO_ORDERS: Final[Mapping[int, Iterable[Wire]]] = {}
AHEAD: Final = 2
"""Messages that are expected before their turn: long ones then travel while the rank computes."""


class Exchange:
    """One step's messages.

    Args:
        group: the pipeline's ranks.
        placement: the rank of each piece.
        arrivals: what comes from other ranks, in the order in which it is used.
        pipeline: names the pipeline in messages.
        step: counts the pipeline's steps.
        seconds: how long one message may be waited for.
        lanes: for arrays between GPUs, to and from this rank.
        orders: by the rank that sends, what comes on its lane, in the order in which it sends it.
    """

    def __init__(
        self,
        group: ProcessGroup,
        placement: Sequence[int],
        arrivals: Iterable[Wire],
        pipeline: str,
        step: int,
        seconds: float,
        lanes: Mapping[Way, ProcessGroup] = NO_LANES,
        orders: Mapping[int, Iterable[Wire]] = NO_ORDERS,
    ) -> None:
        self._group = group
        self._placement = placement
        self._pipeline = pipeline
        self._step = step
        self._seconds = seconds
        self._waiting = deque(arrivals)
        self._expected: dict[Wire, Expected] = {}
        self._sends: deque[tuple[Wire, Work[Any]]] = deque()
        self._outgoing = {target: lane for (_, target), lane in lanes.items() if target != group.rank}
        self._incoming = {
            source: direct.Incoming(lane, orders[source]) for (source, _), lane in lanes.items() if source != group.rank
        }
        self._expect()

    def send(self, wire: Wire, value: Any) -> None:
        """Sends a value on its way; it is copied, so it may change at once."""
        target, tag = self._placement[wire.target], wire.tag(len(self._placement))
        lane = None if wire.sort is Sort.TIED else self._outgoing.get(target)
        letter = self._letter(wire)
        message, arrays = (pack(letter, value), None) if lane is None else pack_apart(letter, value)
        works = [self._group.send(message, target, tag, async_op=True, timeout=direct.PATIENCE_SECONDS)]
        if lane is not None and arrays is not None:
            works.append(direct.send(lane, arrays))
        self._sends += [(wire, _seen(work)) for work in works if not work.done()]
        while self._sends and self._sends[0][1].done():  # which keeps what it sent
            self._sends.popleft()

    def receive(self, wire: Wire, kind: ArrayKind) -> Any:
        """The value of a wire, with arrays of this kind. Wires are received in the order that was announced.

        Raises:
            CollectiveTimeoutError: it did not come in time.
            CollectiveMismatchError: what came belongs to another step or pipeline.
        """
        source = self._placement[wire.source]
        incoming = None if wire.sort is Sort.TIED else self._incoming.get(source)
        if incoming is None:
            message, work = self._read(wire), None
        else:
            message, work = incoming.reach(wire, kind, self._read)
        if work is None:
            return message.value(message.whole, kind)
        return message.value(self._awaited(work, f"{wire} of rank {self._group.world_ranks[source]}", source), kind)

    def _read(self, wire: Wire) -> Message:
        """The message of a wire."""
        source = self._placement[wire.source]
        if wire not in self._expected:  # a sender's order is another one than that of use
            self._waiting.remove(wire)
            self._expected[wire] = self._expect_one(wire)
        expected = self._expected.pop(wire)
        try:
            raw = expected.take(self._seconds)
        except CollectiveTimeoutError as error:
            if not expected.may_come:
                raise
            raise self._late(f"{wire} of rank {self._group.world_ranks[source]}", source) from error
        self._expect()
        message, wanted = read(raw), self._letter(wire)
        if message.letter != wanted:
            ranks = self._group.world_ranks
            signatures = {ranks[self._group.rank]: f"waits for {_told(wanted)}", ranks[source]: _told(message.letter)}
            mismatch = CollectiveMismatchError(signatures)
            expected.refuse(mismatch)
            raise mismatch
        return message

    def finish(self) -> None:
        """Returns when everything that was sent has left. Raises CollectiveTimeoutError."""
        for wire, work in self._sends:
            target = self._placement[wire.target]
            self._awaited(work, f"rank {self._group.world_ranks[target]} to take {wire}", target)

    def abandon(self) -> None:
        """The step failed: nobody takes what is still expected."""
        for expected in self._expected.values():
            expected.forget()

    def _expect(self) -> None:
        while self._waiting and len(self._expected) < AHEAD:
            wire = self._waiting.popleft()
            self._expected[wire] = self._expect_one(wire)

    def _expect_one(self, wire: Wire) -> Expected:
        return self._group.expect(self._placement[wire.source], wire.tag(len(self._placement)))

    def _awaited(self, work: Work[Any], what: str, peer: int) -> Any:
        try:
            return work.wait(self._seconds)
        except CollectiveTimeoutError as error:
            if work.done():
                raise
            raise self._late(what, peer) from error

    def _letter(self, wire: Wire) -> Letter:
        return Letter(self._pipeline, self._step, str(wire))

    def _late(self, what: str, peer: int) -> CollectiveTimeoutError:
        message = f"this rank of the pipeline waited {self._seconds:g} s for {what}"
        return CollectiveTimeoutError([self._group.world_ranks[peer]], message)


def _seen(work: Work[Any]) -> Work[Any]:
    """Where the step fails, its other messages fail with it, and nobody needs to hear of each."""

    def look() -> None:
        work.exception()

    work.on_done(look)
    return work


def _told(letter: Letter) -> str:
    return f"{letter.wire} in step {letter.step} of pipeline {letter.pipeline}"
