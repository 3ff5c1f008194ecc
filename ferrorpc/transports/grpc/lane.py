"""A lane over gRPC: the sending end of a stream to one peer. Frames and probes go out; grants and probe answers come back.

Three threads serve a lane: one of gRPC takes messages from the queue, the lane's own reads what comes back, and gRPC's poller
moves bytes. The lane's own thread also dials. As long as nothing but the Open was written, a failed dial may be repeated; after
that a broken stream is a lost link, because nobody knows which frames arrived. A peer listens before it is given a rank. So
where its machine refuses the connection, the peer has ended, and the lane gives up sooner than on a machine that is silent.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import grpc

from ferrorpc.errors import CodecError, FerroError, LimitExceededError
from ferrorpc.generation_errors import NOT_REACHED
from ferrorpc.guard import Clock
from ferrorpc.transports.grpc.send_queue import SendQueue
from ferrorpc.transports.grpc.server import METHOD
from ferrorpc.v1 import transport_pb2
from ferrorpc.wire.address import split_address
from ferrorpc.wire.call_threads import call_threads, close_cancelled
from ferrorpc.wire.keep_at_exit import keep_at_exit
from ferrorpc.wire.parse import parse

START_SECONDS: Final = 1.0
"""How long a sender waits for gRPC to start the threads of a new lane, which takes a millisecond."""
REDIAL_SECONDS: Final = 0.25
REFUSED_SECONDS: Final = 2.0
"""How long a peer may refuse connections, or its TLS handshake may fail, before the lane gives up."""


class LaneOwner(Protocol):
    """Receives the events of a lane. Called on the lane's thread; must not block."""

    def lane_answered(self, lane: Lane, message: transport_pb2.ControlMessage) -> None:
        """The peer sent a control message."""

    def lane_ended(self, lane: Lane, reason: str) -> None:
        """The lane is over. `reason` is empty when this side had said goodbye. `lane.fault`, where it is set, is the cause."""


