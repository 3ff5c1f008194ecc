"""Channels to a coordinator, and what peers trust each other by, as the settings ask for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc

from ferrorpc.errors import ConfigError
from ferrorpc.transports.grpc_tls import Tls
from ferrorpc.wire.options import session_channel


def connector(address: str, config: Mapping[str, Any]) -> Callable[[], grpc.Channel]:
    """Makes channels to `address`, with TLS when `tls_ca` or `tls_cert` is set.

    Raises:
        ConfigError: a file of the tls_* settings cannot be read.
    """
    if not (config["tls_ca"] or config["tls_cert"]):
        return lambda: grpc.insecure_channel(address, options=session_channel())
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_content(config, "tls_ca"),
        private_key=_content(config, "tls_key"),
        certificate_chain=_content(config, "tls_cert"),
    )
    return lambda: grpc.secure_channel(address, credentials, options=session_channel())


def peer_tls(config: Mapping[str, Any]) -> Tls | None:
    """What workers prove to each other who they are with; None unless all three tls_* settings are set.

    Raises:
        ConfigError: a file of the tls_* settings cannot be read.
    """
    authority, certificate, key = (_content(config, name) for name in ("tls_ca", "tls_cert", "tls_key"))
    if authority is None or certificate is None or key is None:
        return None
    return Tls(authority, certificate, key)


def read_token(path: str | None) -> str:
    """The job's secret, from its file; empty without one.

    Raises:
        ConfigError: the file cannot be read.
    """
    return "" if path is None else _read(path, "token_file").decode().strip()


def _content(config: Mapping[str, Any], name: str) -> bytes | None:
    return None if config[name] is None else _read(config[name], name)


def _read(path: str, name: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}={path!r} cannot be read: {error.strerror}") from None
