"""Requests that await their answer. They outlive a stream: unanswered ones are sent again, under the same number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import Message

from ferrorpc.errors import FerroError, MessageTooLargeError, require
from ferrorpc.guard import Latch
from ferrorpc.v1 import session_pb2 as wire, store_pb2
from ferrorpc.wire.limits import FRAME_BYTES_MAX, VALUE_BYTES_MAX

STORE_OVERHEAD_BYTES: Final = 4 << 10
RETURN_MILLISECONDS: Final = 2000
"""Within this time members are back at a restarted coordinator. Less than REPLY_MARGIN_SECONDS, with which they wait."""


@dataclass(slots=True, eq=False)
class Request:
    """One request.

    Attributes:
        frame: the frame to send; its number is 0 until it is posted.
        label: its name in log lines and errors, such as "barrier 'epoch'".
        latch: of the generation it belongs to; None if it outlives generations.
        began: the connection's own time when it was posted; outages do not count in it.
        answer: the answer, or the error because of which there will be none.
    """

    frame: wire.ClientFrame
    label: str
    latch: Latch | None = None
    began: float = 0.0
    answer: Message | FerroError | None = None

    @property
    def outcome(self) -> Message | FerroError | None:
        """Its answer, or the cause that ended its generation."""
        if self.answer is None and self.latch is not None:
            return self.latch.cause
        return self.answer

    @property
    def is_volatile(self) -> bool:
        """Whether the coordinator keeps what it says in memory only, so that it is sent on each stream of its generation."""
        offer = self.frame.comm_bootstrap
        return bool(offer.unique_ids or offer.failure) or self.frame.report.HasField("link_lost")

    @property
    def is_due(self) -> bool:
        """Whether a new stream begins with it."""
        if self.latch is not None and self.is_volatile:
            return self.latch.cause is None
        return self.answer is None

    def frame_after(self, seconds: float) -> wire.ClientFrame:
        """The frame to send once it has waited for so long: a coordinator that has forgotten it waits for what is left, and at
        least until other members can be back, too."""
        frame = wire.ClientFrame()
        frame.CopyFrom(self.frame)  # the one that was sent may not have been written yet
        body = getattr(frame, frame.WhichOneof("body") or "")
        if isinstance(body, store_pb2.StoreRequest):
            body = getattr(body, body.WhichOneof("operation") or "")
        for name in ("timeout_ms", "wait_ms"):
            if name in body.DESCRIPTOR.fields_by_name:
                asked_ms = getattr(body, name)
                setattr(body, name, max(asked_ms - round(seconds * 1000), min(asked_ms, RETURN_MILLISECONDS)))
        return frame


class PendingRequests:
    """The unanswered requests and the volatile ones, by number. The caller holds its lock around every use."""

    def __init__(self) -> None:
        self._sequence = 0
        self._open: dict[int, Request] = {}

    def add(self, request: Request, began: float) -> None:
        """Gives a new request the next number."""
        self._sequence += 1
        request.frame.sequence, request.began = self._sequence, began
        self._open[self._sequence] = request

    def complete(self, sequence: int, answer: Message | FerroError) -> None:
        """Gives a request its answer; the first counts. An answer to a request that was dropped is ignored."""
        request = self._open.get(sequence)
        if request is not None and request.answer is None:
            request.answer = answer
            self.drop(request)

    def drop(self, request: Request) -> None:
        """Forgets a request that nobody waits for any more, unless it is volatile."""
        if not request.is_volatile:
            self._open.pop(request.frame.sequence, None)

    def drop_volatile(self) -> None:
        """Forgets the volatile requests: a generation begins, and they are of the one before."""
        self._open = {sequence: request for sequence, request in self._open.items() if not request.is_volatile}

    def to_send(self) -> list[Request]:
        """The unanswered requests, and the volatile ones while their generation lasts, in the order of their numbers."""
        return [request for request in self._open.values() if request.is_due]

    def fail(self, error: FerroError, which: Callable[[Request], bool]) -> None:
        """Answers the requests for which `which` is true with an error."""
        for sequence in [sequence for sequence, request in self._open.items() if which(request)]:
            self.complete(sequence, error)


def check_size(request: Request) -> None:
    """Refuses a request that is larger than a coordinator takes, before it is sent.

    Raises:
        MessageTooLargeError: naming the request and the limit.
    """
    most = VALUE_BYTES_MAX + STORE_OVERHEAD_BYTES if request.frame.HasField("store") else FRAME_BYTES_MAX
    require(f"the bytes of {request.label}", request.frame.ByteSize(), "frame_bytes", most, MessageTooLargeError)
