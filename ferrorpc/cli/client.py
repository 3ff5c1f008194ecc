"""How the commands reach a coordinator: one channel, made from the settings, closed at the end, its errors translated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ferrorpc.config import DEFAULT_PORT, Config
from ferrorpc.errors import CoordinatorUnavailableError

if TYPE_CHECKING:
    import grpc

    from ferrorpc.v1.session_pb2_grpc import CoordinatorServiceStub

CALL_SECONDS: Final = 5.0
Response = TypeVar("Response")


def address_of(given: str | None, config: Config) -> str:
    """The coordinator's host:port: the flag, else FERRORPC_COORDINATOR, else this machine's default port."""
    return given or config["coordinator"] or f"127.0.0.1:{DEFAULT_PORT}"


def token(config: Config) -> str:
    """The job's secret; empty without FERRORPC_TOKEN_FILE. Raises ConfigError when the file cannot be read."""
    from ferrorpc.coordination.channel import read_token

    return read_token(config["token_file"])


@contextmanager
def channel(address: str, config: Config) -> Iterator[grpc.Channel]:
    """A channel to the coordinator at `address`, with TLS where the settings ask for it.

    Raises:
        AuthenticationError: nobody could be reached, and TLS is why.
    """
    from ferrorpc.coordination.channel import Connector

    connector = Connector(address, config["job"], config)
    opened = connector()
    try:
        yield opened
    except CoordinatorUnavailableError:
        better = connector.diagnose()
        if better is None:
            raise
        raise better from None
    finally:
        opened.close()


@contextmanager
def connect(address: str, config: Config) -> Iterator[CoordinatorServiceStub]:
    """The coordinator's unary methods."""
    from ferrorpc.v1.session_pb2_grpc import CoordinatorServiceStub

    with channel(address, config) as opened:
        yield CoordinatorServiceStub(opened)


def call(method: Callable[..., Response], request: Any, address: str, *, wait_for_ready: bool = False) -> Response:
    """One unary call. Raises the coordinator's own error, or CoordinatorUnavailableError naming `address`."""
    import grpc

    from ferrorpc.wire.status import error_of

    try:
        return method(request, timeout=CALL_SECONDS, wait_for_ready=wait_for_ready)
    except grpc.RpcError as error:
        raise error_of(error, f"the coordinator at {address}") from None
