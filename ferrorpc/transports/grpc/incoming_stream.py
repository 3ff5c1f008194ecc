"""The receiving end of a stream from one peer: frames and probes come in, grants and probe answers go back.

The thread on which gRPC runs the call writes what goes back. A second thread reads; only short frames are delivered directly on
gRPC's deserializing thread. The reader blocks on nothing but the network and reads until the stream ends, so that no operation
can be held up by the frames of another.
"""

from __future__ import annotations

import threading
from typing import Final, Protocol

import grpc

from ferrorpc.errors import CodecError, FerroError, LimitExceededError
from ferrorpc.transports.control import read_probe
from ferrorpc.transports.grpc.request_iterator import RequestIterator
from ferrorpc.transports.grpc.send_queue import SendQueue
from ferrorpc.v1 import transport_pb2
from ferrorpc.wire.error_detail import detail_of
from ferrorpc.wire.frames import Frame, Key, is_frame, scan
from ferrorpc.wire.parse import parse

INTERCEPT_BYTES_MAX: Final = 64 << 10
"""Frames of at most this size are delivered on gRPC's one thread for all streams of the server. Longer ones would delay the
other streams."""

GOODBYE: Final = transport_pb2.ControlMessage(goodbye=transport_pb2.Goodbye()).SerializeToString()


def refusal(error: FerroError) -> bytes:
    """The control message that refuses or ends a stream with this error."""
    return transport_pb2.ControlMessage(refused=detail_of(error)).SerializeToString()


def read_message(data: bytes, source: int) -> Frame | transport_pb2.DataMessage:
    """Parses what a peer sent: a frame, or another DataMessage.

    Raises:
        CodecError: the bytes are neither.
    """
    if is_frame(data):
        return scan(data, source)
    message = parse(transport_pb2.DataMessage, data, f"{len(data)} bytes from rank {source} are no message of ours")
    return scan(data, source) if message.HasField("frame") else message


class IncomingStreamOwner(Protocol):
    """Receives the events of a stream. Called on threads that read it; must not block."""

    def frame_arrived(self, frame: Frame) -> None:
        """A frame has arrived."""

    def probe_arrived(self, source: int, key: Key, signature: str) -> None:
        """A probe has arrived."""

    def probe_answered(self, source: int, answer: transport_pb2.ProbeAnswer) -> None:
        """The answer to a probe has arrived, after what the source sent before. Raises CodecError."""

    def incoming_ended(self, source: int, streams: int, reason: str) -> None:
        """The stream is over. `streams`: how many the source had opened, as its goodbye says; 0 without a goodbye."""

    def incoming_unused(self, stream: IncomingStream, reason: str) -> None:
        """The stream ended before anything but its Open arrived. Its sender may dial again, or reports the link itself."""

    def incoming_failed(self, source: int, error: FerroError) -> None:
        """The peer sent something invalid, which ends the generation."""


class IncomingStream:
    """One stream from rank `source` whose Open was accepted.

    Attributes:
        received: whether anything arrived after the Open.
        queue: what goes back to the sender, written by the call's thread until `finish` or the end of the stream.
    """

    def __init__(self, source: int, requests: RequestIterator, owner: IncomingStreamOwner) -> None:
        self.source = source
        self.received = False
        self.queue = SendQueue()
        self._requests = requests
        self._owner = owner
        requests.intercept = self._intercept
        self._finishing = False
        self._ended = threading.Event()

    def _intercept(self, data: bytes) -> bool:
        """Delivers a short frame on gRPC's thread; leaves everything else to the reader."""
        if len(data) > INTERCEPT_BYTES_MAX or not is_frame(data):
            return False
        try:
            frame = scan(data, self.source)
        except CodecError:
            return False
        self.received = True
        self._owner.frame_arrived(frame)
        return True

    def read(self) -> None:
        """The body of the reader thread: reads until the stream ends or sends something invalid."""
        streams = 0
        reason = "its stream ended without a goodbye"
        try:
            for data in self._requests:
                self.received = True
                message = read_message(data, self.source)
                if isinstance(message, Frame):
                    self._owner.frame_arrived(message)
                else:
                    streams = self._control(message) or streams
        except CodecError as error:
            self._fail(error)
            return
        except MemoryError as error:
            self._fail(LimitExceededError(f"there is no memory for what rank {self.source} sends: {error}"))
            return
        except grpc.RpcError:
            reason = "its stream broke"
        self.queue.finish()
        if self._finishing:
            return
        if self.received:
            self._owner.incoming_ended(self.source, streams, reason)
        else:
            self._owner.incoming_unused(self, reason)

    def _fail(self, error: FerroError) -> None:
        self.queue.finish(refusal(error), discard=True)
        self._owner.incoming_failed(self.source, error)

    def _control(self, message: transport_pb2.DataMessage) -> int:
        """Handles a message that is no frame. Returns the streams that a goodbye announces, else 0. Ignores unknown kinds."""
        kind = message.WhichOneof("body")
        if kind == "probe":
            self._owner.probe_arrived(self.source, *read_probe(message.probe, self.source))
        elif kind == "probe_answer":
            self._owner.probe_answered(self.source, message.probe_answer)
        elif kind == "open":
            raise CodecError(f"rank {self.source} opened its stream twice")
        return max(message.goodbye.streams, 1) if kind == "goodbye" else 0

    def finish(self) -> None:
        """Says goodbye to the sender and ends the stream. Its end is reported to nobody."""
        self._finishing = True
        self.queue.finish(GOODBYE)

    def drop(self) -> None:
        """Ends the stream without a goodbye, because another one replaces it. Its end is reported to nobody."""
        self._finishing = True
        self.queue.finish(discard=True)

    def end(self) -> None:
        """The call is over, whichever side ended it."""
        self.queue.finish(discard=True)
        self._ended.set()

    def wait(self, seconds: float) -> None:
        """Waits until the call has ended, at most so many seconds."""
        self._ended.wait(seconds)
