"""The commands' connection to a coordinator: a channel made from the settings, and calls with translated errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ferrorpc.config import DEFAULT_PORT, Config
from ferrorpc.errors import CoordinatorUnavailableError

if TYPE_CHECKING:
    import grpc

    from ferrorpc.v1.session_pb2 import ReportRequest
    from ferrorpc.v1.session_pb2_grpc import CoordinatorServiceStub

CALL_SECONDS: Final = 5.0
Response = TypeVar("Response")

_LOCAL_ADDRESS: Final = f"127.0.0.1:{DEFAULT_PORT}"
_ADDRESS_HINT: Final = (
    "pass --coordinator HOST:PORT; on a terminal, `ferrorpc run` prints that of its own coordinator after two seconds"
)


def address_of(config: Config) -> str:
    """The coordinator's host:port; without a setting, this machine's default port."""
    return config["coordinator"] or _LOCAL_ADDRESS


def token(config: Config) -> str:
    """The bearer token, to be sent to the coordinator; empty without FERRORPC_TOKEN_FILE. Raises as `token_for`."""
    from ferrorpc.coordination.channel import token_for

    return token_for(address_of(config), config).current()


@contextmanager
def channel(config: Config) -> Iterator[grpc.Channel]:
    """A channel to the coordinator, with TLS where the settings ask for it.

    Raises:
        AuthenticationError: the connection failed because of TLS.
    """
    from ferrorpc.coordination.channel import ChannelFactory

    address = address_of(config)
    connector = ChannelFactory(address, config["job"], config)
    opened = connector()
    try:
        yield opened
    except CoordinatorUnavailableError as error:
        explained = connector.diagnose()
        if explained is None and address == _LOCAL_ADDRESS:
            explained = CoordinatorUnavailableError(error.message, hint=_ADDRESS_HINT)
        if explained is None:
            raise
        raise explained from None
    finally:
        opened.close()


@contextmanager
def connect(config: Config) -> Iterator[CoordinatorServiceStub]:
    """A stub for the coordinator's unary methods."""
    from ferrorpc.v1.session_pb2_grpc import CoordinatorServiceStub

    with channel(config) as opened:
        yield CoordinatorServiceStub(opened)


def call(method: Callable[..., Response], request: Any, config: Config, *, wait_for_ready: bool = False) -> Response:
    """One unary call. Raises the coordinator's own error, or CoordinatorUnavailableError naming its address."""
    import grpc

    from ferrorpc.wire.status import error_of

    try:
        return method(request, timeout=CALL_SECONDS, wait_for_ready=wait_for_ready)
    except grpc.RpcError as error:
        raise error_of(error, f"the coordinator at {address_of(config)}") from None


def report(told: ReportRequest, config: Config, *, wait_for_ready: bool = False) -> None:
    """Reports something about the settings' job, on a connection of its own: certificates may have been renewed since the last.

    Raises as `call`.
    """
    from ferrorpc.v1.session_pb2 import UnaryReportRequest

    with connect(config) as stub:
        request = UnaryReportRequest(job=config["job"], token=token(config), request=told)
        call(stub.Report, request, config, wait_for_ready=wait_for_ready)
