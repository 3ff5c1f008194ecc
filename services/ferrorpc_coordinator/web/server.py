"""The HTTP server for status page, metrics and health: uvicorn on the coordinator's own event loop.

It needs the extra `ui`; without it, a coordinator with an HTTP port does not start.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ferrorpc.errors import ConfigError
from ferrorpc.wire.address import is_loopback, join_address, listen
from ferrorpc.wire.tls import TlsFiles
from ferrorpc_coordinator.web.event_streams import EventStreams
from ferrorpc_coordinator.web.view import CoordinatorView

if TYPE_CHECKING:
    import uvicorn

STOP_SECONDS: Final = 1.0
HANDSHAKE_SECONDS: Final = 5.0
"""How long a TLS handshake may take. During it, a connection counts toward no other limit."""
_BACKLOG: Final = 128
_NEEDED: Final = ("prometheus_client", "starlette", "uvicorn")


class HttpServer:
    """uvicorn without signal handlers of its own, from `start` to `stop`."""

    def __init__(self, port: int, server: uvicorn.Server, task: asyncio.Task[None], streams: EventStreams) -> None:
        self.port = port
        self._server = server
        self._task = task
        self._streams = streams

    @classmethod
    def start(cls, view: CoordinatorView, host: str, port: int, tls: TlsFiles | None = None) -> HttpServer:
        """Starts to serve on host:port, with TLS if `tls` is given; port 0 takes a free one.

        Raises:
            ConfigError: the port cannot be used, or a needed package is not installed.
        """
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(f"an HTTP port needs {', '.join(missing)}", hint="pip install 'ferrorpc[ui]'")
        listening = _listen(host, port)
        import uvicorn

        from ferrorpc_coordinator.web.connection_limits import LimitedHttpProtocol
        from ferrorpc_coordinator.web.page import Page

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                """Leaves signals to the coordinator."""
                yield

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                """Creates the listeners, because uvicorn would allow a minute for a TLS handshake."""
                await super().startup([])
                connection = functools.partial(LimitedHttpProtocol, config, self.server_state, {})
                loop, seconds = asyncio.get_running_loop(), None if context is None else HANDSHAKE_SECONDS
                for one in sockets or ():
                    opened = await loop.create_server(connection, sock=one, ssl=context, ssl_handshake_timeout=seconds)
                    self.servers.append(opened)

        context = None if tls is None else tls.server_context()
        streams = EventStreams(view)
        config = uvicorn.Config(
            Page(view, streams).application(loopback=is_loopback(listening.getsockname()[0])),
            http=LimitedHttpProtocol,
            lifespan="off",
            log_config=None,
            # Warnings are about single requests; anyone who reaches the port could fill a disk with them.
            log_level="error",
            access_log=False,
            server_header=False,
            ws="none",
            limit_concurrency=256,
            timeout_keep_alive=15,
            timeout_graceful_shutdown=1,
        )
        server = Server(config)
        streams.start()
        task = asyncio.create_task(server.serve(sockets=[listening]))
        return cls(listening.getsockname()[1], server, task, streams)

    async def stop(self) -> None:
        """Ends open responses and closes the port."""
        self._streams.stop()
        self._server.should_exit = True
        await asyncio.wait((self._task,), timeout=STOP_SECONDS + 1.0)


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port, _BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"the HTTP port {join_address(host, port)} cannot be used: {error.strerror}", hint="give another --http-port"
        ) from None
