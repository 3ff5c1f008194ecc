"""What a member tells of itself with each beat: its last operation, the time it spent in operations and training steps,
what it sent to whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import get_ident
from typing import Final, TypeAlias

from ferrorpc.v1 import identity_pb2, session_pb2

Traffic: TypeAlias = Mapping[int, tuple[str, int]]
"""World rank of a peer -> kind of the link, and bytes sent on it."""

ACTIVITY_CHARACTERS_MAX: Final = 200
LINKS_EVERY_BEATS: Final = 2
LINKS_MAX: Final = 32
"""Links that one beat tells of; the others come with a later one."""


class Activity:
    """Written by the threads that run operations, read by the one that beats. A lost addition would do no harm. Its methods are
    cheap: some are called for every operation.

    Attributes:
        operations: how many have begun.
        last: the last of them, in words.
    """

    def __init__(self) -> None:
        self.operations = 0
        self.last = ""
        self._operation_seconds = 0.0
        self._since: dict[int, float] = {}
        """Thread -> when it came into the operation that it is in."""
        self._told_ms = 0
        self._steps = 0
        self._step_seconds = (0.0, 0.0, 0.0)
        self._traffic: Callable[[], Traffic] = dict
        self._told: dict[int, int] = {}
        self._beats = 0

    def note(self, operation: str) -> None:
        """An operation begins."""
        self.last = operation
        self.operations += 1

    def operating(self, began: float) -> None:
        """The calling thread is in an operation since that clock time, or waits for one, until it has `operated`."""
        self._since[get_ident()] = began

    def operated(self, seconds: float) -> None:
        """It is in none any more. So much time went into operations, or into waiting for them."""
        self._since.pop(get_ident(), None)
        self._operation_seconds += seconds

    def stepped(self, compute_seconds: float, exposed_seconds: float, hidden_seconds: float) -> None:
        """A training step is over; what it waited went into operations."""
        compute, exposed, hidden = self._step_seconds
        self._step_seconds = compute + compute_seconds, exposed + exposed_seconds, hidden + hidden_seconds
        self._steps += 1
        self._operation_seconds += exposed_seconds

    def carry(self, traffic: Callable[[], Traffic]) -> None:
        """From now on links are those of another generation."""
        self._told = {}
        self._traffic = traffic

    def beat(self, generation: int, now: float) -> session_pb2.Beat:
        """What to tell now. Time in operations includes those that are not over: a rank that hangs in one is seen to wait."""
        self._beats += 1
        seconds = self._operation_seconds + sum(now - began for began in list(self._since.values()))
        self._told_ms = max(self._told_ms, int(seconds * 1000))
        return session_pb2.Beat(
            step=self.operations,
            activity=self.last[:ACTIVITY_CHARACTERS_MAX],
            generation=generation,
            operation_ms=self._told_ms,
            links=self._links() if self._beats % LINKS_EVERY_BEATS == 0 else (),
            training=self._training() if self._steps else None,
        )

    def _training(self) -> identity_pb2.Training:
        compute, exposed, hidden = (int(seconds * 1000) for seconds in self._step_seconds)
        return identity_pb2.Training(steps=self._steps, compute_ms=compute, exposed_ms=exposed, hidden_ms=hidden)

    def _links(self) -> list[identity_pb2.Link]:
        """Links with news, those that were told of least recently first."""
        told = self._told
        news = [(peer, kind, sent) for peer, (kind, sent) in self._traffic().items() if sent > told.get(peer, 0)]
        order = {peer: place for place, peer in enumerate(told)}
        news.sort(key=lambda link: order.get(link[0], -1))
        for peer, _, sent in news[:LINKS_MAX]:
            told.pop(peer, None)
            told[peer] = sent
        return [identity_pb2.Link(peer_rank=peer, kind=kind, sent_bytes=sent) for peer, kind, sent in news[:LINKS_MAX]]
