"""The gRPC server of a worker process. One server lasts through all generations and hands each stream to its transport.

A stream begins with an Open message, which names its job, cluster, generation and pair of ranks. A stream of another job is
refused. A stream of an older generation is refused with this rank's generation. A stream of a newer one waits until this rank
has joined that generation too. The bind address and the advertised address are separate, so that workers in containers and
behind other names can reach each other.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Final, Protocol

import grpc

from ferrorpc.errors import (
    AuthenticationError,
    CodecError,
    FerroError,
    GroupClosedError,
    PermissionDeniedError,
    StaleGenerationError,
    VersionMismatchError,
)
from ferrorpc.guard import SYSTEM_CLOCK, thread_needed
from ferrorpc.transports.grpc.incoming_stream import refusal
from ferrorpc.transports.grpc.malloc_tuning import keep_freed_memory
from ferrorpc.transports.grpc.pending_streams import PendingStreams
from ferrorpc.transports.grpc.request_iterator import RequestIterator
from ferrorpc.transports.grpc.threads import ThreadPerCall
from ferrorpc.types import Assignment
from ferrorpc.v1 import transport_pb2
from ferrorpc.wire import options
from ferrorpc.wire.address import cannot_listen, join_address, listen
from ferrorpc.wire.identity import Role, compared, described, peer_identities
from ferrorpc.wire.limits import DATA_PROTOCOL_VERSION
from ferrorpc.wire.parse import parse
from ferrorpc.wire.refusal_log import RefusalLog, quoted
from ferrorpc.wire.tls import Dialer, TlsFiles
from ferrorpc.wire.tls_diagnosis import diagnose
from ferrorpc.wire.token import NO_TOKEN, Token

METHOD: Final = "/ferrorpc.v1.WorkerService/Stream"
STREAMS_MAX: Final = 4096
OPEN_TIMEOUT_SECONDS: Final = 20.0
TOKEN_SECONDS: Final = 1.0
STOP_SECONDS: Final = 0.5
"""How long the server's stop may take."""

_POLL_SECONDS: Final = 0.5
"""How often a stream that waits for its generation checks whether its caller is still connected."""


_log = logging.getLogger("ferrorpc.transports")


class StreamHandler(Protocol):
    """Handles the streams of one rank in one generation: its transport."""

    assignment: Assignment

    def serve(self, source: int, lane: int, requests: RequestIterator, context: Any) -> Iterator[bytes]:
        """Runs stream `lane` from rank `source` on the calling thread. Yields what goes back."""

    def abandon_in_child(self) -> None:
        """In a forked child: leaves the parent's streams alone from now on."""


class _Method(grpc.GenericRpcHandler):
    """The one method of the service. Each call gets a RequestIterator of its own."""

    def __init__(self, run: Callable[[RequestIterator, Any], Iterator[bytes]]) -> None:
        self._run = run

    def service(self, handler_call_details: Any) -> Any:
        """Returns gRPC's handler of a new call."""
        if handler_call_details.method != METHOD:
            return None
        requests = RequestIterator()
        return grpc.stream_stream_rpc_method_handler(
            lambda messages, context: self._run(requests.attach(messages), context), request_deserializer=requests.deserialize
        )


