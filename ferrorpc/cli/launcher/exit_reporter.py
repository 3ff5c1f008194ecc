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
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import click

from ferrorpc.cli import client
from ferrorpc.cli.launcher.child_processes import Child, ChildProcesses
from ferrorpc.cli.launcher.output import LineBuffer
from ferrorpc.cli.launcher.signals import FORWARDED_SIGNALS, STOP_SIGNALS
from ferrorpc.config import Config
from ferrorpc.errors import ConfigError, CoordinatorUnavailableError, FerroError

if TYPE_CHECKING:
    from ferrorpc.v1.session_pb2 import ReportRequest

RETRY_SECONDS: Final = 60.0
"""How long a report is retried while no coordinator answers: what killed a worker may have killed the coordinator too."""
RETRY_PAUSE_SECONDS: Final = 0.2


class ExitReporter:
    """The launcher's side: reports exits of workers through a child process that `start` starts, and counts its answers.

    A job runs without it, too: the coordinator sees a worker's stream end.

    Args:
        say: told why exits are not reported, once until one is.
    """

    def __init__(
        self, children: ChildProcesses, address: str, job: str, environment: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self._children = children
        self._say = say
        self._command = [sys.executable, "-P", "-m", "ferrorpc.cli.launcher.exit_reporter", address, job]
        self._environment = dict(environment)
        self.child: Child | None = None
        self.started = False
        """Whether `start` was called; its process may be missing."""
        self._output = LineBuffer()
        self._has_complained = False
        self.ready = False
        """Whether the process has made its imports, which take it seconds on a busy machine."""
        self.unanswered = 0
        """Reports without an answer yet."""

    @property
    def runs(self) -> bool:
        """Whether its process is there."""
        return self.child is not None and self.child.poll() is None

    def start(self) -> Child | None:
        """Starts the process, in place of one that has ended: ahead of time, so that a report need not wait for its imports.

        Returns None where it cannot be started. Reports are then dropped.
        """
        if self.child is not None:
            self._children.discard(self.child)
        self.started, self.ready, self.child, self._output = True, False, None, LineBuffer()
        try:
            self.child = self._children.start(self._command, self._environment, stdin=subprocess.PIPE)
        except ConfigError as error:
            self._complain(error.message)
            return None
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
        for line in self._output.feed(data):
            self.ready = True
            answer, _, why = line.decode(errors="replace").partition(": ")
            self.unanswered -= answer in ("ok", "failed")
            if answer == "failed":
                self._complain(why)
            elif answer == "ok":
                self._has_complained = False
        if not data:
            self.unanswered = 0
            self._complain("the process that does so has ended")

    def _complain(self, why: str) -> None:
        if not self._has_complained:
            otherwise = "the coordinator notices lost workers by itself, which takes some seconds"
            self._say(f"exits of workers are not reported: {why}; {otherwise}")
        self._has_complained = True


def serve(address: str, job: str) -> None:
    """The process: reports each line of standard input and answers on standard output, once it has said that it is ready."""
    import ferrorpc.coordination.channel  # noqa: F401 - so that no report waits for it
    from ferrorpc.v1.session_pb2 import ProcessExit, ReportRequest

    config = Config({"coordinator": address, "job": job})
    click.echo("ready")
    for line in sys.stdin:
        told = json.loads(line)
        ended = ProcessExit(name=told["name"], instance_id=told["launch"], returncode=told["returncode"], reason=told["reason"])
        click.echo(_delivered(ReportRequest(exit=ended), config))


def _delivered(report: ReportRequest, config: Config) -> str:
    """The answer once a report was accepted or has failed for good. Reporting the same exit twice is harmless."""
    from ferrorpc.guard import SYSTEM_CLOCK as clock

    until = clock.now() + RETRY_SECONDS
    while True:
        try:
            client.report(report, config, wait_for_ready=True)
            return "ok"
        except FerroError as error:
            if not isinstance(error, CoordinatorUnavailableError) or clock.now() >= until:
                return f"failed: {error.message}"
        clock.parker().park(clock.now() + RETRY_PAUSE_SECONDS)


if __name__ == "__main__":
    for number in (*STOP_SIGNALS, *FORWARDED_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    serve(sys.argv[1], sys.argv[2])
