"""Requests that await their answer. They outlive a connection: what was not answered is sent again under its number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import Message

from ferrorpc.coordination import limits
from ferrorpc.errors import FerroError, MessageTooLargeError, require
from ferrorpc.guard import Latch
from ferrorpc.v1 import session_pb2 as wire

STORE_OVERHEAD_BYTES: Final = 4 << 10


@dataclass(slots=True, eq=False)
class Request:
    """One request.

    Attributes:
        frame: what is sent, with its number.
        label: what it is, for log lines and errors: "barrier 'epoch'".
        latch: of the generation it belongs to; None for one that outlives generations.
        sent_at: clock time of the last sending; None while there is no connection.
        outcome: its answer, or why there will be none.
    """

    frame: wire.ClientFrame
    label: str
    latch: Latch | None = None
    sent_at: float | None = None
    outcome: Message | FerroError | None = None

    @property
    def verdict(self) -> Message | FerroError | None:
        """Its outcome, or the cause that ended its generation."""
        if self.outcome is None and self.latch is not None:
            return self.latch.cause
        return self.outcome


class Requests:
    """The table of what is unanswered. Its user's lock is held around every use."""

    def __init__(self) -> None:
        self._sequence = 0
        self._open: dict[int, Request] = {}

    def add(self, label: str, latch: Latch | None, **body: Any) -> Request:
        """Numbers a request."""
        self._sequence += 1
        request = Request(wire.ClientFrame(sequence=self._sequence, **body), label, latch)
        self._open[self._sequence] = request
        return request

    def settle(self, sequence: int, outcome: Message | FerroError) -> None:
        """The answer to a request; one that nobody waits for any more is dropped."""
        request = self._open.pop(sequence, None)
        if request is not None:
            request.outcome = outcome

    def drop(self, request: Request) -> None:
        """Nobody waits for it any more."""
        self._open.pop(request.frame.sequence, None)

    def unanswered(self) -> list[Request]:
        """All that await an answer, in the order of their numbers."""
        return list(self._open.values())

    def fail(self, error: FerroError, which: Callable[[Request], bool]) -> None:
        """Ends some of them with an error."""
        for sequence in [sequence for sequence, request in self._open.items() if which(request)]:
            self.settle(sequence, error)


def check_size(label: str, **body: Any) -> None:
    """Refuses a request that the coordinator would not take, before it is sent.

    Raises:
        MessageTooLargeError: naming the request and the limit.
    """
    ((kind, message),) = body.items()
    most = limits.VALUE_BYTES_MAX + STORE_OVERHEAD_BYTES if kind == "store" else limits.FRAME_BYTES_MAX
    require(f"the bytes of {label}", message.ByteSize(), "frame_bytes", most, MessageTooLargeError)
