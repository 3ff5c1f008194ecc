"""`ferrorpc health`: asks any gRPC server with grpc.health.v1 for its status; container probes run it."""

from __future__ import annotations

from typing import Final

import click

from ferrorpc.cli.client import CALL_SECONDS, address_of
from ferrorpc.cli.parameters import Seconds, coordinator_option
from ferrorpc.config import Config

_SECONDS_MAX: Final = 1e6
"""Eleven days. gRPC takes some times beyond its own range for ones that have passed."""
_HINT: Final = "check that it runs there (`ferrorpc coordinator`), its address, and that both sides have TLS or neither"
_HINT_SERVICE: Final = "leave --service out to ask about the whole server, or give a service's full name, as in its .proto file"


@click.command("health")
@coordinator_option
@click.option("--service", default="", help="A service's full name; empty for the whole server.")
@click.option(
    "--timeout", "timeout_seconds", type=Seconds(0.01, _SECONDS_MAX), default=CALL_SECONDS, show_default=True, help="Seconds."
)
def command(address: str | None, service: str, timeout_seconds: float) -> int:
    """Ask a server whether it is healthy. Prints its answer; exit code 0 if it serves, else 1."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from ferrorpc.coordination.channel import ChannelFactory

    config = Config({"coordinator": address})
    where = address_of(config)
    connector = ChannelFactory(where, config["job"], config)
    with connector() as opened:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            response = health_pb2_grpc.HealthStub(opened).Check(request, timeout=timeout_seconds)
        except grpc.RpcError as error:
            explained = connector.diagnose() if error.code() is grpc.StatusCode.UNAVAILABLE else None
            hint = _HINT_SERVICE if error.code() is grpc.StatusCode.NOT_FOUND else _HINT
            click.echo(
                f"{where}: {error.code().name}: {error.details()}\ntry: {hint}" if explained is None else explained, err=True
            )
            return 1
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    click.echo(f"{where}: {status}")
    return 0 if response.status == health_pb2.HealthCheckResponse.SERVING else 1
