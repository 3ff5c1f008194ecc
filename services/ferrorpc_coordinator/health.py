"""The service grpc.health.v1, for probes of Kubernetes and `ferrorpc health`.

grpcio's own servicer leaves its Watch streams open at shutdown, which delays it and logs a cancellation for each; here they
end after their last answer. Anybody may call it, so nothing is kept or said of a request but the beginning of a name.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from ferrorpc.errors import FerroError, require
from ferrorpc.wire import status
from ferrorpc.wire.parse import parse
from ferrorpc.wire.refusal_log import QUOTED_CHARACTERS, quoted
from ferrorpc_coordinator.first_message import first_message

HEALTH_SERVICE: Final = "grpc.health.v1.Health"
WATCHES_MAX: Final = 1000
"""Watches that may be open at once."""

_REQUEST: Final = "HealthCheckRequest"

Response: TypeAlias = health_pb2.HealthCheckResponse
Context = grpc.aio.ServicerContext[bytes, health_pb2.HealthCheckResponse]


class Health:
    """Reports SERVING for the given names until `stop`, then NOT_SERVING."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(services)
        self._stopped = asyncio.Event()
        self._watches = 0

    def handler(self) -> grpc.GenericRpcHandler:
        """The handler to register with a gRPC server."""
        encode = Response.SerializeToString
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Check": grpc.stream_unary_rpc_method_handler(self._check, response_serializer=encode),
            "Watch": grpc.stream_stream_rpc_method_handler(self._watch, response_serializer=encode),
        }
        return grpc.method_handlers_generic_handler(HEALTH_SERVICE, methods)

    def stop(self) -> None:
        """From now on, reports NOT_SERVING."""
        self._stopped.set()

    async def _check(self, _: AsyncIterator[bytes], context: Context) -> Response:
        """The current status; NOT_FOUND for an unknown service."""
        service = await _requested_service(context)
        if service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service is called {quoted(service)} here")
        return Response(status=self._status(service))

    async def _watch(self, _: AsyncIterator[bytes], context: Context) -> None:
        """The current status, and the last one if it differs."""
        service = await _requested_service(context)
        try:
            require("open Watch calls", self._watches + 1, "WATCHES_MAX", WATCHES_MAX)
        except FerroError as error:
            await context.abort(*status.to_status(error))
        self._watches += 1
        try:
            first = self._status(service)
            await context.write(Response(status=first))
            await self._stopped.wait()
            last = self._status(service)
            if last != first:
                await context.write(Response(status=last))
        finally:
            self._watches -= 1

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        if service not in self._services:
            return Response.SERVICE_UNKNOWN
        return Response.NOT_SERVING if self._stopped.is_set() else Response.SERVING


async def _requested_service(context: Context) -> str:
    """The name in the request of this call, which ends here without one. A name too long to be known is cut."""
    try:
        data = await first_message(context, _REQUEST)
        request = parse(health_pb2.HealthCheckRequest, data, f"bytes that are not a {_REQUEST}")
    except FerroError as error:
        await context.abort(*status.to_status(error))
        raise
    return str(request.service[: QUOTED_CHARACTERS + 1])
