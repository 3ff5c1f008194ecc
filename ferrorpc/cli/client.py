"""How the commands reach a coordinator: one channel, made from the settings, closed at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ferrorpc.config import DEFAULT_PORT, Config
from ferrorpc.errors import ConfigError

if TYPE_CHECKING:
    import grpc

    from ferrorpc.v1.session_pb2_grpc import CoordinatorServiceStub

CALL_SECONDS: Final = 5.0
_OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),  # http_proxy would hijack 127.0.0.1
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", 2 << 20),
)


def address_of(given: str | None, config: Config) -> str:
    """The coordinator's host:port: the flag, else FERRORPC_COORDINATOR, else this machine's default port."""
    return given or config["coordinator"] or f"127.0.0.1:{DEFAULT_PORT}"


def token(config: Config) -> str:
    """The job's bearer token; empty without FERRORPC_TOKEN_FILE.

    Raises:
        ConfigError: the file cannot be read.
    """
    if config["token_file"] is None:
        return ""
    return _contents("token_file", config["token_file"]).decode().strip()


@contextmanager
def channel(address: str, config: Config) -> Iterator[grpc.Channel]:
    """A channel to `address`, with TLS when FERRORPC_TLS_CA is set."""
    import grpc

    opened = (
        grpc.insecure_channel(address, options=_OPTIONS)
        if config["tls_ca"] is None
        else grpc.secure_channel(address, _credentials(config), options=_OPTIONS)
    )
    try:
        yield opened
    finally:
        opened.close()


@contextmanager
def connect(address: str, config: Config) -> Iterator[CoordinatorServiceStub]:
    """The coordinator's unary methods."""
    from ferrorpc.v1.session_pb2_grpc import CoordinatorServiceStub

    with channel(address, config) as opened:
        yield CoordinatorServiceStub(opened)


def _credentials(config: Config) -> Any:
    import grpc

    chain = None if config["tls_cert"] is None else _contents("tls_cert", config["tls_cert"])
    key = None if config["tls_key"] is None else _contents("tls_key", config["tls_key"])
    return grpc.ssl_channel_credentials(_contents("tls_ca", config["tls_ca"]), key, chain)


def _contents(setting: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"FERRORPC_{setting.upper()}={path}: {error.strerror}") from None
