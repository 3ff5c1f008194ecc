"""The launcher's own coordinator: a child process with a temporary journal, started again on its address when it dies."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ferrorpc.cli.launcher.child import Child, Nursery
from ferrorpc.cli.launcher.gang import FOREVER
from ferrorpc.cli.launcher.output import LineBuffer
from ferrorpc.cli.launcher.signals import describe
from ferrorpc.exit_codes import EXIT_CONFIG

_RESTART_SECONDS: Final = 0.1
_RESTART_SECONDS_MAX: Final = 2.0
_STILLBORN_MAX: Final = 3
"""So many starts in a row that gave up before they listened mean that it cannot start at all."""


class OwnCoordinator:
    """Keeps one coordinator running at one address. Its journal makes a restart invisible to the workers.

    Args:
        data_dir: a temporary directory that the nursery removes.
        http_port: of its status page; None leaves that to the environment.
    """

    def __init__(
        self, nursery: Nursery, address: str, data_dir: Path, environment: Mapping[str, str], http_port: int | None = None
    ) -> None:
        self._nursery = nursery
        # -P: the user's directory must not shadow what the coordinator imports.
        self._command = [sys.executable, "-P", "-m", "ferrorpc_coordinator", "--listen", address, "--data-dir", str(data_dir)]
        self._command += [] if http_port is None else ["--http-port", str(http_port)]
        self._environment = dict(environment)
        self.page_address = ""
        """host:port of its status page, once it listens; empty where it has none."""
        self._announcements = LineBuffer()
        self.has_listened = False
        """Whether it was ever in service."""
        self._stillborn = 0
        self._delay = _RESTART_SECONDS
        self.deadline = FOREVER
        """When it is started again; finite only while it is down."""
        self.child = self._start()

    @property
    def cannot_start(self) -> bool:
        """Whether starting it again makes no sense."""
        return self._stillborn >= _STILLBORN_MAX

    def announced(self, data: bytes) -> None:
        """It wrote to its standard output: from "listening ..." on it is in service."""
        for line in self._announcements.feed(data):
            if line.startswith(b"listening"):
                self.has_listened = True
                self._stillborn = 0
                self._delay = _RESTART_SECONDS
                self.page_address = line.partition(b" http ")[2].decode()

    def check(self, now: float) -> str | None:
        """Notices its end, and plans the restart. Returns how it ended, once."""
        if self.deadline != FOREVER or self.child.poll() is None:
            return None
        assert self.child.returncode is not None
        if self.child.returncode > 0:  # it gave up by itself; one that was killed may well live the next time
            is_wrong = self.child.returncode == EXIT_CONFIG and not self.has_listened  # and will be the next time
            self._stillborn = _STILLBORN_MAX if is_wrong else self._stillborn + 1
        self.deadline = now + self._delay
        self._delay = min(2 * self._delay, _RESTART_SECONDS_MAX)
        return describe(self.child.returncode)

    def restart(self) -> Child:
        """Starts it again on the same address and journal."""
        self._nursery.discard(self.child)
        self.deadline = FOREVER
        self.child = self._start()
        return self.child

    def _start(self) -> Child:
        self._announcements = LineBuffer()
        return self._nursery.start(self._command, self._environment)
