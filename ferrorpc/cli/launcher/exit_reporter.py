"""The exit reporter process tells the coordinator how workers ended, so that the launcher need not load gRPC.

    python -m ferrorpc.cli.launcher.exit_reporter ADDRESS JOB < one JSON object a line > "ready", then an answer a line

An answer is "ok" or "failed: ...". After an exit report the coordinator declares a suspect member dead at once. Its peers need
not wait for the grace period in which a member whose stream broke may resume.

Signals that schedulers send to every process of a job do not end it: exits are still to be reported. It ends with the launcher.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import click

from ferrorpc.cli import client
from ferrorpc.cli.launcher.child_processes import Child, ChildProcesses
from ferrorpc.cli.launcher.signals import FORWARDED_SIGNALS, STOP_SIGNALS
from ferrorpc.config import Config
from ferrorpc.errors import ConfigError, CoordinatorUnavailableError, FerroError

if TYPE_CHECKING:
    from ferrorpc.v1.session_pb2 import ReportRequest

RETRY_SECONDS: Final = 60.0
"""How long a report is retried while no coordinator answers: what killed a worker may have killed the coordinator too."""
RETRY_PAUSE_SECONDS: Final = 0.2


class ExitReporter:
    """The launcher's side: reports exits of workers through a child process that `start` starts, and counts its answers."""

    def __init__(self, children: ChildProcesses, address: str, job: str, environment: Mapping[str, str]) -> None:
        self._children = children
        self._command = [sys.executable, "-P", "-m", "ferrorpc.cli.launcher.exit_reporter", address, job]
        self._environment = dict(environment)
        self.child: Child | None = None
        self.started = False
        """Whether `start` was called; its process may be missing."""
        self.ready = False
        """Whether the process has made its imports, which take it seconds on a busy machine."""
        self.unanswered = 0
        """Reports without an answer yet."""

    def start(self) -> Child:
        """Starts the process ahead of time, so that a report need not wait for its imports.

        Raises:
            ConfigError: it cannot be started. Reports are then dropped.
        """
        self.started = True
        self.child = self._children.start(self._command, self._environment, stdin=subprocess.PIPE)
        assert self.child.stdin is not None
        os.set_blocking(self.child.stdin.fileno(), False)
        return self.child

    def send(self, name: str, launch: str, returncode: int, reason: str) -> None:
        """Reports the exit of the member `name` whose process was started as `launch`. Does not wait for the answer.

        Each report is retried for up to a minute, and many may wait in the pipe. One for which the pipe has no room is dropped.
        The coordinator then notices the ended stream instead, as it does where the process is gone.
        """
        if self.child is None:
            return
        assert self.child.stdin is not None
        line = json.dumps({"name": name, "launch": launch, "returncode": returncode, "reason": reason}) + "\n"
        try:
            if self.child.stdin.write(line.encode()) is not None:  # None: no room. A line is at most PIPE_BUF, so never cut
                self.unanswered += 1
        except BrokenPipeError:
            self.unanswered = 0

    def on_output(self, data: bytes) -> None:
        """Takes the process's standard output; b"" is its end."""
        answers = data.count(b"\n")
        if answers and not self.ready:
            self.ready = True
            answers -= 1
        self.unanswered = max(0, self.unanswered - answers) if data else 0


def serve(address: str, job: str) -> None:
    """The process: reports each line of standard input and answers on standard output, once it has said that it is ready."""
    from ferrorpc.v1.session_pb2 import ProcessExit, ReportRequest

    config = Config({"coordinator": address, "job": job})
    try:
        client.token(config)
    except ConfigError as error:
        click.echo(f"ferrorpc: the coordinator is not told how workers end: {error}", err=True)
    click.echo("ready")
    sys.stdout.flush()
    for line in sys.stdin:
        told = json.loads(line)
        ended = ProcessExit(name=told["name"], instance_id=told["launch"], returncode=told["returncode"], reason=told["reason"])
        click.echo(_delivered(ReportRequest(exit=ended), config))
        sys.stdout.flush()


def _delivered(report: ReportRequest, config: Config) -> str:
    """The answer once a report was accepted or has failed for good. Reporting the same exit twice is harmless."""
    from ferrorpc.guard import SYSTEM_CLOCK as clock

    until = clock.now() + RETRY_SECONDS
    while True:
        try:
            client.report(report, config, wait_for_ready=True)
            return "ok"
        except CoordinatorUnavailableError as error:
            if clock.now() >= until:
                return f"failed: {error.message}"
        except FerroError as error:
            return f"failed: {error.message}"
        clock.parker().park(clock.now() + RETRY_PAUSE_SECONDS)


if __name__ == "__main__":
    for number in (*STOP_SIGNALS, *FORWARDED_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    serve(sys.argv[1], sys.argv[2])
