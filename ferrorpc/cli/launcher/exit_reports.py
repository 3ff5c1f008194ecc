"""The launcher's end of the reporter (reporter.py): hands it exits and counts its answers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

from ferrorpc.cli.launcher.child import Child, Nursery


class ExitReports:
    """Exit reports on their way to the coordinator. The process behind it is started at first use."""

    def __init__(self, nursery: Nursery, address: str, job: str, environment: Mapping[str, str]) -> None:
        self._nursery = nursery
        self._command = [sys.executable, "-P", "-m", "ferrorpc.cli.launcher.reporter", address, job]
        self._environment = dict(environment)
        self.child: Child | None = None
        self.outstanding = 0
        """Reports without an answer yet."""

    def start(self) -> Child:
        """Starts the reporter, so that a later report need not wait for its imports."""
        self.child = self._nursery.start(self._command, self._environment, stdin=subprocess.PIPE)
        return self.child

    def send(self, name: str, launch: str, returncode: int, reason: str) -> None:
        """Reports the end of the member `name` that was started as `launch`. Never blocks for the answer."""
        assert self.child is not None
        assert self.child.stdin is not None
        line = json.dumps({"name": name, "launch": launch, "returncode": returncode, "reason": reason}) + "\n"
        try:
            self.child.stdin.write(line.encode())
            self.outstanding += 1
        except BrokenPipeError:
            self.outstanding = 0  # the reporter is gone: the coordinator finds out by the ended stream and the lease

    def answered(self, data: bytes) -> None:
        """The reporter wrote to its standard output; b"" is its end."""
        self.outstanding = max(0, self.outstanding - data.count(b"\n")) if data else 0
