"""The exit reporter process: tells the coordinator how workers ended, so that the launcher need not load gRPC.

    python -m ferrorpc.cli.launcher.exit_reporter_main ADDRESS JOB < one JSON object a line > "ready", then an answer a line

An answer is "ok" or "failed: ...".

Signals that schedulers send to every process of a job do not end it: exits are still to be reported. It ends with the launcher.

After an exit report the coordinator declares a suspect member dead at once. Its peers need not wait for the grace period in
which a member whose stream broke may resume.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import click

from ferrorpc.cli.launcher.signals import FORWARDED_SIGNALS, STOP_SIGNALS
from ferrorpc.errors import ConfigError, CoordinatorUnavailableError, FerroError
from ferrorpc.guard import SYSTEM_CLOCK

RETRY_SECONDS: Final = 60.0
"""How long a report is retried while no coordinator answers: what killed a worker may have killed the coordinator too."""
RETRY_PAUSE_SECONDS: Final = 0.2


def serve(address: str, job: str) -> None:
    """Reports each line of standard input and answers on standard output, once it has said there that it is ready."""
    from ferrorpc.cli.client import call, connect, token
    from ferrorpc.config import Config
    from ferrorpc.v1.session_pb2 import UnaryReportRequest

    config = Config({"coordinator": address, "job": job})

    def deliver(report: Any) -> None:
        request = UnaryReportRequest(job=job, token=token(config), request=report)
        # A new connection for each: reports are rare, and certificates may have been renewed since the last one.
        with connect(config) as stub:
            call(stub.Report, request, config, wait_for_ready=True)

    try:
        token(config)
    except ConfigError as error:
        click.echo(f"ferrorpc: the coordinator is not told how workers end: {error}", err=True)
    click.echo("ready")
    sys.stdout.flush()
    for line in sys.stdin:
        click.echo(_delivered(partial(deliver, _request(json.loads(line)))))
        sys.stdout.flush()


def _delivered(deliver: Callable[[], None]) -> str:
    """The answer once a report was accepted or has failed for good. Reporting the same exit twice is harmless."""
    clock = SYSTEM_CLOCK
    until = clock.now() + RETRY_SECONDS
    while True:
        try:
            deliver()
            return "ok"
        except CoordinatorUnavailableError as error:
            if clock.now() >= until:
                return f"failed: {error.message}"
        except FerroError as error:
            return f"failed: {error.message}"
        clock.parker().park(clock.now() + RETRY_PAUSE_SECONDS)


def _request(report: dict[str, Any]) -> Any:
    from ferrorpc.v1 import session_pb2

    return session_pb2.ReportRequest(
        exit=session_pb2.ProcessExit(
            name=report["name"], instance_id=report["launch"], returncode=report["returncode"], reason=report["reason"]
        )
    )


if __name__ == "__main__":
    for number in (*STOP_SIGNALS, *FORWARDED_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    serve(sys.argv[1], sys.argv[2])