class Lane:
    """Stream `number` to `peer`. Dials at once, and repeats that for `dial_seconds` where nobody answers. Raises as `dial`.

    Args:
        address: host:port of the peer's server.
        dial: makes a channel to that address, here and for every further attempt, as TLS may have other files by then.
        opening: the Open message that begins the stream.
        diagnose: returns why TLS prevents the connection; None where it does not.
    """

    def __init__(
        self,
        peer: int,
        number: int,
        address: str,
        dial: Callable[[], grpc.Channel],
        opening: bytes,
        diagnose: Callable[[], FerroError | None],
        owner: LaneOwner,
        clock: Clock,
        dial_seconds: float,
    ) -> None:
        self.peer = peer
        self.sent_frames = False
        """Whether any frame was put on it."""
        self.opened = False
        """Whether the peer has accepted it."""
        self.fault: FerroError | None = None
        """Why dialling again cannot help, where that is known."""
        self.queue = SendQueue()
        self._address = address
        self._opening = opening
        self._diagnose = diagnose
        self._owner = owner
        self._clock = clock
        self._dial_seconds = dial_seconds
        self._dial = dial
        self._channel = dial()
        self._call: Any = None
        keep_at_exit(self)
        self._attempt = 0
        """Which call may take from the queue."""
        self._committed = False
        """Whether it may have done so, or the lane has ended otherwise: then it does not dial again."""
        self._commit_lock = threading.Lock()
        self._finishing = False
        self._started = threading.Event()
        self._cancelled = threading.Event()
        self._ended = threading.Event()
        clock.start(self._run, f"ferrorpc-lane-{number}-to-{peer}")

    def wait_until_started(self) -> None:
        """Waits until gRPC's threads serve it, or could not be had. Before that, an interpreter that exits may refuse them."""
        if not self._started.is_set():
            self._started.wait(START_SECONDS)

    def finish(self, streams: int, *, discard: bool) -> None:
        """Says goodbye after what is queued (which `discard` drops). The lane ends once the peer has read the goodbye.

        Args:
            streams: how many streams this rank has opened to the peer.
        """
        self._finishing = True
        goodbye = transport_pb2.DataMessage(goodbye=transport_pb2.Goodbye(streams=streams))
        self.queue.finish(goodbye.SerializeToString(), discard=discard)

    @property
    def ended(self) -> bool:
        """Whether the lane is over."""
        return self._ended.is_set()

    def wait(self, seconds: float) -> None:
        """Waits until the lane has ended, at most so many seconds."""
        self._ended.wait(seconds)

    def cancel(self) -> None:
        """Ends the lane at once, without the peer's cooperation."""
        self._finishing = True
        self._cancelled.set()
        self.queue.finish(discard=True)
        if self._call is not None:
            self._call.cancel()

    def _run(self) -> None:
        reason = "the thread of its lane failed"  # by a bug, whose traceback it prints
        try:
            reason = self._dial_and_read()
        finally:
            self.queue.finish(discard=True)
            if not isinstance(self.fault, LimitExceededError):  # it cannot be closed
                self._close_channel()
            self._ended.set()
            self._owner.lane_ended(self, "" if self._finishing else reason)

    def _close_channel(self) -> None:
        if self._call is None:
            self._channel.close()
        else:
            self._call.cancel()
            close_cancelled(self._channel, self._call)

    def _dial_and_read(self) -> str:
        """Dials as often as it may, and reads answers until the stream ends. Returns why it ended."""
        began = self._clock.now()
        reason = self._run_call()
        while self._may_dial_again() and not (self._cancelled.is_set() or self._should_give_up(self._clock.now() - began)):
            self._cancelled.wait(REDIAL_SECONDS)
            reason = self._redial()
        return reason if self._committed else f"{NOT_REACHED} in {self._clock.now() - began:.1f} s: {reason}"

    def _may_dial_again(self) -> bool:
        """Whether the call that has ended took nothing from the queue. From here on it does not: gRPC's thread may be late."""
        with self._commit_lock:
            self._attempt += 1
            return not self._committed

    def _should_give_up(self, waited_seconds: float) -> bool:
        """Whether to stop dialling."""
        if waited_seconds < REFUSED_SECONDS:
            return waited_seconds >= self._dial_seconds
        self.fault = self._diagnose()
        return self.fault is not None or waited_seconds >= self._dial_seconds or _port_is_closed(self._address)

    def _redial(self) -> str:
        """As `_run_call`, on a new channel."""
        try:
            channel = self._dial()
        except FerroError as error:  # the files of TLS are not valid any more: perhaps they are renewed in time
            return error.message
        self._close_channel()
        self._channel = channel
        return self._run_call()

    def _run_call(self) -> str:
        """One attempt: dials and reads answers until the stream ends. Returns why it ended."""
        try:
            with call_threads(self._channel, f"the lane to rank {self.peer}"):
                stub: Any = self._channel.stream_stream(METHOD)
                call = self._call = stub(self._messages(self._attempt))
        except LimitExceededError as error:
            self.fault, self._committed = error, True
            return error.message
        finally:
            self._started.set()
        if self._cancelled.is_set():
            call.cancel()
        try:
            for data in call:
                self._committed = True
                message = parse(transport_pb2.ControlMessage, data, "its answers are no messages of ours")
                self._owner.lane_answered(self, message)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
        except CodecError as error:
            call.cancel()
            return error.message
        self._committed = True
        return "the stream ended without a goodbye"

    def _messages(self, attempt: int) -> Iterator[bytes]:
        yield self._opening
        # gRPC requests the next message once the previous one is being written: from here on the dial cannot be repeated.
        with self._commit_lock:
            if attempt != self._attempt:
                return
            self._committed = True
        yield from self.queue.messages()


def _port_is_closed(address: str) -> bool:
    """Whether the machine at this address answers and refuses the connection."""
    try:
        socket.create_connection(split_address(address), REDIAL_SECONDS).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False
