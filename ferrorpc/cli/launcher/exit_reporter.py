"""The launcher's side of the exit reporter process (exit_reporter_main.py): sends it exits and counts its answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

from ferrorpc.cli.launcher.child_processes import Child, ChildProcesses


class ExitReporter:
    """Reports exits of workers to the coordinator, through a child process that `start` starts."""

    def __init__(self, children: ChildProcesses, address: str, job: str, environment: Mapping[str, str]) -> None:
        self._children = children
        self._command = [sys.executable, "-P", "-m", "ferrorpc.cli.launcher.exit_reporter_main", address, job]
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
