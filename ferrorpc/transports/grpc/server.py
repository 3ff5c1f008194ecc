"""The one server of a worker process. It outlives generations: streams are handed to the transport of theirs.

A stream begins with an Open that says which job, cluster, generation and pair of ranks it belongs to. Whoever is not ours is
refused; one of an older generation is told ours; one of a newer generation waits a while until this process has heard of it
too. Bind and advertised address are separate, so that workers in containers and behind other names find each other.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import grpc
from google.protobuf.message import DecodeError

from ferrorpc.errors import (
    AuthenticationError,
    CodecError,
    ConfigError,
    FerroError,
    GroupClosedError,
    PermissionDeniedError,
    StaleGenerationError,
    VersionMismatchError,
)
from ferrorpc.guard import Clock
from ferrorpc.transports.grpc.doorstep import Doorstep
from ferrorpc.transports.grpc.inlet import refusal
from ferrorpc.transports.grpc.memory import keep_freed_memory
from ferrorpc.transports.grpc.requests import Requests
from ferrorpc.transports.grpc.threads import ThreadPerCall
from ferrorpc.types import Assignment
from ferrorpc.v1 import transport_pb2
from ferrorpc.wire import options
from ferrorpc.wire.address import join_address
from ferrorpc.wire.handshake import diagnose
from ferrorpc.wire.identity import Role, described, peer_identities
from ferrorpc.wire.refusals import Refusals, shown
from ferrorpc.wire.tls import Dialer, TlsFiles
from ferrorpc.wire.token import NO_TOKEN, Token

PROTOCOL_VERSION: Final = 2
METHOD: Final = "/ferrorpc.v1.WorkerService/Stream"
STREAMS_MAX: Final = 4096
PATIENCE_SECONDS: Final = 20.0
STOP_SECONDS: Final = 0.5
"""How long goodbyes, and then the server's own end, may take: a process that ends has about two seconds for all it does."""

_LOOK_SECONDS: Final = 0.5
"""How often a stream that waits for its generation looks whether its caller is still there."""


_log = logging.getLogger("ferrorpc.transports")


class Seat(Protocol):
    """One rank of one generation, as the server hands streams to it."""

    assignment: Assignment

    def serve(self, source: int, lane: int, requests: Requests, context: Any) -> Iterator[bytes]:
        """Runs stream `lane` from rank `source` on the calling thread: yields what goes back."""

    def close(self, timeout: float) -> None:
        """Says goodbye on every stream, in at most `timeout` seconds."""

    def abandon_in_child(self) -> None:
        """In a forked child: nothing of the parent's streams is touched any more."""


class _Method(grpc.GenericRpcHandler):
    """The one method of the service; each call of it has its own way in."""

    def __init__(self, run: Callable[[Requests, Any], Iterator[bytes]]) -> None:
        self._run = run

    def service(self, handler_call_details: Any) -> Any:
        """What handles a call that has just come."""
        if handler_call_details.method != METHOD:
            return None
        requests = Requests()
        return grpc.stream_stream_rpc_method_handler(
            lambda messages, context: self._run(requests.of(messages), context), request_deserializer=requests.arrive
        )


