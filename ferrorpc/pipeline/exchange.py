"""The messages of one step on one rank: sent without waiting, received a little ahead of their use.

Every message has a tag of its own, made from its stage, microbatch and direction, so the order in which messages arrive means
nothing, and no order of actions can make two ranks wait for each other's sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from ferrorpc.arrays.base import Kind as ArrayKind
from ferrorpc.errors import CollectiveMismatchError, CollectiveTimeoutError
from ferrorpc.pipeline.actions import Action, Kind
from ferrorpc.pipeline.messages import Letter, pack, unpack
from ferrorpc.work import Work

if TYPE_CHECKING:
    from ferrorpc.group import ProcessGroup

AHEAD: Final = 2
"""Receives that are posted before their turn: long messages then travel while the rank computes."""
TAGS_FROM: Final = 1 << 61
"""Pipelines' tags begin here, out of the way of the user's own."""
PATIENCE_SECONDS: Final = 30 * 24 * 3600.0
"""Deadline of the transfers themselves. A rank that waits does so with its own, shorter one."""

_ARRIVALS: Final = {Kind.RECV_FORWARD: (Kind.SEND_FORWARD, -1), Kind.RECV_BACKWARD: (Kind.SEND_BACKWARD, 1)}
"""A receive -> its send, and how far its stage is from the receive's."""


class Exchange:
    """One step's messages.

    Args:
        group: the pipeline's ranks.
        placement: the rank of each piece.
        receives: this rank's, in the order in which their values are used.
        pipeline: names the pipeline in messages.
        step: counts the pipeline's steps.
        seconds: how long one message may be waited for.
    """

    def __init__(
        self,
        group: ProcessGroup,
        placement: Sequence[int],
        receives: Sequence[Action],
        pipeline: str,
        step: int,
        seconds: float,
    ) -> None:
        self._group = group
        self._placement = placement
        self._pipeline = pipeline
        self._step = step
        self._seconds = seconds
        self._waiting = list(receives)
        self._posted: dict[Action, Work[Any]] = {}
        self._sends: list[tuple[Action, Work[Any]]] = []
        self._post()

    def send(self, each: Action, value: Any) -> None:
        """Sends a value on its way; it is copied, so it may change at once."""
        target = self._placement[each.stage + (1 if each.kind is Kind.SEND_FORWARD else -1)]
        message = pack(Letter(self._pipeline, self._step, str(each)), value)
        work = self._group.send(message, target, self._tag(each), async_op=True, timeout=PATIENCE_SECONDS)
        self._sends.append((each, _seen(work)))

    def receive(self, each: Action, kind: ArrayKind) -> Any:
        """The value a receive is for, with arrays of this kind.

        Raises:
            CollectiveTimeoutError: it did not come in time.
            CollectiveMismatchError: what came belongs to another step or pipeline.
        """
        send = _send_of(each)
        source = self._placement[send.stage]
        message = self._wait(self._posted.pop(each), f"{send} of rank {self._group.world_ranks[source]}", source)
        self._post()
        letter, value = unpack(message, kind)
        wanted = Letter(self._pipeline, self._step, str(send))
        if letter != wanted:
            ranks = self._group.world_ranks
            raise CollectiveMismatchError({ranks[self._group.rank]: f"waits for {_told(wanted)}", ranks[source]: _told(letter)})
        return value

    def finish(self) -> None:
        """Returns when everything that was sent has left. Raises CollectiveTimeoutError."""
        for each, work in self._sends:
            target = self._placement[each.stage + (1 if each.kind is Kind.SEND_FORWARD else -1)]
            self._wait(work, f"rank {self._group.world_ranks[target]} to take {each}", target)

    def _post(self) -> None:
        while self._waiting and len(self._posted) < AHEAD:
            each = self._waiting.pop(0)
            send = _send_of(each)
            source = self._placement[send.stage]
            work = self._group.recv(source, self._tag(send), async_op=True, timeout=PATIENCE_SECONDS)
            self._posted[each] = _seen(work)

    def _wait(self, work: Work[Any], what: str, peer: int) -> Any:
        try:
            return work.wait(self._seconds)
        except CollectiveTimeoutError as error:
            if work.done():
                raise
            rank, message = self._group.world_ranks[peer], f"this rank of the pipeline waited {self._seconds:g} s for {what}"
            raise CollectiveTimeoutError([rank], message) from error

    def _tag(self, send: Action) -> int:
        place = send.microbatch * len(self._placement) + send.stage
        return TAGS_FROM + 2 * place + (send.kind is Kind.SEND_BACKWARD)


def _send_of(receive: Action) -> Action:
    kind, distance = _ARRIVALS[receive.kind]
    return Action(receive.stage + distance, kind, receive.microbatch)


def _seen(work: Work[Any]) -> Work[Any]:
    """Where the step fails, its other messages fail with it, and nobody needs to hear of each."""

    def look() -> None:
        work.exception()

    work.on_done(look)
    return work


def _told(letter: Letter) -> str:
    return f"{letter.action} in step {letter.step} of pipeline {letter.pipeline}"
