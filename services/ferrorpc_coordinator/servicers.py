"""The gRPC service: turns RPCs into events of the driver.

Messages are received and sent as bytes: a frame for a thousand sessions is encoded once, and a request that cannot be parsed is
a CodecError and not an INTERNAL error of gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Final

import grpc

from ferrorpc.errors import CodecError, CoordinatorUnavailableError, FerroError, UsageError, require
from ferrorpc.v1 import error_pb2, session_pb2
from ferrorpc.wire import status
from ferrorpc.wire.error_detail import restore
from ferrorpc.wire.identity import peer_identities
from ferrorpc.wire.parse import M, parse
from ferrorpc.wire.refusal_log import quoted
from ferrorpc_coordinator.driver import Driver
from ferrorpc_coordinator.first_message import first_message
from ferrorpc_coordinator.metrics import Counters
from ferrorpc_coordinator.send_queue import SendQueue
from ferrorpc_coordinator.state.events import Caller, UnaryRequest
from ferrorpc_coordinator.state.store import may_answer_much, sets_a_value
from ferrorpc_coordinator.unread import ANSWERS_BYTES_MAX, UNREAD_BYTES_MAX, UnreadBytes
from ferrorpc_coordinator.write_budget import WriteBudget

SERVICE: Final = "ferrorpc.v1.CoordinatorService"

SMALL_ANSWER_BYTES: Final = 4 << 10
"""An answer up to this size costs no more than its call."""

_NO_FRAME: Final = "a session sent bytes that are not a ClientFrame"

_UNARY: Final[dict[str, type[UnaryRequest]]] = {
    "Status": session_pb2.StatusRequest,
    "Store": session_pb2.UnaryStoreRequest,
    "Barrier": session_pb2.UnaryBarrierRequest,
    "Report": session_pb2.UnaryReportRequest,
}

Context = grpc.aio.ServicerContext[bytes, bytes]
UnaryHandler = Callable[[AsyncIterator[bytes], Context], Awaitable[bytes]]


def _sets_a_value(request: UnaryRequest) -> bool:
    return isinstance(request, session_pb2.UnaryStoreRequest) and sets_a_value(request.request)


def _may_answer_much(request: UnaryRequest) -> bool:
    if isinstance(request, session_pb2.UnaryStoreRequest):
        return may_answer_much(request.request)
    return not isinstance(request, session_pb2.UnaryReportRequest)


class CoordinatorServicer:
    """The RPCs of the coordinator, on one driver."""

    def __init__(self, driver: Driver, counters: Counters) -> None:
        self._driver = driver
        self._counters = counters
        self._unread_answers = UnreadBytes()
        self._left_on_streams = UnreadBytes()
        self._write_budget = WriteBudget()

    def handler(self) -> grpc.GenericRpcHandler:
        """The handler to register with a gRPC server."""
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {"Session": grpc.stream_stream_rpc_method_handler(self._session)}
        for name, request_type in _UNARY.items():
            methods[name] = grpc.stream_unary_rpc_method_handler(self._unary(name, request_type))
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    # -- the Session stream --------------------------------------------------------------------------------------------

    async def _session(self, _: AsyncIterator[bytes], context: Context) -> None:
        async with self._counted("Session", context):
            hello = await _read_hello(context)
            queue = self._connect(hello, _caller(context))
            reader = asyncio.create_task(self._read(context, queue))  # whichever of the two ends first ends the other
            try:
                await queue.drain(partial(self._write_budget.write, context.write, hello.job))
            finally:
                reader.cancel()
                self._driver.disconnect(queue.stream)
            if queue.problem is not None:
                raise queue.problem

    def _connect(self, hello: session_pb2.Hello, caller: Caller) -> SendQueue:
        left_bytes = self._left_on_streams.of(hello.job)
        if left_bytes > UNREAD_BYTES_MAX:
            raise CoordinatorUnavailableError(
                f"clients of job {quoted(hello.job)} left {left_bytes} bytes unread on streams that have ended, "
                f"more than {UNREAD_BYTES_MAX >> 20} MiB",
                hint="try again shortly; whoever gives up a stream must cancel its call",
            )
        queue = self._driver.connect(hello, caller)
        queue.left = partial(self._left_on_streams.add, hello.job)
        return queue

    async def _read(self, context: Context, queue: SendQueue) -> None:
        try:
            while isinstance(data := await context.read(), bytes):  # the end of the stream is grpc.aio.EOF
                frame = compact(session_pb2.ClientFrame, data, _NO_FRAME)
                self._driver.receive(queue.stream, frame)
                del data, frame  # their memory, which may be much, until the next frame
                await queue.wait_for_room()
        except CodecError as error:
            queue.problem = error
        finally:
            # The end of the stream without a Leave is the fastest sign of death: report it before anything is written.
            self._driver.disconnect(queue.stream)
            queue.finish()

    # -- unary calls ---------------------------------------------------------------------------------------------------

    def _unary(self, name: str, request_type: type[UnaryRequest]) -> UnaryHandler:
        async def handle(_: AsyncIterator[bytes], context: Context) -> bytes:
            async with self._counted(name, context):
                if context.time_remaining() is None:
                    raise UsageError(f"{name} was called without a deadline", hint="give the call a timeout")
                request = await _read_request(context, request_type)
                if _may_answer_much(request):
                    self._require_room(request.job, self._unread_answers.of(request.job), "UNREAD_BYTES_MAX", UNREAD_BYTES_MAX)
                hold = partial(self._hold, context, request.job, is_refusable=not _sets_a_value(request))
                answering = self._driver.call(request, _caller(context), hold)
                del request  # its memory, which may be much, for the time of the wait
                answer = await answering
                if isinstance(answer, error_pb2.ErrorDetail):
                    raise restore(answer)
            return answer.SerializeToString()

        return handle

    def _hold(self, context: Context, job: str, size_bytes: int, *, is_refusable: bool) -> None:
        """Counts an answer until it is read or its call has ended.

        Args:
            is_refusable: the call has changed nothing, so its answer may be refused.

        Raises:
            LimitExceededError: the clients of this job leave too much unread.
        """
        if size_bytes > SMALL_ANSWER_BYTES:
            unread = self._unread_answers
            if is_refusable:
                self._require_room(job, unread.of(job) + size_bytes, "ANSWERS_BYTES_MAX", ANSWERS_BYTES_MAX)
            unread.add(job, size_bytes)
            context.add_done_callback(lambda _: unread.add(job, -size_bytes))  # type: ignore[arg-type]  # stubs lack functions

    def _require_room(self, job: str, size_bytes: int, limit: str, bytes_max: int) -> None:
        require(f"the bytes that calls of job {quoted(job)} leave unread", size_bytes, limit, bytes_max)

    @contextlib.asynccontextmanager
    async def _counted(self, name: str, context: Context) -> AsyncIterator[None]:
        """Ends a call with the FerroError that is raised in it, and counts how it ended. One that its client has cut off is
        cancelled, or gRPC raises as nobody is there to be written to; gRPC itself ends one in which a bug raises."""
        ended = grpc.StatusCode.UNKNOWN
        try:
            yield
            ended = grpc.StatusCode.OK
        except (asyncio.CancelledError, grpc.aio.BaseError):
            ended = grpc.StatusCode.CANCELLED
            raise
        except FerroError as error:
            ended, details, trailers = status.to_status(error)
            await context.abort(ended, details, trailers)
        finally:
            self._counters.handled[name, ended.name] += 1


def _caller(context: Context) -> Caller:
    """The caller, with the identities that its handshake proved."""
    return Caller(context.peer(), peer_identities(context.auth_context()))


def compact(message_type: type[M], data: bytes, problem: str) -> M:
    """The message in `data`, for requests, of which parts are kept until they are answered.

    Each part of a parsed message keeps the memory of all of it: also that of fields of later versions, and of values that were
    replaced by later ones in the same bytes. A message with such is parsed again without.

    Raises:
        CodecError: `problem`, as the bytes are no such message.
    """
    message = parse(message_type, data, problem)
    message.DiscardUnknownFields()
    needed = message.SerializeToString()
    return message if len(needed) == len(data) else message_type.FromString(needed)


async def _read_request(context: Context, request_type: type[UnaryRequest]) -> UnaryRequest:
    what = request_type.__name__
    return compact(request_type, await first_message(context, what), f"bytes that are not a {what}")


async def _read_hello(context: Context) -> session_pb2.Hello:
    data = await first_message(context, "Hello")
    frame = compact(session_pb2.ClientFrame, data, _NO_FRAME)
    if not frame.HasField("hello"):
        raise UsageError(f"the first frame of a session is a Hello, not {frame.WhichOneof('body') or 'an empty one'}")
    return frame.hello
