"""Tells the coordinator how processes ended, from a process of its own, so that the launcher never loads gRPC.

    python -m ferrorpc.cli.launcher.reporter ADDRESS JOB < one JSON object a line > "ok" or "failed: ..." a line

An exit report turns a suspicion into a death at once: the peers need not wait for the grace in which a member whose
stream broke may come back.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final

import click

_REPORT_SECONDS: Final = 5.0


def serve(address: str, job: str) -> None:
    """Reports each line of standard input; answers on standard output."""
    import grpc

    from ferrorpc.cli.client import connect, token
    from ferrorpc.config import Config
    from ferrorpc.v1 import session_pb2

    config = Config()
    with connect(address, config) as stub:
        for line in sys.stdin:
            try:
                stub.Report(
                    session_pb2.UnaryReportRequest(job=job, token=token(config), request=_request(json.loads(line))),
                    timeout=_REPORT_SECONDS,
                    wait_for_ready=True,
                )
                click.echo("ok")
            except grpc.RpcError as error:
                click.echo(f"failed: {error.code().name}: {error.details()}")
            sys.stdout.flush()


def _request(report: dict[str, Any]) -> Any:
    from ferrorpc.v1 import session_pb2

    return session_pb2.ReportRequest(
        exit=session_pb2.ProcessExit(name=report["name"], returncode=report["returncode"], reason=report["reason"])
    )


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2])