class WorkerServer:
    """Listens for peers on a free port, from construction to `close`.

    Args:
        bind_host: address to listen on, such as "127.0.0.1" or "0.0.0.0".
        advertise_host: the host that peers dial.
        token: the job's secret; streams must carry the same, or the one before it. Its file is looked at every
            TOKEN_SECONDS, also where nobody dials: else one that was replaced twice meanwhile would still be accepted.
        tls: certificate, key and authority of this rank; None for plain connections.
        lanes: number of streams to each peer among which the chunks of large messages are distributed, 1 to LANES_MAX.
        open_timeout_seconds: how long a stream may take to send its Open, and how long it may wait for a newer generation.
        lease_seconds: that of this rank; streams to and from peers last at least as long without a sign of life.

    Raises:
        ConfigError: `bind_host` is no address of this machine, every port is in use (then it is retryable), or a file of `tls`
            cannot be used.
        AuthenticationError: the certificate of `tls` has expired, or is not of its authority.
    """

    def __init__(
        self,
        bind_host: str,
        advertise_host: str,
        token: Token = NO_TOKEN,
        *,
        tls: TlsFiles | None = None,
        lanes: int = 1,
        open_timeout_seconds: float = OPEN_TIMEOUT_SECONDS,
        lease_seconds: float = 0.0,
    ) -> None:
        keep_freed_memory()
        self.token = token
        self._token_parker = SYSTEM_CLOCK.parker()
        self.lanes = lanes
        self._tls = tls
        self._dialer = None if tls is None else Dialer(tls)
        self._open_timeout_seconds = open_timeout_seconds
        self._lease_seconds = lease_seconds
        self._pending = PendingStreams(SYSTEM_CLOCK, open_timeout_seconds)
        self._refusals = RefusalLog()
        self._changed = threading.Condition()
        self._handler: StreamHandler | None = None
        self.close_lanes: Callable[[], None] = lambda: None
        """Closes the lanes of the newest generation, also those that are no streams."""
        self._closed = False
        self._threads = ThreadPerCall(SYSTEM_CLOCK, "ferrorpc-incoming")
        self._server = grpc.server(
            self._threads,  # type: ignore[arg-type]
            options=options.data_server(lease_seconds),
            maximum_concurrent_rpcs=STREAMS_MAX,
        )
        self._server.add_generic_rpc_handlers((_Method(self._stream),))
        try:
            self._port = self._listen(bind_host)
            self.advertise(advertise_host)
            _open_servers.add(self)
            self._start()
            if token.may_change:
                SYSTEM_CLOCK.start(self._watch_token, "ferrorpc-token")
        except BaseException:
            self._closed = True
            _open_servers.discard(self)
            with contextlib.suppress(RuntimeError):
                self._server.stop(0.0)  # else it goes on listening, and gRPC waits for its thread when the process exits
            raise

    def _watch_token(self) -> None:
        while not self._closed:
            self.token.current()
            self._token_parker.park(SYSTEM_CLOCK.now() + TOKEN_SECONDS)

    def _start(self) -> None:
        """Starts gRPC's server, on a thread that no interrupt strikes: gRPC cannot stop what it has started in part."""
        started = Future[None]()
        try:
            SYSTEM_CLOCK.start(partial(self._start_apart, started), "ferrorpc-server")
            started.result()
        except BaseException:
            if not started.cancel():
                wait([started])
            else:
                with contextlib.suppress(RuntimeError):
                    self._server.start()  # gRPC stops, and gives the port back, only what was started
            raise

    def _start_apart(self, started: Future[None]) -> None:
        if not started.set_running_or_notify_cancel():
            return
        try:
            with thread_needed("of gRPC's server"):
                self._server.start()
        except BaseException as error:  # noqa: BLE001  the thread that waits raises it
            started.set_exception(error)
        else:
            started.set_result(None)

    def _listen(self, bind_host: str) -> int:
        address = join_address(bind_host, 0)
        try:
            if self._tls is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, self._tls.server_credentials())
        except RuntimeError as refusal:  # which does not say why
            reason = OSError(0, str(refusal))
            try:
                listen(bind_host, 0).close()
            except OSError as error:
                reason = error
            raise cannot_listen(bind_host, reason) from None

    def advertise(self, host: str) -> None:
        """Sets `address`, where peers dial this server, to its port on this host."""
        self.address = join_address(host, self._port)

    def dial(self, address: str, job: str) -> grpc.Channel:
        """A new channel to the server of a peer in this job, over TLS where this server uses TLS."""
        if self._dialer is None:
            return grpc.insecure_channel(address, options=options.data_channel(self._lease_seconds))
        return self._dialer.channel(address, job, Role.WORKER, options.data_channel(self._lease_seconds))

    def diagnose(self, address: str, job: str) -> FerroError | None:
        """Why TLS prevents this process from reaching a peer; None where it does not. Takes up to 4 s."""
        return diagnose(address, self._tls, job, Role.WORKER)

    def register(self, handler: StreamHandler, close_lanes: Callable[[], None]) -> None:
        """Hands streams to this handler from now on: those of its job and generation. Sets `close_lanes`."""
        with self._changed:
            if self._closed:
                raise GroupClosedError("this process's server for peers is closed")
            self._handler = handler
            self.close_lanes = close_lanes
            self._changed.notify_all()

    def close(self) -> None:
        """Closes the lanes and stops listening. Idempotent. Takes as long as healthy peers need to receive what was sent to
        them, up to CLOSE_SECONDS; those of a group that was closed have received it already."""
        with self._changed:
            if self._closed:
                return
            self._closed = self._threads.closing = True
            self._changed.notify_all()
        self._token_parker.unpark()
        try:
            self.close_lanes()
        finally:  # also where that is interrupted
            self._stop()
            _open_servers.discard(self)

    def _stop(self) -> None:
        """Stops gRPC's server, whose thread may have ended for lack of memory: `stop(None)` would wait for that for ever."""
        with contextlib.suppress(RuntimeError):  # no thread can be started to end the calls, as in an interpreter that exits
            self._server.stop(0.0).wait(STOP_SECONDS)

    def abandon_in_child(self) -> None:
        """In a forked child: leaves the parent's streams alone; closing this server has no effect on its peers."""
        self._changed = threading.Condition()  # a thread of the parent may have held it
        self._closed = True
        if self._handler is not None:
            self._handler.abandon_in_child()

    def _stream(self, requests: RequestIterator, context: Any) -> Iterator[bytes]:
        """One call, from its Open to its end, on a thread of its own."""
        try:
            opening = self._read_open(requests, context)
            handler = self._handler_for(opening, context)
        except FerroError as error:
            if isinstance(error, AuthenticationError | PermissionDeniedError):
                self._log_refusal(f"a stream from {context.peer()} was refused: {error.message}")
            yield refusal(error)
            return
        except grpc.RpcError:
            return
        yield from handler.serve(opening.source_rank, opening.lane, requests, context)

    def _log_refusal(self, text: str) -> None:
        with self._changed:
            message = self._refusals.message(text, int(SYSTEM_CLOCK.now() * 1e9))
        if message is not None:
            _log.warning("%s", message)

    def _read_open(self, requests: RequestIterator, context: Any) -> transport_pb2.Open:
        """The Open message of a stream, once its sender has proved that it belongs to the job."""
        with self._pending.wait_for_open(context):
            data = next(requests, b"")
        message = parse(transport_pb2.DataMessage, data, "a stream begins with bytes that are no message of ours")
        if not message.HasField("open"):
            raise CodecError("a stream begins with an Open, which says whose it is")
        opening = message.open
        found = peer_identities(context.auth_context())
        if self._tls is not None and not any(one.role is Role.WORKER and one.covers(opening.job) for one in found or ()):
            raise AuthenticationError(
                f"who dialled rank {opening.target_rank} is no worker of {compared(opening.job)} by its certificate, but "
                f"{described(found or ())}"
            )
        if not self.token.accepts(opening.token, opening.token_before or opening.token):  # older peers bring only one
            raise AuthenticationError("the token of the stream is not that of this job")
        if opening.protocol_version != DATA_PROTOCOL_VERSION:
            raise VersionMismatchError(
                f"rank {opening.source_rank} speaks version {opening.protocol_version} of the data plane's protocol, "
                f"rank {opening.target_rank} version {DATA_PROTOCOL_VERSION}"
            )
        return opening

    def _handler_for(self, opening: transport_pb2.Open, context: Any) -> StreamHandler:
        """The handler of this stream; waits for it where it may still be registered."""
        deadline = SYSTEM_CLOCK.now() + self._open_timeout_seconds
        with self._changed:
            while (handler := self._match(opening)) is None:
                remaining = deadline - SYSTEM_CLOCK.now()
                if self._closed or remaining <= 0 or not context.is_active():
                    raise StaleGenerationError(
                        f"rank {opening.target_rank} knows nothing of generation {opening.generation} of job "
                        f"{quoted(opening.job)} after {self._open_timeout_seconds:g} s"
                    )
                self._changed.wait(min(remaining, _POLL_SECONDS))
        return handler

    def _match(self, opening: transport_pb2.Open) -> StreamHandler | None:
        """The handler of this stream; None where it may still be registered."""
        handler = self._handler
        if handler is None:
            return None
        mine = handler.assignment
        if opening.job != mine.job:
            raise PermissionDeniedError(f"this process has no part in job {quoted(opening.job)}")
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
        return handler


_open_servers: Final[weakref.WeakSet[WorkerServer]] = weakref.WeakSet()
_inherited: list[WorkerServer] = []
"""In a forked child, the servers of its parent. They are kept because their finalizers would touch the parent's sockets."""


def _close_all() -> None:
    """At exit: says goodbye to peers although nobody called `close`."""
    for server in list(_open_servers):
        server.close()


def _abandon_all() -> None:
    """In a forked child: the streams belong to its parent."""
    _inherited.extend(_open_servers)
    _open_servers.clear()
    for server in _inherited:
        server.abandon_in_child()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_abandon_all)
