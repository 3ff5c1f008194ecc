"""Tells the coordinator how processes ended, from a process of its own, so that the launcher never loads gRPC.

    python -m ferrorpc.cli.launcher.reporter ADDRESS JOB < one JSON object a line > "ok" or "failed: ..." a line

An exit report turns a suspicion into a death at once: the peers need not wait for the grace in which a member whose
stream broke may come back.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import click

from ferrorpc.errors import CoordinatorUnavailableError, FerroError

PATIENCE_SECONDS: Final = 60.0
"""How long a report is made again while nobody is there to take it: what ended a process may have ended the coordinator."""
PAUSE_SECONDS: Final = 0.2


def serve(address: str, job: str) -> None:
    """Reports each line of standard input; answers on standard output."""
    from ferrorpc.cli.client import call, connect, token
    from ferrorpc.config import Config
    from ferrorpc.v1.session_pb2 import UnaryReportRequest

    config = Config({"job": job})
    for line in sys.stdin:
        report = _request(json.loads(line))

        def deliver(report: Any = report) -> None:
            # A connection each: reports are rare, and by the next one certificates may have been renewed.
            with connect(address, config) as stub:
                request = UnaryReportRequest(job=job, token=token(config), request=report)
                call(stub.Report, request, address, wait_for_ready=True)

        click.echo(_delivered(deliver))
        sys.stdout.flush()


def _delivered(deliver: Callable[[], None]) -> str:
    """What to answer once a report was taken, or will not be. To report the same exit twice does no harm."""
    until, nothing = time.monotonic() + PATIENCE_SECONDS, threading.Event()
    while True:
        try:
            deliver()
            return "ok"
        except CoordinatorUnavailableError as error:
            if time.monotonic() >= until:
                return f"failed: {error.message}"
        except FerroError as error:
            return f"failed: {error.message}"
        nothing.wait(PAUSE_SECONDS)


def _request(report: dict[str, Any]) -> Any:
    from ferrorpc.v1 import session_pb2

    return session_pb2.ReportRequest(
        exit=session_pb2.ProcessExit(
            name=report["name"], instance_id=report["launch"], returncode=report["returncode"], reason=report["reason"]
        )
    )


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2])
