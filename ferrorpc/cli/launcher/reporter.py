"""Tells the coordinator how processes ended, from a process of its own, so that the launcher never loads gRPC.

    python -m ferrorpc.cli.launcher.reporter ADDRESS JOB < one JSON object a line > "ok" or "failed: ..." a line

An exit report turns a suspicion into a death at once: the peers need not wait for the grace in which a member whose
stream broke may come back.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from ferrorpc.errors import FerroError


def serve(address: str, job: str) -> None:
    """Reports each line of standard input; answers on standard output."""
    from ferrorpc.cli.client import call, connect, token
    from ferrorpc.config import Config
    from ferrorpc.v1.session_pb2 import UnaryReportRequest

    config = Config({"job": job})
    for line in sys.stdin:
        try:
            request = UnaryReportRequest(job=job, token=token(config), request=_request(json.loads(line)))
            # A connection each: reports are rare, and by the next one certificates may have been renewed.
            with connect(address, config) as stub:
                call(stub.Report, request, address, wait_for_ready=True)
            click.echo("ok")
        except FerroError as error:
            click.echo(f"failed: {error.message}")
        sys.stdout.flush()


def _request(report: dict[str, Any]) -> Any:
    from ferrorpc.v1 import session_pb2

    return session_pb2.ReportRequest(
        exit=session_pb2.ProcessExit(
            name=report["name"], instance_id=report["launch"], returncode=report["returncode"], reason=report["reason"]
        )
    )


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2])
