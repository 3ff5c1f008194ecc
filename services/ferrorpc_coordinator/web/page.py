"""The status page as an ASGI application: one HTML page with its own script and style, JSON, event streams, and metrics.

    /                the page                    /api/v1/jobs     every job
    /events?job=     states as they change       /api/v1/state    one state, of ?job= or of the busiest
    /metrics         for Prometheus              /healthz         200 while it serves, 503 while it drains

Everything is read-only and served from here: the page needs no other host and no internet.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePath
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ferrorpc.errors import LimitExceededError
from ferrorpc_coordinator.web.access import AccessMiddleware, App
from ferrorpc_coordinator.web.event_streams import EventStreams
from ferrorpc_coordinator.web.view import CoordinatorView

STATIC: Final = files(__package__) / "static"
_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class Page:
    """Answers requests from a view of the coordinator and its event streams."""

    def __init__(self, view: CoordinatorView, streams: EventStreams) -> None:
        self._view = view
        self._streams = streams

    def application(self, *, loopback: bool) -> App:
        """The application for an ASGI server. `loopback`: whether the server listens on loopback only."""
        static = [Route(f"/{file.name}", _answer(file)) for file in STATIC.iterdir() if PurePath(file.name).suffix in _TYPES]
        routes = [
            Route("/", _answer(STATIC / "page.html")),
            Route("/metrics", self._metrics),
            Route("/healthz", self._healthz),
            Route("/api/v1/jobs", self._jobs),
            Route("/api/v1/state", self._state),
            Route("/events", self._events),
        ]
        return AccessMiddleware(Starlette(routes=[*routes, *static]), self._view.access, loopback=loopback)

    async def _metrics(self, request: Request) -> Response:
        return Response(self._view.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _healthz(self, request: Request) -> Response:
        healthy = self._view.healthy()
        return PlainTextResponse("ok\n" if healthy else "draining\n", status_code=200 if healthy else 503)

    async def _jobs(self, request: Request) -> Response:
        return JSONResponse(self._view.jobs())

    async def _state(self, request: Request) -> Response:
        name = request.query_params.get("job", "")
        job = self._view.job(name)
        if job is None:
            return JSONResponse({"error": f"there is no job {name!r} here" if name else "there is no job yet"}, status_code=404)
        return JSONResponse(self._view.state(job))

    async def _events(self, request: Request) -> Response:
        try:
            states = self._streams.watch(request.query_params.get("job", ""))
        except LimitExceededError as error:
            return PlainTextResponse(f"{error}\n", status_code=503)
        return StreamingResponse(states, media_type="text/event-stream")


def _answer(file: Traversable) -> Callable[[Request], Awaitable[Response]]:
    """A handler that answers with a file, which is read once."""
    content, media_type = file.read_bytes(), _TYPES[PurePath(file.name).suffix]

    async def answer(request: Request) -> Response:
        return Response(content, media_type=media_type)

    return answer
