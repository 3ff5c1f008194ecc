"""The service grpc.health.v1, for probes of Kubernetes and `ferrorpc health`.

grpcio's own servicer leaves its Watch streams open at shutdown, which delays it and logs a cancellation for each; here they
end after their last answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

Response: TypeAlias = health_pb2.HealthCheckResponse
Context = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Reports SERVING for the given names until `stop`, then NOT_SERVING."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(services)
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """From now on, reports NOT_SERVING."""
        self._stopped.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> Response:
        """The current status; NOT_FOUND for an unknown service."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service is called {request.service!r} here")
        return Response(status=self._status(request.service))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """The current status, and the last one if it differs."""
        first = self._status(request.service)
        await context.write(Response(status=first))
        await self._stopped.wait()
        last = self._status(request.service)
        if last != first:
            await context.write(Response(status=last))

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        if service not in self._services:
            return Response.SERVICE_UNKNOWN
        return Response.NOT_SERVING if self._stopped.is_set() else Response.SERVING
