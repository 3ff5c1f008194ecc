"""The messages of one step on one rank: sent without waiting, received a little ahead of their use.

Every message has a tag of its own, made from its wire, so the order in which messages arrive means nothing, and no order of
actions can make two ranks wait for each other's sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from ferrorpc.arrays.base import Kind as ArrayKind
from ferrorpc.errors import CollectiveMismatchError, CollectiveTimeoutError
from ferrorpc.operations.expected import Expected
from ferrorpc.pipeline.messages import Letter, pack, unpack
from ferrorpc.pipeline.wire import Wire
from ferrorpc.work import Work

if TYPE_CHECKING:
    from ferrorpc.group import ProcessGroup

AHEAD: Final = 2
"""Messages that are expected before their turn: long ones then travel while the rank computes."""
PATIENCE_SECONDS: Final = 30 * 24 * 3600.0
"""Deadline of the sends themselves. A rank that waits does so with its own, shorter one."""


class Exchange:
    """One step's messages.

    Args:
        group: the pipeline's ranks.
        placement: the rank of each piece.
        arrivals: what comes from other ranks, in the order in which it is used.
        pipeline: names the pipeline in messages.
        step: counts the pipeline's steps.
        seconds: how long one message may be waited for.
    """

    def __init__(
        self,
        group: ProcessGroup,
        placement: Sequence[int],
        arrivals: Iterable[Wire],
        pipeline: str,
        step: int,
        seconds: float,
    ) -> None:
        self._group = group
        self._placement = placement
        self._pipeline = pipeline
        self._step = step
        self._seconds = seconds
        self._waiting = deque(arrivals)
        self._expected: dict[Wire, Expected] = {}
        self._sends: list[tuple[Wire, Work[Any]]] = []
        self._expect()

    def send(self, wire: Wire, value: Any) -> None:
        """Sends a value on its way; it is copied, so it may change at once."""
        message = pack(self._letter(wire), value)
        target, tag = self._placement[wire.target], wire.tag(len(self._placement))
        work = self._group.send(message, target, tag, async_op=True, timeout=PATIENCE_SECONDS)
        if not work.done():
            self._sends.append((wire, _seen(work)))

    def receive(self, wire: Wire, kind: ArrayKind) -> Any:
        """The value of a wire, with arrays of this kind. Wires are received in the order that was announced.

        Raises:
            CollectiveTimeoutError: it did not come in time.
            CollectiveMismatchError: what came belongs to another step or pipeline.
        """
        source = self._placement[wire.source]
        expected = self._expected.pop(wire)
        try:
            message = expected.take(self._seconds)
        except CollectiveTimeoutError as error:
            if not expected.may_come:
                raise
            raise self._late(f"{wire} of rank {self._group.world_ranks[source]}", source) from error
        self._expect()
        letter, value = unpack(message, kind)
        wanted = self._letter(wire)
        if letter != wanted:
            ranks = self._group.world_ranks
            signatures = {ranks[self._group.rank]: f"waits for {_told(wanted)}", ranks[source]: _told(letter)}
            mismatch = CollectiveMismatchError(signatures)
            expected.refuse(mismatch)
            raise mismatch
        return value

    def finish(self) -> None:
        """Returns when everything that was sent has left. Raises CollectiveTimeoutError."""
        for wire, work in self._sends:
            target = self._placement[wire.target]
            try:
                work.wait(self._seconds)
            except CollectiveTimeoutError as error:
                if work.done():
                    raise
                raise self._late(f"rank {self._group.world_ranks[target]} to take {wire}", target) from error

    def abandon(self) -> None:
        """The step failed: nobody takes what is still expected."""
        for expected in self._expected.values():
            expected.forget()

    def _expect(self) -> None:
        while self._waiting and len(self._expected) < AHEAD:
            wire = self._waiting.popleft()
            self._expected[wire] = self._group.expect(self._placement[wire.source], wire.tag(len(self._placement)))

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
