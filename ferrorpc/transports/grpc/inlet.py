"""The stream from one peer, as its receiver holds it: frames and probes come in, grants and answers go back.

The thread that gRPC gave the call writes what goes back; a second one reads, except what is so short that gRPC's own thread
delivers it on the way. The reader never blocks on anything but the network and reads until the stream ends: that it always
does so is why no operation can be held up by another's frames.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Final, Protocol

import grpc
from google.protobuf.message import DecodeError

from ferrorpc.errors import CodecError, FerroError
from ferrorpc.transports.control import question_in
from ferrorpc.transports.grpc.outbox import Outbox
from ferrorpc.transports.grpc.requests import Requests
from ferrorpc.v1 import transport_pb2
from ferrorpc.wire.details import detail_of
from ferrorpc.wire.frames import Frame, Key, is_frame, scan

LOOK_BYTES_MAX: Final = 64 << 10
"""Frames of at most this size are delivered on gRPC's one thread for all streams of the server: longer ones would hold the
others up."""

GOODBYE: Final = transport_pb2.ControlMessage(goodbye=transport_pb2.Goodbye()).SerializeToString()


def refusal(error: FerroError) -> bytes:
    """The message that refuses a stream, or ends it, with this error."""
    return transport_pb2.ControlMessage(refused=detail_of(error)).SerializeToString()


def read_message(data: bytes, source: int) -> Frame | transport_pb2.DataMessage:
    """What a peer sent: a frame, or one of the small messages.

    Raises:
        CodecError: bytes that are neither.
    """
    if is_frame(data):
        return scan(data, source)
    try:
        message = transport_pb2.DataMessage.FromString(data)
    except DecodeError:
        raise CodecError(f"{len(data)} bytes from rank {source} are no message of ours") from None
    return scan(data, source) if message.HasField("frame") else message


class InletOwner(Protocol):
    """Who is told what comes in. Called on the reader's thread; must not block."""

    def frame_arrived(self, frame: Frame) -> None:
        """A frame."""

    def probe_arrived(self, source: int, key: Key, signature: str) -> None:
        """A question; its answer goes back on the outbox of this rank's first inlet from there."""

    def inlet_ended(self, source: int, streams: int, reason: str) -> None:
        """The stream is over: with a goodbye that speaks of so many streams of this source, or (0) for this reason."""

    def inlet_unused(self, inlet: Inlet) -> None:
        """The stream is over before anything came but its Open: whoever dialled it may dial again, or reports the link."""

    def inlet_failed(self, source: int, error: FerroError) -> None:
        """The peer sent something that ends the generation."""


class Inlet:
    """One incoming stream from rank `source`, once its Open was accepted.

    Attributes:
        heard: whether anything came after the Open.
    """

    def __init__(self, source: int, requests: Iterable[bytes], owner: InletOwner) -> None:
        self.source = source
        self.heard = False
        self.outbox = Outbox()
        self._requests = requests
        self._owner = owner
        if isinstance(requests, Requests):
            requests.look = self._look
        self._finishing = False
        self._ended = threading.Event()

    def _look(self, data: bytes) -> bool:
        """Delivers a short frame on gRPC's thread; the rest, and what is none, is for the reader."""
        if len(data) > LOOK_BYTES_MAX or not is_frame(data):
            return False
        try:
            frame = scan(data, self.source)
        except CodecError:
            return False
        self.heard = True
        self._owner.frame_arrived(frame)
        return True

    def read(self) -> None:
        """The reader's thread: until the stream ends or brings something that cannot be."""
        streams = 0
        reason = "its stream ended without a goodbye"
        try:
            for data in self._requests:
                self.heard = True
                message = read_message(data, self.source)
                if isinstance(message, Frame):
                    self._owner.frame_arrived(message)
                else:
                    streams = self._control(message) or streams
        except CodecError as error:
            self.outbox.finish(refusal(error), discard=True)
            self._owner.inlet_failed(self.source, error)
            return
        except grpc.RpcError:
            reason = "its stream broke"
        self.outbox.finish()
        if self._finishing:
            return
        if self.heard:
            self._owner.inlet_ended(self.source, streams, reason)
        else:
            self._owner.inlet_unused(self)

    def _control(self, message: transport_pb2.DataMessage) -> int:
        """Handles a small message; of a goodbye, of how many streams it speaks. One of a newer version is passed over."""
        kind = message.WhichOneof("body")
        if kind == "probe":
            self._owner.probe_arrived(self.source, *question_in(message.probe, self.source))
        elif kind == "open":
            raise CodecError(f"rank {self.source} opened its stream twice")
        return max(message.goodbye.streams, 1) if kind == "goodbye" else 0

    def answers(self) -> Iterator[bytes]:
        """The call's thread: what goes back, until `finish` or the end of the stream."""
        return self.outbox.messages()

    def finish(self) -> None:
        """Says goodbye to the sender and ends the stream: nothing more is read."""
        self._finishing = True
        self.outbox.finish(GOODBYE)

    def give_way(self) -> None:
        """Another stream takes its place: it ends without a word, and that is no news."""
        self._finishing = True
        self.outbox.finish(discard=True)

    def hang_up(self) -> None:
        """The call is over, whoever ended it."""
        self.outbox.finish(discard=True)
        self._ended.set()

    def wait(self, seconds: float) -> bool:
        """Whether the call ended within so many seconds."""
        return self._ended.wait(seconds)
