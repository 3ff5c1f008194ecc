"""The stream to one peer, as its sender holds it: frames, probes and the goodbye go out, grants and answers come back.

Three threads serve a lane: gRPC's own takes messages from the outbox, the lane's reads what comes back, and gRPC's poller
moves bytes. The lane's thread also dials. A dial that fails before anything but the Open was written may be repeated; after
that a broken stream is a lost link, because nobody knows which frames arrived. A peer listens before it is given a rank, so
where a machine answers that nobody listens, the peer has ended: that is believed sooner than silence.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import grpc
from google.protobuf.message import DecodeError

from ferrorpc.errors import FerroError
from ferrorpc.guard import Clock
from ferrorpc.transports.grpc.outbox import Outbox
from ferrorpc.transports.grpc.server import METHOD
from ferrorpc.v1 import transport_pb2
from ferrorpc.wire.address import split_address
from ferrorpc.wire.outliving import outlives_interpreter

REDIAL_SECONDS: Final = 0.25
REFUSED_SECONDS: Final = 2.0
"""How long nobody may listen at a peer's address, or TLS may fail there, before that is believed."""


class LaneOwner(Protocol):
    """Who is told what happens on a lane. Called on the lane's thread; must not block."""

    def lane_answered(self, lane: Lane, message: transport_pb2.ControlMessage) -> None:
        """The peer sent a control message."""

    def lane_ended(self, lane: Lane, reason: str) -> None:
        """The lane is over. `reason`: why, empty when this side had said goodbye; `lane.fault` may know better."""


class Lane:
    """Stream `number` to `peer`. Dials at once, and again for `dial_seconds` where nobody answers.

    Args:
        address: host:port of the peer's server, where `channel` leads. The lane closes the channel.
        opening: the Open message that begins the stream.
        diagnose: tells why TLS does not let a connection come about; None where it is not to blame.
    """

    def __init__(
        self,
        peer: int,
        number: int,
        address: str,
        channel: grpc.Channel,
        opening: bytes,
        diagnose: Callable[[], FerroError | None],
        owner: LaneOwner,
        clock: Clock,
        dial_seconds: float,
    ) -> None:
        self.peer = peer
        self.number = number
        self.carried = False
        """Whether a frame was ever put on it."""
        self.opened = False
        """Whether the peer has taken it."""
        self.fault: FerroError | None = None
        """Why the peer can never be reached, where that is known."""
        self.outbox = Outbox()
        self._address = address
        self._opening = opening
        self._diagnose = diagnose
        self._owner = owner
        self._clock = clock
        self._dial_seconds = dial_seconds
        self._channel = channel
        self._call: Any = None
        outlives_interpreter(self)
        self._committed = False
        self._finishing = False
        self._cancelled = threading.Event()
        self._ended = threading.Event()
        clock.start(self._run, f"ferrorpc-lane-{number}-to-{peer}")

    def finish(self, streams: int, *, discard: bool) -> None:
        """Says goodbye after what is queued (which `discard` drops). The lane ends once the peer has read that.

        Args:
            streams: how many of them this rank has opened to the peer.
        """
        self._finishing = True
        goodbye = transport_pb2.DataMessage(goodbye=transport_pb2.Goodbye(streams=streams))
        self.outbox.finish(goodbye.SerializeToString(), discard=discard)

    def wait(self, seconds: float) -> bool:
        """Whether the lane ended within so many seconds."""
        return self._ended.wait(seconds)

    def cancel(self) -> None:
        """Ends the lane without asking the peer."""
        self._finishing = True
        self._cancelled.set()
        self.outbox.finish(discard=True)
        if self._call is not None:
            self._call.cancel()

    def _run(self) -> None:
        began = self._clock.now()
        reason = self._converse()
        while not (self._committed or self._cancelled.is_set() or self._hopeless(self._clock.now() - began)):
            self._cancelled.wait(REDIAL_SECONDS)
            reason = self._converse()
        self.outbox.finish(discard=True)
        self._channel.close()
        self._ended.set()
        if not self._committed:
            reason = f"it could not be reached in {self._clock.now() - began:.1f} s: {reason}"
        self._owner.lane_ended(self, "" if self._finishing else reason)

    def _hopeless(self, waited_seconds: float) -> bool:
        """Whether dialling any longer is of no use."""
        if waited_seconds < REFUSED_SECONDS:
            return waited_seconds >= self._dial_seconds
        self.fault = self._diagnose()
        return self.fault is not None or waited_seconds >= self._dial_seconds or _nobody_listens(self._address)

    def _converse(self) -> str:
        """One attempt: dials and reads answers until the stream ends; returns how it did."""
        stub: Any = self._channel.stream_stream(METHOD)
        call = self._call = stub(self._messages())
        if self._cancelled.is_set():
            call.cancel()
        try:
            for data in call:
                self._committed = True
                self._owner.lane_answered(self, transport_pb2.ControlMessage.FromString(data))
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
        except DecodeError:
            call.cancel()
            return "its answers are no messages of ours"
        self._committed = True
        return "the stream ended without a goodbye"

    def _messages(self) -> Iterator[bytes]:
        yield self._opening
        # gRPC asks for the next message once the one before it is on its way: from here on the dial cannot be repeated.
        self._committed = True
        yield from self.outbox.messages()


def _nobody_listens(address: str) -> bool:
    """Whether the machine at this address is there and says that the port is closed."""
    try:
        socket.create_connection(split_address(address), REDIAL_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
