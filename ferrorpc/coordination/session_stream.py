"""One Session call to a coordinator, on a channel of its own."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import grpc

from ferrorpc.coordination.channel import ChannelFactory
from ferrorpc.errors import CoordinatorUnavailableError, FerroError
from ferrorpc.v1 import session_pb2 as wire
from ferrorpc.v1.session_pb2_grpc import CoordinatorServiceStub
from ferrorpc.wire.call_threads import call_threads, close_cancelled
from ferrorpc.wire.keep_at_exit import keep_at_exit
from ferrorpc.wire.status import error_of


class SessionStream:
    """A channel and the one call on it.

    Every attempt to connect makes a new channel, so gRPC's own backoff never delays one: it fails as soon as connecting does.

    Args:
        connect: makes the channel.

    Raises:
        LimitExceededError: the system refuses the threads that gRPC needs for the call.
    """

    def __init__(self, connect: ChannelFactory) -> None:
        self._peer = f"the coordinator at {connect.address}"
        self._outgoing: queue.SimpleQueue[wire.ClientFrame | None] = queue.SimpleQueue()
        self._why: FerroError | None = None
        self._channel = connect()
        self._stub = CoordinatorServiceStub(self._channel)
        with call_threads(self._channel, "the session"):
            self._call: Any = self._stub.Session(iter(self._outgoing.get, None))
        keep_at_exit(self)

    def send(self, frame: wire.ClientFrame) -> None:
        """Queues a frame; never blocks."""
        self._outgoing.put(frame)

    def frames(self) -> Iterator[wire.ServerFrame]:
        """The frames that the coordinator sends, until it ends the stream.

        Raises:
            FerroError: the stream ended in another way: what `close` was given, or what gRPC tells.
        """
        try:
            yield from self._call
        except grpc.RpcError as error:
            raise self._why or error_of(error, self._peer) from None

    def status(self, request: wire.StatusRequest, timeout: float) -> wire.StatusResponse:
        """Asks for the job's status, in a call of its own.

        Raises:
            FerroError: no answer within `timeout` seconds, or a refusal.
        """
        try:
            response: wire.StatusResponse = self._stub.Status(request, timeout=timeout)
        except grpc.RpcError as error:
            raise error_of(error, self._peer) from None
        except ValueError:  # what grpc raises for a closed channel
            raise CoordinatorUnavailableError("the connection is closed") from None
        return response

    def close(self, why: FerroError | None = None) -> None:
        """Cancels the call and closes the channel. Idempotent; never waits for the coordinator.

        Args:
            why: what who reads `frames` gets.
        """
        self._why = self._why or why
        self._outgoing.put(None)
        self._call.cancel()
        close_cancelled(self._channel, self._call)