class WorkerServer:
    """Listens for peers on a free port, from construction to `close`.

    Args:
        bind_host: address to listen on, such as "127.0.0.1" or "0.0.0.0".
        advertise_host: the host that peers are told to dial.
        token: the job's secret; streams must bring the same.
        tls: certificate, key and authority of this rank; None for plain connections.
        lanes: streams to each peer that the chunks of large messages are dealt out to, 1 to LANES_MAX.
        patience_seconds: how long a stream may take to say what it is, or to wait for a newer generation.

    Raises:
        ConfigError: `bind_host` is no address of this machine, or a file of `tls` cannot be used.
        AuthenticationError: the certificate of `tls` has expired, or is not of its authority.
    """

    def __init__(
        self,
        bind_host: str,
        advertise_host: str,
        clock: Clock,
        token: Token = NO_TOKEN,
        *,
        tls: TlsFiles | None = None,
        lanes: int = 1,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        keep_freed_memory()
        self.clock = clock
        self.token = token
        self.lanes = lanes
        self._tls = tls
        self._dialer = None if tls is None else Dialer(tls)
        self._patience_seconds = patience_seconds
        self._doorstep = Doorstep(clock, patience_seconds)
        self._refusals = Refusals()
        self._changed = threading.Condition()
        self._seats: dict[str, Seat] = {}
        self._closed = False
        self._server = grpc.server(
            ThreadPerCall(clock, "ferrorpc-inlet"),  # type: ignore[arg-type]
            options=options.data_server(),
            maximum_concurrent_rpcs=STREAMS_MAX,
        )
        self._server.add_generic_rpc_handlers((_Method(self._stream),))
        self.address = join_address(advertise_host, self._listen(bind_host))
        self._server.start()
        _exits.add(self)

    def _listen(self, bind_host: str) -> int:
        listen = join_address(bind_host, 0)
        try:
            if self._tls is None:
                return self._server.add_insecure_port(listen)
            return self._server.add_secure_port(listen, self._tls.server_credentials())
        except RuntimeError:
            raise ConfigError(
                f"cannot listen on {bind_host}: it is no address of this machine", hint="set FERRORPC_BIND to one that is"
            ) from None

    def dial(self, address: str, job: str) -> grpc.Channel:
        """A channel of its own to the server of a peer in this job, as private as this one."""
        if self._dialer is None:
            return grpc.insecure_channel(address, options=options.data_channel())
        return self._dialer.channel(address, job, Role.WORKER, options.data_channel())

    def diagnose(self, address: str, job: str) -> FerroError | None:
        """Why TLS does not let this process reach a peer; None where it is not to blame. Takes up to 4 s."""
        return diagnose(address, self._tls, job, Role.WORKER)

    def register(self, seat: Seat) -> None:
        """From now on streams of this seat's job and generation go to it."""
        with self._changed:
            if self._closed:
                raise GroupClosedError("this process's server for peers is closed")
            self._seats[seat.assignment.job] = seat
            self._changed.notify_all()

    def close(self) -> None:
        """Says goodbye on every stream and stops listening. Idempotent; under 2 s, whatever state the peers are in."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            seats = list(self._seats.values())
            self._changed.notify_all()
        for seat in seats:
            seat.close(STOP_SECONDS)
        self._server.stop(None).wait(STOP_SECONDS)
        _exits.discard(self)

    def abandon_in_child(self) -> None:
        """In a forked child: nothing of the parent's streams is touched, and to close this changes nothing for their peers."""
        self._changed = threading.Condition()  # a thread of the parent's may have held it
        self._closed = True
        for seat in self._seats.values():
            seat.abandon_in_child()

    def _stream(self, requests: Requests, context: Any) -> Iterator[bytes]:
        """One call, from its Open to its end. Runs on a thread of its own."""
        try:
            opening = self._opening(requests, context)
            seat = self._seat_of(opening, context)
        except FerroError as error:
            if isinstance(error, AuthenticationError | PermissionDeniedError):
                self._tell(f"a stream from {context.peer()} was refused: {error.message}")
            yield refusal(error)
            return
        except grpc.RpcError:
            return
        yield from seat.serve(opening.source_rank, opening.lane, requests, context)

    def _tell(self, text: str) -> None:
        with self._changed:
            words = self._refusals.words(text, int(self.clock.now() * 1e9))
        if words is not None:
            _log.warning("%s", words)

    def _opening(self, requests: Requests, context: Any) -> transport_pb2.Open:
        """The first message, once it has proved that its sender belongs to the job."""
        with self._doorstep.holding(context):
            data = next(requests, b"")
        try:
            message = transport_pb2.DataMessage.FromString(data)
        except DecodeError:
            raise CodecError("a stream begins with bytes that are no message of ours") from None
        if not message.HasField("open"):
            raise CodecError("a stream begins with an Open, which says whose it is")
        opening = message.open
        found = peer_identities(context.auth_context())
        if self._tls is not None and not any(one.role is Role.WORKER and one.covers(opening.job) for one in found or ()):
            raise AuthenticationError(
                f"who dialled rank {opening.target_rank} is no worker of job {shown(opening.job)} by its certificate, but "
                f"{described(found or ())}"
            )
        if not self.token.accepts(opening.token):
            raise AuthenticationError("the token of the stream is not that of this job")
        if opening.protocol_version != PROTOCOL_VERSION:
            raise VersionMismatchError(
                f"rank {opening.source_rank} speaks version {opening.protocol_version} of the data plane's protocol, "
                f"rank {opening.target_rank} version {PROTOCOL_VERSION}"
            )
        return opening

    def _seat_of(self, opening: transport_pb2.Open, context: Any) -> Seat:
        """The seat this stream is for; waits where this process may still hear of it."""
        deadline = self.clock.now() + self._patience_seconds
        with self._changed:
            while (seat := self._match(opening)) is None:
                remaining = deadline - self.clock.now()
                if self._closed or remaining <= 0 or not context.is_active():
                    raise StaleGenerationError(
                        f"rank {opening.target_rank} knows nothing of generation {opening.generation} of job "
                        f"{shown(opening.job)} after {self._patience_seconds:g} s"
                    )
                self._changed.wait(min(remaining, _LOOK_SECONDS))
        return seat

    def _match(self, opening: transport_pb2.Open) -> Seat | None:
        """The seat this stream is for, or None as long as there may be one later."""
        seat = self._seats.get(opening.job)
        if seat is None:
            if self._seats:
                raise PermissionDeniedError(f"this process has no part in job {shown(opening.job)}")
            return None
        mine = seat.assignment
        if mine.cluster_id != opening.cluster_id or mine.generation < opening.generation:
            return None
        if mine.generation > opening.generation:
            raise StaleGenerationError(
                f"rank {opening.source_rank} speaks for generation {opening.generation}, "
                f"but job {mine.job!r} is in generation {mine.generation}",
                generation=mine.generation,
            )
        if opening.target_rank != mine.rank or not 0 <= opening.source_rank < mine.size or opening.source_rank == mine.rank:
            raise PermissionDeniedError(
                f"a stream from rank {opening.source_rank} to rank {opening.target_rank} came to rank {mine.rank} "
                f"of {mine.size}"
            )
        return seat


_exits: Final[weakref.WeakSet[WorkerServer]] = weakref.WeakSet()
_inherited: list[WorkerServer] = []
"""What a forked child got from its parent: kept, because finalising it would touch the parent's sockets."""


def _say_goodbye() -> None:
    """Nobody called close: peers are told all the same."""
    for server in list(_exits):
        server.close()


def _abandon_all() -> None:
    """In a forked child: streams belong to its parent."""
    _inherited.extend(_exits)
    _exits.clear()
    for server in _inherited:
        server.abandon_in_child()


atexit.register(_say_goodbye)
os.register_at_fork(after_in_child=_abandon_all)
