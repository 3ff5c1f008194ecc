"""One Session call to a coordinator: frames go in at one end and come out at the other, until it ends."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any, Protocol

import grpc

from ferrorpc.errors import CoordinatorUnavailableError, FerroError
from ferrorpc.v1 import session_pb2 as wire
from ferrorpc.v1.session_pb2_grpc import CoordinatorServiceStub
from ferrorpc.wire.keep_at_exit import keep_at_exit
from ferrorpc.wire.status import error_of


class Connect(Protocol):
    """How the coordinator is reached."""

    def __call__(self) -> grpc.Channel:
        """A channel of its own. Raises FerroError where this process lacks what it needs for one."""

    def diagnose(self) -> FerroError | None:
        """Why no channel comes about, where something better than gRPC's word for it can be said."""


class Stream:
    """A connection of its own, and the one call on it.

    A fresh connection for every attempt keeps gRPC's own backoff out of the way: an attempt fails as soon as the dial does.
    """

    def __init__(self, connect: Connect, who: str) -> None:
        self._who = who
        self._outgoing: queue.SimpleQueue[wire.ClientFrame | None] = queue.SimpleQueue()
        self._channel = connect()
        self._stub = CoordinatorServiceStub(self._channel)
        self._call: Any = self._stub.Session(iter(self._outgoing.get, None))
        keep_at_exit(self)

    def send(self, frame: wire.ClientFrame) -> None:
        """Queues a frame; never blocks."""
        self._outgoing.put(frame)

    def frames(self) -> Iterator[wire.ServerFrame]:
        """What the coordinator sends, as it comes; ends where the coordinator ends the stream.

        Raises:
            FerroError: why it ended otherwise.
        """
        try:
            yield from self._call
        except grpc.RpcError as error:
            raise error_of(error, self._who) from None

    def status(self, request: wire.StatusRequest, timeout: float) -> wire.StatusResponse:
        """Asks for the job's status beside the stream, for explanations.

        Raises:
            FerroError: no answer within `timeout` seconds, or a refusal.
        """
        try:
            response: wire.StatusResponse = self._stub.Status(request, timeout=timeout)
        except grpc.RpcError as error:
            raise error_of(error, self._who) from None
        except ValueError:  # grpc's word for a closed channel
            raise CoordinatorUnavailableError("the connection is closed") from None
        return response

    def close(self) -> None:
        """Ends the call and the connection. Idempotent; never waits for the other side."""
        self._outgoing.put(None)
        self._call.cancel()
        self._channel.close()
