"""ASGI middleware: who may read the HTTP port, and the security headers of its responses. The port is read-only.

If the coordinator has tokens, every path except /healthz needs one that is valid for every job, of any role: `Authorization:
Bearer TOKEN`, or as the password of basic authentication. On loopback without tokens, only requests whose Host is loopback are
answered; otherwise a web page could read this port through a browser by DNS rebinding.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias

from ferrorpc.wire.address import is_loopback
from ferrorpc_coordinator.state.access import Access

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS: Final = frozenset({"/healthz"})
_HEADERS: Final = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)


class AccessMiddleware:
    """Checks requests before they reach an ASGI application."""

    def __init__(self, app: App, access: Access, *, loopback: bool) -> None:
        self._app = app
        self._access = access
        self._loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        headers = dict(scope["headers"])
        if self._loopback and not self._access.requires_token and not is_loopback(_host(headers)):
            await _refuse(send_with_headers, 421, b"this address answers to localhost only\n")
        elif scope["path"] not in OPEN_PATHS and self._access.requires_token and not self._has_token(headers):
            await _refuse(send_with_headers, 401, b"a token that is valid for every job is needed\n")
        else:
            await self._app(scope, receive, send_with_headers)

    def _has_token(self, headers: dict[bytes, bytes]) -> bool:
        kind, _, value = headers.get(b"authorization", b"").partition(b" ")
        given = value.strip()
        if kind.lower() == b"basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif kind.lower() != b"bearer":
            return False
        return self._access.observes_all_jobs(given.decode("utf-8", "replace"))


def _host(headers: dict[bytes, bytes]) -> str:
    host = headers.get(b"host", b"").decode("latin-1")
    return host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]


async def _refuse(send: Send, status: int, text: bytes) -> None:
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(text)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b'Basic realm="ferrorpc"'))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})
