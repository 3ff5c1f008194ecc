"""Conversion between errors and gRPC statuses. Errors of ferrorpc travel whole in the trailing metadata of a call.

Errors of gRPC itself are translated by a table. This is the only place where they become errors of ferrorpc. It works for grpc
and grpc.aio, whose exceptions have the same interface.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import grpc

from ferrorpc.errors import (
    AuthenticationError,
    CodecError,
    CoordinatorUnavailableError,
    ErrorCode,
    FerroError,
    LimitExceededError,
    PermissionDeniedError,
    UsageError,
    VersionMismatchError,
)
from ferrorpc.v1 import error_pb2
from ferrorpc.wire.error_detail import detail_of, restore
from ferrorpc.wire.parse import parse

TRAILER: Final = "ferrorpc-error-bin"
"""The metadata key of the ErrorDetail."""

TRAILER_BYTES_MAX: Final = 6 << 10
"""gRPC refuses metadata of more than 8 to 16 KiB. A longer error loses its fields and the end of its message."""

_DETAILS_CHARACTERS_MAX: Final = 512

STATUS_OF: Final = {
    ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
    ErrorCode.CONFIG: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.USAGE: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.INVALID_RANK: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.INVALID_WORLD_SIZE: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.SELF_SEND: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.TENSOR_MISMATCH: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.GROUP_CLOSED: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.RENDEZVOUS_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorCode.BARRIER_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorCode.STORE_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorCode.COLLECTIVE_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorCode.COORDINATOR_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.STALE_GENERATION: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.PEER_LOST: grpc.StatusCode.ABORTED,
    ErrorCode.COLLECTIVE_MISMATCH: grpc.StatusCode.ABORTED,
    ErrorCode.GROUP_ABORTED: grpc.StatusCode.ABORTED,
    ErrorCode.LIMIT_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.MESSAGE_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.CODEC: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.AUTHENTICATION: grpc.StatusCode.UNAUTHENTICATED,
    ErrorCode.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    ErrorCode.VERSION_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.BACKEND_UNAVAILABLE: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.NCCL: grpc.StatusCode.ABORTED,
}
"""The status that other clients and proxies see of each error. Clients of ferrorpc read the trailer instead."""

_FOREIGN: Final[dict[grpc.StatusCode, tuple[type[FerroError], str]]] = {
    grpc.StatusCode.UNAVAILABLE: (CoordinatorUnavailableError, "cannot be reached"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (CoordinatorUnavailableError, "did not answer in time"),
    grpc.StatusCode.CANCELLED: (CoordinatorUnavailableError, "ended the call"),
    grpc.StatusCode.INTERNAL: (CoordinatorUnavailableError, "broke the connection"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (LimitExceededError, "refused a message over its limit"),
    grpc.StatusCode.UNIMPLEMENTED: (VersionMismatchError, "does not know this call"),
    grpc.StatusCode.UNAUTHENTICATED: (AuthenticationError, "does not know who this is"),
    grpc.StatusCode.PERMISSION_DENIED: (PermissionDeniedError, "does not permit this"),
    grpc.StatusCode.INVALID_ARGUMENT: (UsageError, "refused the request"),
    grpc.StatusCode.FAILED_PRECONDITION: (UsageError, "refused the request in its present state"),
}
"""Errors for statuses without a trailer, from gRPC itself or other servers. Statuses not listed become the root class."""
_HTTP_NOT_FOUND: Final = "Received http2 header with status: 404"
"""gRPC's text where a server does not speak its protocol. It reports UNIMPLEMENTED, as a server of another version does."""

Trailers: TypeAlias = tuple[tuple[str, bytes], ...]


def to_status(error: FerroError) -> tuple[grpc.StatusCode, str, Trailers]:
    """Status, text and trailing metadata for a call that ends with this error.

    `context.abort` of grpc.aio takes all three; that of grpc takes the first two, after `set_trailing_metadata`.
    """
    data = detail_of(error).SerializeToString()
    if len(data) > TRAILER_BYTES_MAX:
        short = error_pb2.ErrorDetail(
            code=int(error.code),  # type: ignore[arg-type]
            message=error.message[: TRAILER_BYTES_MAX // 8] + " [shortened]",
            hint=error.hint[: TRAILER_BYTES_MAX // 8],
            retryable=error.retryable,
        )
        data = short.SerializeToString()
    return STATUS_OF[error.code], error.message[:_DETAILS_CHARACTERS_MAX], ((TRAILER, data),)


def error_of(ended: grpc.RpcError, who: str = "the other side") -> FerroError:
    """The error at the end of a call.

    Args:
        who: subject of the error message where gRPC itself failed, such as "the coordinator at host:29700".
    """
    detail = _trailer(ended)
    if detail is not None:
        return restore(detail)
    code, text = _status(ended)
    chosen, what = _FOREIGN.get(code, (FerroError, "failed"))
    if text.startswith(_HTTP_NOT_FOUND):
        chosen, what = CoordinatorUnavailableError, "cannot be reached: a proxy or another HTTP server answers"
    return chosen(f"{who} {what} ({code.name}: {text})", grpc_status=code.name)


def _status(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    """Status and text. The bare RpcError of a server's request iterator has neither; its caller has gone."""
    code = error.code() if hasattr(error, "code") else None
    text = error.details() if hasattr(error, "details") else None
    return code or grpc.StatusCode.CANCELLED, text or "no details"


def _trailer(error: grpc.RpcError) -> error_pb2.ErrorDetail | None:
    trailers: Iterable[Any] = (error.trailing_metadata() if hasattr(error, "trailing_metadata") else None) or ()
    for key, value in trailers:
        if key == TRAILER:
            try:
                return parse(error_pb2.ErrorDetail, value, "the trailer of a call is no ErrorDetail")
            except CodecError:
                return None
    return None
