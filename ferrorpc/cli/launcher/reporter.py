"""Tells the coordinator how processes ended, from a process of its own, so that the launcher never loads gRPC.

    python -m ferrorpc.cli.launcher.reporter ADDRESS JOB < one JSON object a line > "ok" or "failed: ..." a line

An exit report turns a suspicion into a death at once: the peers need not wait for the grace in which a member whose
stream broke may come back.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import click

from ferrorpc.errors import CoordinatorUnavailableError, FerroError
from ferrorpc.guard import SYSTEM_CLOCK

PATIENCE_SECONDS: Final = 60.0
"""How long a report is made again while nobody is there to take it: what ended a process may have ended the coordinator."""
PAUSE_SECONDS: Final = 0.2


def serve(address: str, job: str) -> None:
    """Reports each line of standard input; answers on standard output."""
    from ferrorpc.cli.client import call, connect, token
    from ferrorpc.config import Config
    from ferrorpc.v1.session_pb2 import UnaryReportRequest

    config = Config({"job": job})

    def deliver(report: Any) -> None:
        request = UnaryReportRequest(job=job, token=token(config), request=report)
        # A connection each: reports are rare, and by the next one certificates may have been renewed.
        with connect(address, config) as stub:
            call(stub.Report, request, address, wait_for_ready=True)

    for line in sys.stdin:
        click.echo(_delivered(partial(deliver, _request(json.loads(line)))))
        sys.stdout.flush()


def _delivered(deliver: Callable[[], None]) -> str:
    """What to answer once a report was taken, or will not be. To report the same exit twice does no harm."""
    clock = SYSTEM_CLOCK
    until = clock.now() + PATIENCE_SECONDS
    while True:
        try:
            deliver()
            return "ok"
        except CoordinatorUnavailableError as error:
            if clock.now() >= until:
                return f"failed: {error.message}"
        except FerroError as error:
            return f"failed: {error.message}"
        clock.parker().park(clock.now() + PAUSE_SECONDS)


def _request(report: dict[str, Any]) -> Any:
    from ferrorpc.v1 import session_pb2

    return session_pb2.ReportRequest(
        exit=session_pb2.ProcessExit(
            name=report["name"], instance_id=report["launch"], returncode=report["returncode"], reason=report["reason"]
        )
    )


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2])
