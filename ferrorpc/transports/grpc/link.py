"""What a rank knows of its link to one peer: its own lanes to it, the peer's streams to this rank, and how far it has ended."""

from __future__ import annotations

from typing import Final

from ferrorpc.transports.grpc.incoming_stream import IncomingStream
from ferrorpc.transports.grpc.lane import Lane

LATE_STREAM_SECONDS: Final = 2.0
"""How long after a peer's goodbye its own stream may still be opened. It comes once its own streams were read or given up."""


class Link:
    """The link to one peer in one generation. Its transport's lock guards what is counted and what is added.

    Attributes:
        lanes: this rank's streams to the peer, by number.
        incoming: the peer's streams to this rank, by number.
        dialled_at: when the peer was first dialled, in clock time.
        left_at: when it said goodbye, in clock time.
        peer_streams: how many streams the peer had opened to this rank, as its goodbye said.
        ended_streams: how many of them have ended.
        cut: why one of them ended without a goodbye.
        loss: why it is lost, where that was reported, or is not to be; None while it is not.
    """

    __slots__ = ("cut", "dialled_at", "ended_streams", "incoming", "lanes", "left_at", "loss", "peer_streams")

    def __init__(self) -> None:
        self.lanes: dict[int, Lane] = {}
        self.incoming: dict[int, IncomingStream] = {}
        self.dialled_at: float | None = None
        self.left_at: float | None = None
        self.peer_streams = 1
        self.ended_streams = 0
        self.cut: str | None = None
        self.loss: str | None = None

    @property
    def has_left(self) -> bool:
        """Whether the peer said goodbye."""
        return self.left_at is not None

    def leave(self, now: float) -> None:
        """The peer says goodbye, on one of possibly several streams."""
        if self.left_at is None:
            self.left_at = now

    @property
    def is_reached(self) -> bool:
        """Whether anything was heard of the peer."""
        return any(lane.opened for lane in self.lanes.values()) or bool(self.incoming) or self.has_left

    @property
    def all_ended(self) -> bool:
        """Whether all streams that the peer opened have ended."""
        return self.ended_streams >= self.peer_streams

    def may_bring_more(self, now: float) -> bool:
        """Whether messages of a peer that said goodbye can still arrive, while not all its streams have ended."""
        is_late = self.left_at is not None and now - self.left_at >= LATE_STREAM_SECONDS
        return len(self.incoming) > self.ended_streams or not is_late

    def sent_bytes(self) -> int:
        """How many bytes of arrays were sent to the peer."""
        return sum(lane.queue.sent_bytes for lane in self.lanes.values())
